"""Recipe text: YAML read with the types of scalars left open, and written so that it reads back exactly."""

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

NULLS = {"", "~", "null", "Null", "NULL", "None"}
TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
DIGITS = "(0|[1-9](_?[0-9]){0,99})"  # `010` is eight to some and ten to others: text here
WHOLE = re.compile(f"[-+]?{DIGITS}")
NUMBER = re.compile(rf"[-+]?(\.[0-9]+|{DIGITS}(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
COMMAND_LINE = "command line"
MAX_DEPTH = 50
MAX_BYTES = 200_000  # a recipe is a page of text; more is the wrong file, or meant to fill the memory


class RecipeError(ValueError):
    """What is wrong with a recipe, all of it, in words for the person who wrote it."""


class Plain(str):
    """An unquoted scalar. The type it is asked for decides what it means: YAML 1.1 alone would read
    `1e-3` as text, `on` as true, `1:30` as ninety and `010` as eight."""


class Notes:
    """Where each dotted path was written, and what is wrong so far."""

    def __init__(self) -> None:
        self.origins: dict[str, str] = {}
        self.faults: list[str] = []
        self.crossed: list[str] = []  # right by themselves, wrong together: these hinder no further check

    def add(self, path: str, message: str, origin: str | None = None, crossed: bool = False) -> None:
        place = origin or self.origin(path)
        line = f"{path}: {message}" if path else message
        kept = self.crossed if crossed else self.faults
        kept.append(f"{line}  ({place})" if place else line)

    def origin(self, path: str) -> str | None:
        """Where `path` was written; None where it is a default. One section may stand for a list of it."""
        return self.origins.get(path) or self.origins.get(re.sub(r"\.0(?=\.|$)", "", path))


def join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def layers(path: Path, notes: Notes, inner: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """The trees of a recipe file and of the files its `base:` leads to, the deepest base first."""
    chain = (*inner, path)
    text = read(path, f"\n  named as base: in {inner[-1]}" if inner else "")
    if any(path.samefile(other) for other in inner):
        raise RecipeError("base: goes round in a circle: " + " -> ".join(map(str, chain)))
    tree = parse(text, str(path), notes)
    if tree is None or tree == "":
        return [{}]
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: expected lines like `name: value`, got {show(tree)}")
    base = tree.pop("base", None)
    if base is None or (isinstance(base, Plain) and base in NULLS):
        return [tree]
    if not isinstance(base, str):
        raise RecipeError(f"{path}: base: expected the path of one recipe, got {show(base)}")
    return [*layers(path.parent / os.path.expanduser(base), notes, chain), tree]


def read(path: Path, named_by: str = "") -> str:
    """The text of a recipe file, or a RecipeError that says what is there instead."""
    try:
        if not path.is_file():
            what = "is a folder, not a recipe file" if path.is_dir() else "there is no such recipe"
            raise RecipeError(f"{path}: {what}{named_by}{nearby(path)}")
        if path.stat().st_size > MAX_BYTES:
            raise RecipeError(f"{path}: {path.stat().st_size:,} bytes are too many for a recipe{named_by}")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text (byte {error.start}){named_by}") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}{named_by}") from None


def nearby(path: Path, limit: int = 5) -> str:
    """The recipes around a path that is not one, most alike first."""
    folders = {path if path.is_dir() else path.parent, Path("recipes")}
    files = {file for folder in folders for depth in ("[!.]*.yaml", "[!.]*/[!.]*.yaml") for file in folder.glob(depth)}
    found = sorted(map(str, files))
    found.sort(key=lambda name: -difflib.SequenceMatcher(None, name, str(path)).ratio())
    return "\n    ".join(["\n  recipes nearby, most alike first:", *found[:limit]]) if found else ""


def parse(text: str, source: str, notes: Notes, path: str = "") -> Any:
    """One YAML document as dicts, lists, Plain (unquoted) and str (quoted); origins go into `notes`."""
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        return Tree(source, notes).build(node, path) if node else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if source == COMMAND_LINE or mark is None:
            raise RecipeError(f"{error.problem}") from None
        line = "".join(text.splitlines()[mark.line : mark.line + 1]).strip()
        place = f"{source}, line {mark.line + 1}"
        raise RecipeError(f"{place}: not valid YAML: {error.problem}: {line}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise RecipeError(f"{source}: nested too deeply") from None


class Tree:
    """Turns YAML nodes into a tree. Tags could make objects and aliases could grow without bound:
    a recipe needs neither, so both are refused."""

    def __init__(self, source: str, notes: Notes) -> None:
        self.source, self.notes, self.seen = source, notes, set()

    def build(self, node: Any, path: str) -> Any:
        self.refuse(node)
        if path.count(".") > MAX_DEPTH:
            raise RecipeError(f"{self.place(node)}: nested too deeply")
        if path:
            self.notes.origins.setdefault(path, self.place(node))
        if isinstance(node, yaml.MappingNode):
            return dict(self.pairs(node, path))
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, join(path, i)) for i, child in enumerate(node.value)]
        return Plain(node.value) if node.style is None else node.value

    def pairs(self, node: Any, path: str) -> Iterator[tuple[str, Any]]:
        first: dict[str, str] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise RecipeError(f"{self.place(key)}: a name must be one word, not a list or a section")
            name, here = self.build(key, ""), join(path, key.value)
            if name in first:
                self.notes.add(here, f"given twice, first at {first[name]}", self.place(key))
                continue
            first[name] = self.place(key)
            self.notes.origins.setdefault(here, self.place(key))
            yield name, self.build(value, here)

    def refuse(self, node: Any) -> None:
        if id(node) in self.seen:
            raise RecipeError(f"{self.place(node)}: `*alias` is not for recipes; use base:, or write it out")
        self.seen.add(id(node))
        if node.tag not in (f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")):
            raise RecipeError(f"{self.place(node)}: tags are not for recipes: {node.tag}")

    def place(self, node: Any) -> str:
        return self.source if self.source == COMMAND_LINE else f"{self.source}, line {node.start_mark.line + 1}"


def guess(value: Any) -> Any:
    """What unquoted text means where no type is asked for (YAML 1.2, plus `1e-3` and `100_000`)."""
    if isinstance(value, dict):
        return {guess(key): guess(child) for key, child in value.items()}
    if isinstance(value, list):
        return [guess(child) for child in value]
    if not isinstance(value, Plain):
        return value
    if value in NULLS:
        return None
    if value.lower() in ("true", "false"):
        return TRUTH[value.lower()]
    return int(value) if WHOLE.fullmatch(value) else float(value) if NUMBER.fullmatch(value) else str(value)


class Dumper(yaml.SafeDumper):
    """Writes lists of values on one line, and quotes each text that would be read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def represent_text(dumper: Dumper, text: str) -> yaml.Node:
    special = guess(Plain(text)) != text or text.lower() in {*TRUTH, "none"} or text.startswith("~")
    style = '"' if not text.isprintable() else "'" if special else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def represent_list(dumper: Dumper, data: list[Any]) -> yaml.Node:
    flat = not any(isinstance(child, (dict, list)) for child in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat or None)


Dumper.add_representer(str, represent_text)
Dumper.add_representer(list, represent_list)


def dump(tree: Any, flow: bool = False) -> str:
    """YAML text that `parse` reads back to the same values."""
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": float("inf")}
    text = yaml.dump(tree, Dumper=Dumper, default_flow_style=flow, **options)
    return text.removesuffix("...\n")


def show(value: Any, limit: int = 60) -> str:
    """A value as the person wrote it, short enough for a message."""
    value = guess(value)
    text = repr(value) if isinstance(value, str) else dump(value, flow=True).strip()
    return text if len(text) <= limit else text[: limit - 4] + " ..."
