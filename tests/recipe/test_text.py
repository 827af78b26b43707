"""Recipe files: what YAML text means, comes back as, and must never do."""

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from mpp.recipe.text import Notes, Plain, RecipeError, dump, guess, layers, parse, show

NASTY = [
    *["", "null", "Null", "~", "~/x", "None", "none", "true", "TRUE", "on", "No"],
    *["1", "-1", "1e5", "1_0", "010", ".5", "0x1", "2024-01-01", "1:30", "nan", ".inf", "1" * 101],
    *["-", "- a", "a: b", "a #b", "#", "'", '"', "[1]", "{}", "*x", "&x", "!x", "%", "@", "`", "|", ">", "="],
    *["<<", "...", "---", "\\", "?", ",", "base", "a.b", "a,b", "a]", "yes: no", "# \n#", " a ", "x" * 300, "a " * 200],
    *["a\nb", "\n", "\t", "\r\n", "\x00\x1b\x7f", "é", "日本", "😀", "\x85\u2028\ufeff", "\udc80", "\xa0"],
]  # fmt: skip


def back(text: str) -> Any:
    return guess(parse(text, "text", Notes()))


def grow(dice: random.Random, depth: int = 0) -> Any:
    """A random tree."""
    if depth > 3 or dice.random() < 0.3:
        real, whole = dice.random() * 10 ** dice.randint(-300, 300), dice.randint(-(10**20), 10**20)
        return dice.choice([dice.choice(NASTY), real, whole, None, True])
    children = [grow(dice, depth + 1) for _ in range(dice.randint(0, 3))]
    return children if dice.random() < 0.5 else {dice.choice(NASTY): child for child in children}


def test_what_is_written_reads_back_the_same() -> None:
    dice = random.Random(1)
    for tree in [*NASTY, {name: name for name in NASTY}, list(NASTY), *(grow(dice) for _ in range(150))]:
        assert back(dump(tree)) == tree
        assert back(dump(tree, flow=True)) == tree


def test_scalars_stay_text_until_a_type_is_asked_for() -> None:
    tree = parse("a: 1e-3\nb: 'x'\nc: [on, \"2\"]\nd: |\n  7", "text", Notes())
    assert tree == {"a": "1e-3", "b": "x", "c": ["on", "2"], "d": "7"}
    kinds = [type(one) for one in (tree["a"], tree["b"], *tree["c"], tree["d"])]
    assert kinds == [Plain, str, Plain, str, str]


