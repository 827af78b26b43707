"""Values: each is what its field asks for, or told with what is allowed."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, MinLen
from pydantic import AfterValidator, Field

from mpp.config import RecipeError, dump_recipe, load_recipe


def odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("an odd number is needed, so that there is a middle")
    return value


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Mean:
    kind: Literal["mean"] = "mean"
    bits: Annotated[int, Ge(1), Le(8)] = 3


@dataclass(frozen=True, kw_only=True)
class Pixels:
    kind: Literal["pixels"] = "pixels"
    normalize: bool = False


@dataclass(frozen=True, kw_only=True)
class Init:
    path: Path
    strict: bool = True


Target = Annotated[Mean | Pixels, Field(discriminator="kind")]
Side = Annotated[int, Ge(1)]


@dataclass(frozen=True, kw_only=True)
class Config:
    whole: int = 0
    steps: Side = 1
    kernel: Annotated[int, AfterValidator(odd)] = 3
    depth: Annotated[int | None, Ge(2)] = None
    real: float = 0.0
    lr: Annotated[float, Field(gt=0)] = 1e-3
    clip: Annotated[float, Gt(0)] | None = 1.0
    flag: bool = False
    name: str = "a"
    note: str | None = None
    out: Path = Path("runs/x")
    init: Path | Init | None = None
    size: Literal["tiny", "none", "on", "5"] | int = "tiny"
    level: Literal[1, 2, None] = 1
    either: int | str = 0
    answer: bool | str = "maybe"
    number: int | float = 0
    colour: Colour = Colour.RED
    image_size: Side | tuple[Side, Side] = 32
    betas: tuple[float, float] = (0.9, 0.95)
    span: tuple[float, float] | None = None
    words: Annotated[tuple[str, ...], MinLen(1)] = ("a",)
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    target: Target = Mean()
    second: Target | None = None
    options: dict[str, Any] = field(default_factory=dict)
    table: dict[int, tuple[float, ...]] = field(default_factory=dict)


def load(*words: str) -> Config:
    return load_recipe(Config, list(words))


def told(*words: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(*words)
    return str(caught.value)


READ: dict[str, dict[str, Any]] = {
    "whole": {
        "-1": -1,
        "+3": 3,
        "0": 0,
        "1e5": 100_000,
        "100_000": 100_000,
        "2000.0": 2000,
        "1" * 30: int("1" * 30),
    },
    "real": {"1e-3": 1e-3, "3E-4": 3e-4, ".5": 0.5, "1": 1.0, "-1_0.5": -10.5, "5.": 5.0, "1e5": 1e5},
    "clip": {"null": None, "~": None, "None": None, "none": None, "2": 2.0},
    "flag": {"true": True, "True": True, "on": True, "yes": True, "FALSE": False, "off": False, "no": False},
    "name": {text: text for text in ["2024", "on", "No", "true", "1:30", "010", "1e5", "0x10", "1_0", "none", "nan"]}
    | {text: text for text in ["a: b # c", "*.jpg", "@home", "&x", "!tag", "50%", "a, b", "C:\\x", "-", "é"]}
    | {"": "", "'null'": "null", '"[1]"': "[1]", "'a": "'a"},
    "note": {"null": None, "none": None, "nulls": "nulls", "'null'": "null", "2": "2"},
    "out": {
        "2024": Path("2024"),
        "~/runs": Path.home() / "runs",
        "'~/runs'": Path("~/runs"),
        "a b": Path("a b"),
    },
    "init": {"x": Path("x"), "{path: x}": Init(path=Path("x")), "null": None},
    "size": {"none": "none", "on": "on", "5": "5", "6": 6},
    "level": {"2": 2, "null": None},
    "either": {"5": 5, "'5'": "5", "five": "five", "1.5": "1.5"},
    "answer": {"yes": True, "'yes'": "yes", "maybe": "maybe"},
    "number": {"5": 5, "5.5": 5.5},
    "colour": {"blue": Colour.BLUE},
    "depth": {"null": None, "2": 2},
    "image_size": {"32": 32, "[48, 80]": (48, 80)},
    "span": {"[-1,1]": (-1.0, 1.0), "null": None},
    "words": {"tensorboard": ("tensorboard",), "[on, 1e5, 'null', 2024]": ("on", "1e5", "null", "2024")},
    "trackers": {"wandb": ("wandb",), "[]": (), "[wandb, tensorboard]": ("wandb", "tensorboard")},
    "pairs": {"[[1, 2], [3, 4]]": ((1, 2), (3, 4))},
    "target": {"{kind: pixels, normalize: on}": Pixels(normalize=True), "{bits: 1}": Mean(bits=1)},
    "options": {"{a: 1e-3, b: [on, True, null, 010]}": {"a": 1e-3, "b": ["on", True, None, "010"]}, "{}": {}},
    "table": {"{1: 2, 2: [3, 1e3]}": {1: (2.0,), 2: (3.0, 1000.0)}},
}


@pytest.mark.parametrize(("name", "text", "value"), [(name, *one) for name in READ for one in READ[name].items()])
def test_a_value_is_what_its_field_asks_for(name: str, text: str, value: Any, tmp_path: Path) -> None:
    recipe = load(f"--{name}={text}")
    read = getattr(recipe, name)
    assert read == value and type(read) is type(value)
    assert load(f"--{name}", text) == recipe
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load(str(tmp_path / "again.yaml")) == recipe


@pytest.mark.parametrize("text", ["none", "None", "null", "on", "No", "true", "1", "1e5", "~", "~/x", "", "010"])
def test_text_in_a_union_comes_back_as_text(text: str, tmp_path: Path) -> None:
    recipe = Config(name=text, note=text, either=text, answer=text, out=Path(text or "x"))
    (tmp_path / "a.yaml").write_text(dump_recipe(recipe))
    assert load(str(tmp_path / "a.yaml")) == recipe


def test_a_default_is_checked_like_any_value() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Slip:
        real: float = True
        whole: int = False
        name: str = None  # type: ignore[assignment]

    with pytest.raises(RecipeError) as caught:
        load_recipe(Slip, [])
    assert str(caught.value).splitlines()[1:] == [
        "  real: expected number, got true",
        "  whole: expected whole number, got false",
        "  name: expected text, got null",
    ]


@pytest.mark.parametrize("text", ["1e-3", "on", "2024", "1:30", "010", "1_000", "yes", "2024-01-01", "0o7"])
def test_a_file_is_read_like_the_command_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"name: {text}\nout: {text}")
    assert load(str(tmp_path / "a.yaml")) == Config(name=text, out=Path(text))


REFUSED: dict[str, dict[str, str]] = {
    "whole": dict.fromkeys(["true", "1.5", "010", "0x10", "null", "[1]", "1e99"], "expected whole number, got")
    | {
        "'5'": "expected whole number, got '5'; in quotes it is text",
        "1" * 5000: "expected whole number, got",
    },
    "steps": {"0": "expected whole number >= 1, got 0", "-1": "expected whole number >= 1, got -1"},
    "kernel": {"4": "expected whole number, got 4: an odd number is needed, so that there is a middle"},
    "depth": {"1": "expected whole number >= 2 | null, got 1"},
    "real": dict.fromkeys(["nan", ".inf", "-inf"], "numbers are finite")
    | dict.fromkeys(["true", "fast", "1e999", "1,5", "''"], "expected number, got"),
    "lr": {"0": "expected number > 0, got 0", "{x: 3}": "expected number > 0, got {x: 3}"},
    "flag": {"1": "expected true | false, got 1", "'False'": "expected true | false, got 'False'"},
    "name": {"null": "expected text, got null", "[a]": "expected text, got [a]"},
    "out": {"''": "expected path, got ''"},
    "level": {"3": "expected 1 | 2 | null, got 3"},
    "colour": {"green": "expected Colour, got 'green': should be 'red' or 'blue'"},
    "image_size": {
        "0": "expected whole number >= 1 | [whole number >= 1, whole number >= 1], got 0",
        "48,80": "got '48,80'; a list is written [48,80]",
        "[48, 0]": "image_size.1: expected whole number >= 1, got 0",
    },
    "betas": {"0.9": "expected [number, number], got 0.9", "[0.9]": "expected [number, number], got [0.9]"},
    "words": {"[]": "expected [text, ...] at least 1 long, got []"},
    "trackers": {"tensorbord": "trackers: expected tensorboard | wandb, got 'tensorbord'; did you mean tensorboard?"},
    "target": {"pixels": "expected section of kind mean | pixels, got 'pixels'; write {kind: pixels}"},
    "target.bits": {"9": "expected whole number >= 1 and <= 8, got 9"},
    "target.kind": {"pixel": "target.kind: expected mean | pixels, got 'pixel'; did you mean pixels?"},
    "second.bits": {"3": "second.kind: missing; expected mean | pixels"},
    "init.strict": {"no": "init.path: missing; expected path"},
    "table": {
        "{a: 1}": "table: expected whole number, got 'a'",
        "{1: x}": "table.1: expected number, got 'x'",
    },
}


WRONG = [(name, *one) for name in REFUSED for one in REFUSED[name].items()]


@pytest.mark.parametrize(("name", "text", "message"), WRONG)
def test_a_wrong_value_is_told_with_what_is_allowed(name: str, text: str, message: str) -> None:
    heading, line = told(f"--{name}={text}").splitlines()
    assert heading == "1 fault in the recipe:" and message in line, line
    assert line.endswith("(command line)") or "missing" in line
    assert len(line) < 200


@pytest.mark.parametrize("text", ["?", "0", "[1, 1, 1]", "{a: 1}", "true"])
def test_no_words_of_the_machinery_reach_the_person(text: str) -> None:
    for name in Config.__dataclass_fields__:
        message = told(f"--{name}={text}", "--nothing=1")
        assert not any(
            noise in message for noise in ["pydantic", "type=", "http", "Input", "function-", "tuple", "Plain"]
        )
