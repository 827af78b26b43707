"""Recipes: YAML over the defaults, command-line overrides on top, checked into one frozen dataclass."""

import os
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mpp.recipe.help import help_text
from mpp.recipe.reader import Dots, Reader
from mpp.recipe.text import COMMAND_LINE, Notes, Plain, RecipeError, dump, join, layers, parse, show
from mpp.recipe.types import defaults, plain

__all__ = ["RecipeError", "differences", "dump_recipe", "help_text", "load_recipe", "recipe_path"]

T = TypeVar("T")
NAME = re.compile(r"[^\s.]+(\.[^\s.]+)*")


def load_recipe(kind: type[T], argv: list[str], doc: str = "", default: Path | None = None, announce: bool = True) -> T:
    """`["recipes/x.yaml", "--train.steps", "100"]` as a checked `kind`.

    With no recipe named, `default` is read and, with `announce`, this is said on stdout; without a default
    the recipe is the dataclass's own values. `--help` prints `help_text` with the values that would run, and
    exits.
    Raises RecipeError with every fault there is: path, value, what is allowed, nearest name, place.
    """
    if asked := {"-h", "--help"} & set(argv):
        print(help_of(kind, [word for word in argv if word not in asked], doc, default))
        sys.exit(0)
    notes = Notes()
    files, overrides = command_line(argv, notes)
    path = files[0] if files else default
    if announce and not files and os.environ.get("RANK", "0") == "0":
        print(f"No recipe named: using {path or 'the defaults'}")
    try:
        trees = layers(path, notes) if path else []
    except RecipeError as error:  # nothing to check the overrides against, but what is wrong in themselves
        raise RecipeError("\n".join([str(error), *notes.faults])) from None
    reader = Reader(kind, notes)
    tree = defaults(kind)
    for layer in [*trees, overrides]:
        tree = reader.lay(kind, tree, layer)
    recipe = reader.section(kind, tree, "")
    if faults := [*notes.faults, *notes.crossed]:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise RecipeError("\n  ".join([f"{count} in {path or 'the recipe'}:", *faults]))
    return recipe


def help_of(kind: type, argv: list[str], doc: str, default: Path | None) -> str:
    """The help text with the values of the recipe that would run; with the defaults where that cannot be read."""
    files, _ = command_line(argv, Notes())
    path = files[0] if files else default
    if path is None:
        return help_text(kind, doc)
    try:
        return help_text(kind, doc, plain(load_recipe(kind, [str(path)])), path)
    except RecipeError:
        return help_text(kind, doc)


def recipe_path(argv: list[str], default: Path | None = None) -> Path:
    """The recipe file that a command line names, else `default`."""
    files, _ = command_line(argv, Notes())
    path = files[0] if files else default
    if path is None:
        raise RecipeError("name a recipe first: recipes/<name>.yaml --section.field value ...")
    return path


def dump_recipe(recipe: Any) -> str:
    """The complete recipe as YAML, defaults too; loading it gives an equal recipe."""
    return dump(plain(recipe))


def differences(old: Any, new: Any, ignore: Collection[str] = ()) -> list[str]:
    """`optim.lr: 0.001 -> 0.002` for every leaf that differs between two recipes (or their trees),
    but for those at or below a dotted path in `ignore`."""
    before, after = dict(leaves(plain(old))), dict(leaves(plain(new)))
    found = []
    for path in dict.fromkeys([*before, *after]):
        ignored = any(path == name or path.startswith(f"{name}.") for name in ignore)
        one, two = (show(tree[path], 200) if path in tree else "(absent)" for tree in (before, after))
        if not ignored and before.get(path, ...) != after.get(path, ...):
            found.append(f"{path}: {one} -> {two}")
    return found


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of each leaf; a list of plain values is one leaf."""
    children: Any = ()
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, list) and any(isinstance(child, (dict, list)) for child in tree):
        children = enumerate(tree)
    if not children:
        yield path, tree
    for key, child in children:
        yield from leaves(child, join(path, key))


def command_line(argv: list[str], notes: Notes) -> tuple[list[Path], Dots]:
    """The recipe named (more are faults) and all overrides, in any order, as one tree."""
    files: list[Path] = []
    overrides = Dots()
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("-") and not files and not ("=" in word and not Path(word).exists()):
            files.append(Path(word))
        elif not word.startswith("--") or not NAME.fullmatch(name):
            notes.add("", f"expected --section.field VALUE, got {word!r}; {advice(word, files)}", COMMAND_LINE)
        elif equals or (words and not words[0].startswith("--")):
            override(overrides, name, value if equals else words.pop(0), notes)
        else:
            notes.add(name, f"needs a value: --{name} VALUE", COMMAND_LINE)
    return files, overrides


def advice(word: str, files: list[Path]) -> str:
    """What to do about a word that is neither recipe nor override."""
    bare = word.lstrip("-\u2013\u2014")  # with the dashes that word processors make of two hyphens
    if bare != word and not word.startswith("--"):
        return f"two plain hyphens begin a name: --{bare}"
    if "=" in word and NAME.fullmatch(word.partition("=")[0]) and not word.startswith("--"):
        return f"write --{word}"
    return f"a value with blanks needs quotes around it{f'; the recipe is {files[0]}' if files else ''}"


def override(tree: Dots, name: str, word: str, notes: Notes) -> None:
    """Put one `--name word` into the tree of overrides."""
    value: Any = Plain(word) if word else word
    if word[:1] in ("[", "{") or (len(word) > 1 and word[0] == word[-1] and word[0] in "\"'"):
        try:
            value = parse(word, COMMAND_LINE, notes, name)
        except RecipeError as error:
            told = f"cannot read {word!r}: {error}; a value with blanks needs quotes around it"
            return notes.add(name, told, COMMAND_LINE)
    notes.origins[name] = COMMAND_LINE
    for key in reversed(name.split(".")):
        value = Dots({Plain(key): value})
    combine(tree, value, "", notes)


def combine(tree: dict[str, Any], more: dict[str, Any], path: str, notes: Notes) -> None:
    """Add overrides to overrides; their order must not matter, so no two may say different things."""
    for key, value in more.items():
        known = tree.setdefault(key, value)
        if known is value or known == value:
            continue
        if not (isinstance(known, dict) and isinstance(value, dict)):
            how = "as a whole and in part" if Dots in (type(known), type(value)) else "twice"
            notes.add(join(path, key), f"given {how}: {show(known)} and {show(value)}", COMMAND_LINE)
        elif isinstance(known, Dots) and not isinstance(value, Dots):
            combine(value, known, join(path, key), notes)  # the whole counts, and its parts are changed
            tree[key] = value
        else:
            combine(known, value, join(path, key), notes)
