"""Recipes: how files and overrides lie over one another, what is dumped, what differs."""

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, MinLen
from pydantic import Field

from mpp.config import RecipeError, differences, dump_recipe, load_recipe, recipe_path


@dataclass(frozen=True, kw_only=True)
class Mean:
    kind: Literal["mean"] = "mean"
    bits: Annotated[int, Ge(1), Le(8)] = 3


@dataclass(frozen=True, kw_only=True)
class Stem:
    width: Annotated[int, Ge(1)] = 64


@dataclass(frozen=True, kw_only=True)
class Pixels:
    kind: Literal["pixels"] = "pixels"
    normalize: bool = False
    stem: Stem = Stem(width=8)


@dataclass(frozen=True, kw_only=True)
class KNN:
    kind: Literal["knn"] = "knn"
    k: tuple[Annotated[int, Ge(1)], ...] = (10, 20)


@dataclass(frozen=True, kw_only=True)
class FewShot:
    kind: Literal["fewshot"] = "fewshot"
    shots: tuple[int, ...] = (1, 5)
    inner: Annotated[Mean | Pixels, Field(discriminator="kind")] = Pixels()


@dataclass(frozen=True, kw_only=True)
class Extend:
    steps: Annotated[int, Ge(1)]
    schedule: Literal["constant", "linear"] = "constant"


