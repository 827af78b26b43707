"""`--help`: a recipe to copy, complete, that reads back."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from annotated_types import Ge, Interval, Len, MultipleOf
from pydantic import Field

from mpp.config import RecipeError, help_text, load_recipe


@dataclass(frozen=True, kw_only=True)
class Sized:
    size: Annotated[int, Interval(ge=1, le=8)] = 4
    """cells
    per side"""


@dataclass(frozen=True, kw_only=True)
class Mean(Sized):
    """The mean colour of a patch.

    Nothing of this.
    """

    kind: Literal["mean"] = "mean"
    bits: Annotated[int, Field(ge=1, le=8)] = 3
    """bits per channel"""


@dataclass(frozen=True, kw_only=True)
class Pixels:
    kind: Literal["pixels"] = "pixels"
    path: Path
    """where to look: a 'folder' # not a file"""
    inner: Annotated[Mean | None, Field()] = None


@dataclass(frozen=True, kw_only=True)
class Extend:
    steps: int
    schedule: Literal["constant", "linear"] = "constant"


Target = Annotated[Mean | Pixels, Field(discriminator="kind")]


@dataclass(frozen=True, kw_only=True)
class Needy:
    name: str


@dataclass(frozen=True, kw_only=True)
class Config:
    out: Path
    """the run"""
    text: str = "on: 'x' # \n"
    none: str | None = "null"
    side: Annotated[int, MultipleOf(8)] | tuple[int, int] = (48, 80)
    real: float = 1e-5
    words: Annotated[tuple[str, ...], Len(1, 3)] = ("1", "b")
    needy: Needy
    target: Target = Mean(bits=5)
    """what is predicted"""
    init: Target | None = None
    extend: tuple[Extend, ...] = ()
    evaluations: tuple[Target, ...] = (Mean(), Mean(bits=Ge(1).ge))
    options: dict[str, Any] = field(default_factory=lambda: {"a": [1, "2"], "b": {"c": None}})


DOC = """Pretrain.

    accelerate launch tools/x.py: recipe
"""
NEEDED = ["--out=o", "--needy.name=n"]


def test_the_whole_text_is_a_recipe_that_reads_back_to_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "help.yaml").write_text(help_text(Config, DOC))
    expected = Config(out=Path("o"), needy=Needy(name="n"))
    assert load_recipe(Config, [str(tmp_path / "help.yaml"), *NEEDED]) == expected
    assert set(yaml.safe_load(help_text(Config))) == set(Config.__dataclass_fields__) - {"out"}
    with pytest.raises(RecipeError, match="2 faults"):
        load_recipe(Config, [str(tmp_path / "help.yaml")])


def test_every_field_is_told_with_type_and_meaning() -> None:
    lines = help_text(Config, DOC).splitlines()
    assert lines[:3] == ["# Pretrain.", "#", "# accelerate launch tools/x.py: recipe"]
    for line in [
        "# out: ...  # needed: path, the run",
        "none: 'null'  # text | null",
        "side: [48, 80]  # whole number a multiple of 8 | [whole number, whole number]",
        "words: ['1', b]  # [text, ...] at least 1 long and at most 3 long",
        "needy: {}  # section",
        "  # name: ...  # needed: text",
        "target:  # section of kind mean | pixels, what is predicted",
        "  kind: mean",
        "  size: 4  # whole number >= 1 and <= 8, cells per side",
        "  bits: 5  # whole number >= 1 and <= 8, bits per channel",
        "# target:",
        "#   # path: ...  # needed: path, where to look: a 'folder' # not a file",
        "init: null  # section of kind mean | pixels | null",
        "extend: []  # [section, ...]",
        "#   - # steps: ...  # needed: whole number",
        "options: {a: [1, '2'], b: {c: null}}  # {text: anything, ...}",
    ]:
        assert line in lines, line


def test_the_other_members_of_a_union_can_be_copied(tmp_path: Path) -> None:
    """Each commented block, uncommented once, reads as the section it shows."""
    blocks = re.findall(r"(?m)^# (\w+):(?:  #.*)?\n((?:#   .*\n)+)", help_text(Config))
    shown = {name: yaml.safe_load(re.sub(r"(?m)^#   ", "", body)) for name, body in blocks}
    assert shown["target"] == {"kind": "pixels", "inner": None}
    assert shown["extend"] == [{"schedule": "constant"}]
    assert "#   - {kind: pixels}  # fields as shown above" in help_text(Config)
    (tmp_path / "x.yaml").write_text("target:\n" + "".join(f"  {line[4:]}\n" for line in blocks[0][1].splitlines()))
    recipe = load_recipe(Config, [str(tmp_path / "x.yaml"), *NEEDED, "--target.path=p"])
    assert recipe.target == Pixels(path=Path("p"))


def test_a_docstring_stands_beside_its_section() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Outer:
        target: Mean | Extend = Extend(steps=3)

    text = help_text(Outer)
    assert "# target:  # The mean colour of a patch.\n#   kind: mean\n" in text and "Nothing of this" not in text


def test_help_needs_no_source() -> None:
    space: dict[str, Any] = {"__name__": "nowhere"}
    exec("from dataclasses import dataclass\n@dataclass\nclass A:\n    a: int = 1\n    'lost'\n", space)
    assert help_text(space["A"]).endswith("\na: 1  # whole number\n")


@pytest.mark.parametrize("words", [["--help"], ["x.yaml", "-h"], ["--a.b", "1", "--help"]])
def test_asking_for_help_prints_it_and_ends(words: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        load_recipe(Config, words, doc=DOC)
    assert caught.value.code == 0 and capsys.readouterr().out.rstrip() == help_text(Config, DOC).rstrip()
