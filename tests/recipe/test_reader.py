"""What a person is told of a wrong recipe: everything at once, each with its place and its nearest name."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Ge
from pydantic import Field

from mpp.config import RecipeError, load_recipe


@dataclass(frozen=True, kw_only=True)
class Mean:
    kind: Literal["mean"] = "mean"
    bits: Annotated[int, Ge(1)] = 3

    def faults(self) -> Iterator[tuple[str, str]]:
        if self.bits > 8:
            yield "bits", f"{self.bits} bits make more classes than a head can hold"


@dataclass(frozen=True, kw_only=True)
class Pixels:
    kind: Literal["pixels"] = "pixels"
    normalize: bool = False


@dataclass(frozen=True, kw_only=True)
class Optim:
    lr: float = 1e-3
    warmup: int = 10
    clip: float | None = None


@dataclass(frozen=True, kw_only=True)
class Train:
    steps: int = 100
    seed: int = 0


Target = Annotated[Mean | Pixels, Field(discriminator="kind")]


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str = "a"
    target: Target = Mean()
    others: tuple[Target, ...] = ()
    pair: tuple[Target, Target] | tuple[Target] | None = None
    optim: Optim = Optim()
    train: Train = Train()

    def faults(self) -> Iterator[tuple[str, str]]:
        if self.optim.warmup >= self.train.steps:
            yield "optim.warmup", f"{self.optim.warmup} is not below train.steps = {self.train.steps}"
        if isinstance(self.target, Mean):
            assert 12 / (9 - self.target.bits)  # nine, which Mean has refused, divides by zero


def lines(*words: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(Config, list(words))
    return str(caught.value).splitlines()


RECIPE = """base: low.yaml
name:
- x
optim:
  lr: 1
  lr: 2
target: {kind: pixels, bits: 3}
bits: 3
others:
- {kind: mean, normalize: 1}
- {kind: pixel}
optim.clip: 3
"""


def test_all_faults_are_told_at_once_each_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "low.yaml").write_text("train:\n  sed: 1\n")
    (tmp_path / "a.yaml").write_text(RECIPE)
    where = "target.bits and others.bits and pair.bits"
    path, known = tmp_path / "a.yaml", "known in a recipe: name, target, others, pair, optim, train"
    told = lines(str(path), "--train.steps", "x")
    assert told[0] == f"9 faults in {path}:"
    assert told[1:] == [
        f"  optim.lr: given twice, first at {path}, line 5  ({path}, line 6)",
        f"  bits: unknown name (value 3); there is {where}; {known}  ({path}, line 8)",
        "  optim.clip: unknown name (value 3); dotted names are for the command line, in a file sections are nested"
        f"  ({path}, line 12)",
        f"  name: expected text, got [x]  ({path}, line 2)",
        "  target.bits: unknown name (value 3); it belongs to kind mean; known in target: kind, normalize"
        f"  ({path}, line 7)",
        "  others.0.normalize: unknown name (value 1); it belongs to kind pixels; known in others.0: kind, bits"
        f"  ({path}, line 10)",
        f"  others.1.kind: expected mean | pixels, got 'pixel'; did you mean pixels?  ({path}, line 11)",
        "  train.sed: unknown name (value 1); did you mean train.seed?; known in train: steps, seed"
        f"  ({tmp_path / 'low.yaml'}, line 2)",
        "  train.steps: expected whole number, got 'x'  (command line)",
    ]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("optim.lrr", "did you mean optim.lr?"),
        ("optim.warm-up", "did you mean optim.warmup?"),
        ("lr", "there is optim.lr"),
        ("train.lr", "there is optim.lr"),
        ("warmups", "there is optim.warmup"),
        ("optim.step", "there is train.steps"),
        ("target.normalise", "there is target.normalize and others.normalize and pair.normalize"),
        ("target.normalize", "it belongs to kind pixels"),
        ("tarin", "did you mean train?"),
        ("xyz", "known in a recipe: name, target"),
    ],
)
def test_an_unknown_name_is_told_with_what_may_be_meant(name: str, advice: str) -> None:
    (line,) = lines(f"--{name}=1")[1:]
    assert line.startswith(f"  {name}: unknown name (value 1); ") and advice in line


def test_checks_across_fields_are_all_told_once_the_types_are_right() -> None:
    assert lines("--target.bits=10", "--optim.warmup=100", "--others=[{kind: mean, bits: 11}]") == [
        "3 faults in the recipe:",
        "  target.bits: 10 bits make more classes than a head can hold  (command line)",
        "  others.0.bits: 11 bits make more classes than a head can hold  (command line)",
        "  optim.warmup: 100 is not below train.steps = 100  (command line)",
    ]
    assert lines("--train.steps=5")[1:] == ["  optim.warmup: 10 is not below train.steps = 5"]
    assert lines("--target.bits=10", "--optim.warmup=100", "--name=[]")[1:] == [
        "  name: expected text, got []  (command line)",
        "  target.bits: 10 bits make more classes than a head can hold  (command line)",
    ]
    assert lines("--others={kind: mean, bits: 12}")[1].startswith("  others.0.bits: 12 bits make")


def test_a_check_that_stumbles_over_what_is_told_already_hides_nothing() -> None:
    assert "9 bits make more classes" in lines("--target.bits=9")[1]  # Config.faults divides by zero here


def test_a_union_of_lists_takes_the_one_that_fits() -> None:
    one, two = Pixels(), Mean(bits=2)
    assert load_recipe(Config, ["--pair=[{kind: pixels}]"]).pair == (one,)
    assert load_recipe(Config, ["--pair=[{kind: pixels}, {kind: mean, bits: 2}]"]).pair == (one, two)
    assert "9 bits" in lines("--pair=[{kind: mean, bits: 9}]")[1]
    kinds = "section of kind mean | pixels"
    told = lines("--pair=[1, 2, 3]")[1]
    assert told == f"  pair: expected [{kinds}, {kinds}] | [{kinds}] | null, got [1, 2, 3]  (command line)"


@dataclass(frozen=True, kw_only=True)
class Strict:
    size: int
    inner: Optim
    target: Target
    where: str = "x"

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("size must not be negative")


def test_what_has_no_default_is_asked_for() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(Strict, [])
    assert str(caught.value).splitlines()[1:] == [
        "  size: missing; expected whole number",
        "  target: missing; expected section of kind mean | pixels",
    ]
    with pytest.raises(RecipeError, match=r"target\.kind: missing; expected mean \| pixels"):
        load_recipe(Strict, ["--size=3", "--target.bits=3"])
    with pytest.raises(RecipeError, match="1 fault in the recipe:\n  size must not be negative"):
        load_recipe(Strict, ["--size=-3", "--target.kind=mean"])
    assert load_recipe(Strict, ["--size=3", "--target.kind=mean"]) == Strict(size=3, inner=Optim(), target=Mean())