@dataclass(frozen=True, kw_only=True)
class Train:
    steps: Annotated[int, Ge(1)] = 1000
    seed: int = 0
    compile: bool = False
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    extend: tuple[Extend, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Optim:
    lr: Annotated[float, Gt(0)] = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: Annotated[int, Ge(0)] = 100
    clip: Annotated[float, Gt(0)] | None = 1.0


@dataclass(frozen=True, kw_only=True)
class Init:
    path: Path
    strict: bool = True


Target = Annotated[Mean | Pixels, Field(discriminator="kind")]
Side = Annotated[int, Ge(1)]


@dataclass(frozen=True, kw_only=True)
class Config:
    out: Path = Path("runs/x")
    name: str = "a"
    note: str | None = None
    either: int | str = 0
    number: int | float = 0
    image_size: Side | tuple[Side, Side] = 32
    range: tuple[float, float] | None = None
    words: Annotated[tuple[str, ...], MinLen(1)] = ("a",)
    target: Target = Mean(bits=5)
    second: Target | None = None
    optim: Optim = Optim()
    train: Train = Train()
    init: Init | None = None
    evaluations: tuple[Annotated[KNN | FewShot, Field(discriminator="kind")], ...] = (KNN(), FewShot())
    options: dict[str, Any] = field(default_factory=dict)
    table: dict[str, float] = field(default_factory=dict)

    def faults(self) -> Iterator[tuple[str, str]]:
        if self.optim.warmup >= self.train.steps:
            yield "optim.warmup", f"{self.optim.warmup} is not below train.steps = {self.train.steps}"


def load(*words: str) -> Config:
    return load_recipe(Config, list(words))


def told(*words: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(*words)
    return str(caught.value)


@pytest.fixture
def write(tmp_path: Path):
    def write(name: str, text: str) -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_overrides_change_the_default_section_and_need_no_kind() -> None:
    assert load("--target.bits", "2").target == Mean(bits=2)
    assert load("--optim.lr", "1").target == Mean(bits=5)


def test_a_changed_kind_starts_its_section_afresh() -> None:
    assert load("--target.kind", "pixels", "--target.normalize", "on").target == Pixels(normalize=True)
    inner = load("--evaluations.0.kind=fewshot", "--evaluations.0.inner.stem.width=2").evaluations[0]
    assert inner == FewShot(inner=Pixels(stem=Stem(width=2)))
    assert load("--target.kind", "mean").target == Mean(bits=5)  # not changed


def test_a_base_lies_below_and_its_path_is_relative_to_the_file(write) -> None:
    write("common/low.yaml", "name: low\noptim: {lr: 1, warmup: 7}\ntarget: {kind: mean, bits: 2}")
    write("mid.yaml", "base: common/low.yaml\noptim: {lr: 2}")
    top = write("deep/top.yaml", "base: ../mid.yaml\ntarget: {kind: pixels}\nevaluations: {kind: knn, k: 3}")
    recipe = load(top, "--optim.clip", "3")
    optim = Optim(lr=2, warmup=7, clip=3)
    assert recipe == Config(name="low", optim=optim, target=Pixels(), evaluations=(KNN(k=(3,)),))


ORDERLESS = [
    "--target.kind=pixels",
    "--target.stem.width=3",
    "--optim={lr: 3, clip: 2}",
    "--optim.warmup=4",
    "--train.extend.steps=9",
]


def test_the_order_of_overrides_does_not_matter(write) -> None:
    path = write("a.yaml", "target: {bits: 4}\noptim: {lr: 9}")
    expected = Config(
        target=Pixels(stem=Stem(width=3)),
        optim=Optim(lr=3, clip=2, warmup=4),
        train=Train(extend=(Extend(steps=9),)),
    )
    assert all(load(path, *words) == expected for words in itertools.permutations(ORDERLESS))
    assert load(*ORDERLESS, path) == expected


def test_sections_that_are_absent_by_default_are_made_by_dotted_names() -> None:
    assert load("--init.path", "x").init == Init(path=Path("x"))
    assert load("--second.kind=pixels", "--second.stem.width=1").second == Pixels(stem=Stem(width=1))
    assert load("--init={path: x}", "--init.strict=no").init == Init(path=Path("x"), strict=False)
    extended = (Extend(steps=100, schedule="linear"),)
    for words in (["--train.extend.steps", "1e2", "--train.extend.schedule", "linear"],
                  ["--train.extend.0.steps=100", "--train.extend.0.schedule=linear"],
                  ["--train.extend", "{steps: 100, schedule: linear}"],
                  ["--train.extend=[{steps: 100, schedule: linear}]"]):  # fmt: skip
        assert load(*words).train.extend == extended


def test_dotted_names_reach_into_lists() -> None:
    assert load("--evaluations.1.shots", "[1,5]", "--evaluations.0.k", "3").evaluations == (
        KNN(k=(3,)), FewShot(shots=(1, 5)))  # fmt: skip
    assert load("--evaluations.2.kind", "knn").evaluations == (KNN(), FewShot(), KNN())
    assert load("--optim.betas.1", "0.99").optim.betas == (0.9, 0.99)
    whole, part = "--evaluations={kind: knn}", "--evaluations.k=4"
    assert load(whole, part).evaluations == load(part, whole).evaluations == (KNN(k=(4,)),)
    assert "evaluations.4: there are only 2; the next would be evaluations.2" in told("--evaluations.4.k=1")
    assert "which one? There are 2: evaluations.0 (knn) or evaluations.1 (fewshot)" in told("--evaluations.k=1")


def test_dotted_names_reach_into_free_mappings_and_files_replace_them(write) -> None:
    write("low.yaml", "options: {a: 1, b: {c: 2}}")
    top = write("top.yaml", "base: low.yaml")
    changed = load(top, "--options.b.c", "x", "--options.d", "1e-3").options
    assert changed == {"a": 1, "b": {"c": "x"}, "d": 1e-3}
    assert load(write("top.yaml", "base: low.yaml\noptions: {z: 1}")).options == {"z": 1}


def test_what_cannot_be_a_command_line_is_told() -> None:
    message = told("--seed", "--train.steps", "1", "--train.steps=2", "-x", "--optim..lr=1", "--optim", "3",
                   "--optim.lr=1", "--range", "[1,", "--train.compile")  # fmt: skip
    for line in ["seed: needs a value: --seed VALUE", "train.steps: given twice: 1 and 2", "got '-x'",
                 "got '--optim..lr=1'", "optim: given as a whole and in part", "range: cannot read '[1,'",
                 "a value with blanks needs quotes", "train.compile: needs a value"]:  # fmt: skip
        assert line in message, message
    for stray, advice in [
        ("2]", "a value with blanks needs quotes around it; the recipe is a.yaml"),
        ("b.yaml", "the recipe is a.yaml"),
        ("train.steps=3", "write --train.steps=3"),
        ("\u2013\u2013train.steps=3", "two plain hyphens begin a name: --train.steps=3"),
        ("-steps", "two plain hyphens begin a name: --steps"),
        ("--train.steps 3", "a value with blanks needs quotes"),
    ]:
        message = told("a.yaml", "--range", "1", stray)
        assert f"expected --section.field VALUE, got {stray!r}; " in message and advice in message
    assert load("--train.steps=200", "--train.steps=200").train.steps == 200


def test_the_default_recipe_is_named_when_it_is_used(write, capsys) -> None:
    path = Path(write("quick.yaml", "name: quick"))
    assert load_recipe(Config, ["--train.seed", "3"], default=path) == Config(name="quick", train=Train(seed=3))
    assert capsys.readouterr().out == f"No recipe named: using {path}\n"
    assert recipe_path(["--train.seed", "3"], path) == path
    assert recipe_path(["--train.seed", "3", "x.yaml", "--a", "b"], path) == Path("x.yaml")
    with pytest.raises(RecipeError, match="name a recipe"):
        recipe_path([], None)


NASTY = ["", "null", "none", "~/x", "on", "1", "1e5", "010", "- a", "a: b", "a #b", "'", "[1]", "*x"]
NASTY += ["a\nb", "\u2028", "é", "\udc80"]


def some(dice: random.Random) -> Config:
    """A random recipe; its values lean towards those that YAML likes to misread."""
    real = lambda: dice.choice([dice.random(), 10.0 ** dice.randint(-300, 300), 3.0, 1e22])  # noqa: E731
    word = lambda: dice.choice(NASTY)  # noqa: E731
    target = lambda: dice.choice([Mean(bits=dice.randint(1, 8)), Pixels(stem=Stem(width=dice.randint(1, 9)))])  # noqa: E731
    few = lambda make: tuple(make() for _ in range(dice.randint(0, 3)))  # noqa: E731
    evaluation = lambda: dice.choice([KNN(k=few(lambda: 7)), FewShot(shots=few(lambda: -1), inner=target())])  # noqa: E731
    return Config(
        out=Path(word() or "x"), name=word(), note=dice.choice([None, word()]), either=dice.choice([3, word()]),
        number=dice.choice([dice.randint(-(10**20), 10**20), real()]), image_size=dice.choice([3, (48, 80)]),
        range=dice.choice([None, (-real(), real())]), words=(word(), *few(word)), target=target(),
        second=dice.choice([None, target()]), optim=Optim(lr=real(), clip=dice.choice([None, real()])),
        train=Train(steps=dice.randint(200, 10**9), compile=dice.random() < 0.5, trackers=few(lambda: "wandb"),
                    extend=few(lambda: Extend(steps=5))),
        init=dice.choice([None, Init(path=Path("x"))]), evaluations=few(evaluation),
        options={word(): dice.choice([word(), None, real(), True, [word(), 3], {word(): word()}])},
        table={word(): real()},
    )  # fmt: skip


def test_a_dumped_recipe_loads_to_an_equal_one(tmp_path: Path) -> None:
    dice, path = random.Random(0), tmp_path / "recipe.yaml"
    for recipe in [Config(), *(some(dice) for _ in range(40))]:
        path.write_text(dump_recipe(recipe), encoding="utf-8")
        assert load(str(path)) == recipe
        assert differences(recipe, load(str(path)), ignore=()) == []


def test_differences_name_each_leaf_that_changed() -> None:
    old, few = Config(), (KNN(k=(1,)), FewShot())
    new = replace(old, optim=Optim(lr=2e-3), target=Pixels(), evaluations=few, range=(0, 1))
    changed = ["range: null -> [0, 1]", "optim.lr: 0.001 -> 0.002", "evaluations.0.k: [10, 20] -> [1]"]
    assert differences(old, new, ignore=["target"]) == changed
    assert "target.bits: 5 -> (absent)" in differences(old, new, ignore=["optim", "evaluations.0"])
    assert differences(old, replace(old, train=Train(seed=1)), ignore=["train.seed"]) == []
    assert differences({"a": {"b": 1}, "ab": 1}, {"a": {"b": 2}, "ab": 2}, ignore=["a"]) == ["ab: 1 -> 2"]


def test_recipes_are_read_without_torch_and_in_a_moment() -> None:
    code = "import time, sys; t = time.process_time(); import mpp.config; "
    code += "print(time.process_time() - t, 'torch' in sys.modules)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    seconds, torch = zip(*(run.stdout.split() for run in runs), strict=True)
    assert set(torch) == {"False"} and min(map(float, seconds)) < 0.3


def test_help_shows_the_values_of_the_recipe_that_is_named(tmp_path, capsys):
    from mpp.pretrain_recipe import PretrainConfig

    path = tmp_path / "mine.yaml"
    path.write_text("train: {steps: 77}\nbackbone: {kind: vit, size: tiny}\n")
    with pytest.raises(SystemExit):
        load_recipe(PretrainConfig, [str(path), "--help"])
    text = capsys.readouterr().out
    assert f"values in {path}" in text
    (tmp_path / "copied.yaml").write_text(text)
    assert load_recipe(PretrainConfig, [str(tmp_path / "copied.yaml")]) == load_recipe(PretrainConfig, [str(path)])


def test_an_override_without_hyphens_is_no_recipe():
    from mpp.pretrain_recipe import PretrainConfig

    with pytest.raises(RecipeError, match="write --optim.lr=3"):
        load_recipe(PretrainConfig, ["optim.lr=3"])