def test_without_a_type_text_means_what_it_looks_like() -> None:
    read = back("[1e-3, 100_000, on, True, null, ~, 010, 1:30, 2024-01-01, .5, -3, '1', 1e5, nan]")
    expected = [1e-3, 100_000, "on", True, None, None, "010", "1:30", "2024-01-01", 0.5, -3, "1", 1e5, "nan"]
    assert read == expected and [type(one) for one in read] == [type(one) for one in expected]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "x.yaml, line 3: not valid YAML: expected ',' or ']', but got ':': c: 3"),
        ("a: 1\n b: 2\n", "x.yaml, line 2: not valid YAML: mapping values are not allowed here: b: 2"),
        ("a:\n\tb: 1\n", "x.yaml, line 2: not valid YAML: found character '\\t'"),
        ("a: 'x\n", "x.yaml, line 2: not valid YAML: found unexpected end of stream"),
        ("a: 1\n---\nb: 2\n", "x.yaml, line 2: not valid YAML: but found another document"),
        ("a: \x07\n", "x.yaml: not valid YAML: unacceptable character #x0007"),
        ("a: &x [1]\nb: *x\n", "x.yaml, line 1: `*alias` is not for recipes"),
        ("a: &x [*x]\n", "x.yaml, line 1: `*alias` is not for recipes"),
        (
            "a: 1\nb: !!python/object/apply:os.system [touch pwned]\n",
            "x.yaml, line 2: tags are not for recipes",
        ),
        ("a: !!binary aGk=\n", "x.yaml, line 1: tags are not for recipes"),
        ("[a, b]: 1\n", "x.yaml, line 1: a name must be one word"),
        ("- 1\n", "x.yaml: expected lines like `name: value`, got [1]"),
        ("base: [a, b]\n", "x.yaml: base: expected the path of one recipe, got [a, b]"),
        ("a: " + "[" * 1500, "x.yaml: nested too deeply"),
        ("a: " + "[" * 100 + "]" * 100, "x.yaml, line 1: nested too deeply"),
    ],
)
def test_a_file_that_is_no_recipe_is_told_with_its_line(text: str, message: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        layers(Path("x.yaml"), Notes())
    assert str(caught.value).startswith(message)
    assert not Path("pwned").exists()


def test_a_name_given_twice_is_told_with_both_lines(tmp_path: Path) -> None:
    notes, path = Notes(), tmp_path / "x.yaml"
    path.write_text("a:\n  b: 1\n  c: 2\n  b: 3\na: 4\n")
    assert layers(path, notes) == [{"a": {"b": "1", "c": "2"}}]
    assert notes.faults == [
        f"a.b: given twice, first at {path}, line 2  ({path}, line 4)",
        f"a: given twice, first at {path}, line 1  ({path}, line 5)",
    ]


def test_bases_come_first_and_must_not_go_round(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/low.yaml").write_text("a: 1\nbase:\n")
    (tmp_path / "mid.yaml").write_text("base: deep/low.yaml\nb: 2")
    (tmp_path / "deep/top.yaml").write_text("base: ../mid.yaml\nc: 3")
    assert layers(tmp_path / "deep/top.yaml", Notes()) == [{"a": "1"}, {"b": "2"}, {"c": "3"}]
    (tmp_path / "deep/low.yaml").write_text("base: ../mid.yaml")
    with pytest.raises(RecipeError, match=r"in a circle: \S+/mid.yaml -> \S+/low.yaml -> \S+/mid.yaml"):
        layers(tmp_path / "mid.yaml", Notes())
    (tmp_path / "self.yaml").write_text("base: self.yaml")
    with pytest.raises(RecipeError, match="in a circle"):
        layers(tmp_path / "self.yaml", Notes())


def test_a_missing_recipe_is_told_with_those_nearby(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipes/pretrain").mkdir(parents=True)
    for name in ("recipes/quickstart.yaml", "recipes/pretrain/cifar10.yaml", ".hidden.yaml"):
        Path(name).write_text("base: nowhere.yaml")
    asked = ["recipes/quickstrat.yaml", "pretrain/cifar.yaml", "recipes", "cifar10"]
    for path, nearest in zip(asked, ["quickstart", "pretrain/cifar10"] * 2, strict=True):
        with pytest.raises(RecipeError) as caught:
            layers(Path(path), Notes())
        first, head, best, *rest = str(caught.value).splitlines()
        assert first in (f"{path}: there is no such recipe", f"{path}: is a folder, not a recipe file")
        assert head == "  recipes nearby, most alike first:"
        assert best == f"    recipes/{nearest}.yaml" and len(rest) == 1
    with pytest.raises(RecipeError, match=r"nowhere\.yaml: there is no such recipe\n  named as base: in recipes/quick"):
        layers(Path("recipes/quickstart.yaml"), Notes())


def test_odd_files_are_refused_in_a_moment(tmp_path: Path) -> None:
    began = time.monotonic()
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff")
    (tmp_path / "big.yaml").write_text("a: 1\n" * 100_000)
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    os.mkfifo(tmp_path / "fifo.yaml")
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40))
    (tmp_path / "bomb.yaml").write_text(bomb)
    told = {"bytes": "not UTF-8", "big": "500,000 bytes are too many", "loop": "no such recipe"}
    told |= {"fifo": "no such recipe", "bomb": "alias", "n" * 300: "File name too long"}
    for name, message in told.items():
        with pytest.raises(RecipeError, match=message):
            layers(tmp_path / f"{name}.yaml", Notes())
    assert time.monotonic() - began < 5


def test_values_in_messages_stay_on_one_short_line() -> None:
    for value in [*NASTY, list(NASTY), {name: [name] for name in NASTY}, [{"a": "b\nc"}], Plain("1" * 200)]:
        assert "\n" not in show(value) and len(show(value)) <= 60
    assert show({"a": [Plain("1e-3"), None]}) == "{a: [0.001, null]}"
