"""`--help`: every field of a recipe with its default, type and meaning, as a recipe that one can copy."""

import ast
import inspect
import textwrap
from dataclasses import is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from mpp.recipe.text import dump
from mpp.recipe.types import choose, defaults, describe, hints, item, kinds, sections

HOW = """
Below are all fields with their {values}: a complete recipe, to copy what you want to change.
On the command line the same is written --section.field VALUE, after the recipe's path."""


def help_text(kind: type, doc: str = "", tree: dict[str, Any] | None = None, path: Path | None = None) -> str:
    """The tool's docstring as comments, then a recipe as YAML: `name: value  # type, meaning`.

    tree: its values, those of the recipe in `path`; without one, the defaults. Other members of a union follow their
    field, and fields without a default stand, commented out. The whole text is a recipe and reads back to the same.
    """
    how = HOW.format(values=f"values in {path}" if path else "defaults")
    top = f"{inspect.cleandoc(doc)}\n{how}".strip() if doc else how.strip()
    lines = [f"# {line}".rstrip() for line in top.splitlines()]
    return "\n".join([*lines, "", *block(kind, defaults(kind) if tree is None else tree, set())]) + "\n"


def block(section: type, tree: dict[str, Any], told: set[type]) -> list[str]:
    """The lines of one section; `told` gathers those whose fields have been shown."""
    told.add(section)
    return [line for name in hints(section) for line in entry(section, name, tree, told)]


def entry(section: type, name: str, tree: dict[str, Any], told: set[type]) -> list[str]:
    """The lines of one field: its value, then the members of its union that it is not."""
    hint, meaning = hints(section)[name], meanings(section).get(name)
    what = ", ".join(filter(None, [describe(hint), meaning]))
    if name not in tree:
        return [f"# {name}: ...  # needed: {what}", *variants(name, hint, None, told)]
    note = "" if name == "kind" and len(kinds(section)) == 1 else f"  # {what}"
    return [*active(name, hint, tree[name], note, told), *variants(name, hint, tree[name], told)]


def active(name: str, hint: Any, value: Any, note: str, told: set[type]) -> list[str]:
    """The lines of a field's value: a section, a list of sections, or what fits on a line."""
    chosen = choose(hint, value)
    if isinstance(value, dict) and chosen:
        body = block(chosen, value, told)
        empty = "" if any(not line.lstrip().startswith("#") for line in body) else " {}"
        return [f"{name}:{empty}{note}", *indent(body)]
    many = enumerate(value) if isinstance(value, list) else ()
    pairs = [(choose(item(hint, i), one), one) for i, one in many if isinstance(one, dict)]
    bodies = [block(section, one, told) for section, one in pairs if section]
    if bodies:
        return [f"{name}:{note}", *(line for body in bodies for line in indent(bullet(body)))]
    return [f"{name}: {dump(value, flow=True).strip()}{note}"]


def variants(name: str, hint: Any, value: Any, told: set[type]) -> list[str]:
    """The sections that might stand here and do not, commented out; their fields only once in a text."""
    many = value if isinstance(value, list) else []
    shown = {choose(hint, value)} if isinstance(value, dict) else {choose(item(hint), one) for one in many}
    lines = others(f"{name}:", hint, shown, told)
    if found := others("-", item(hint), shown, told):
        lines += [*([] if shown else [f"{name}:"]), *indent(found)]
    return [f"# {line}" for line in lines]


def others(start: str, hint: Any, shown: set[type | None], told: set[type]) -> list[str]:
    """The sections of a hint that are not shown: first those whose fields are known, on one line."""
    left = [section for section in dict.fromkeys(sections(hint).values()) if section not in shown]
    old, new = [section for section in left if section in told], [section for section in left if section not in told]
    lines = known(start, old) if old else []
    for section in new:
        body = block(section, defaults(section), told)
        lines += bullet(body) if start == "-" else [f"{start}{about(section)}", *indent(body)]
    return lines


def known(start: str, old: list[type]) -> list[str]:
    """One line for sections whose fields have been shown."""
    names = [kinds(section)[0] for section in old]
    first = f"{{kind: {names[0]}}}" if "kind" in hints(old[0]) else "{}"
    more = f"or of kind {' | '.join(names[1:])}; " if names[1:] else ""
    return [f"{start} {first}  # {more}fields as shown above"]


def indent(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def bullet(lines: list[str]) -> list[str]:
    return [f"{'  ' if i else '- '}{line}" for i, line in enumerate(lines)]


def about(section: type) -> str:
    """The first line of a section's docstring, as a comment; one that dataclass wrote says nothing."""
    text = (section.__doc__ or "").strip().partition("\n")[0]
    return "" if not text or text.startswith(f"{section.__name__}(") else f"  # {text}"


@cache
def meanings(section: type) -> dict[str, str]:
    """Field -> the string literal below it, base classes included; empty where there is no source to read."""
    found: dict[str, str] = {}
    for one in reversed(section.__mro__):
        body = class_body(one) if is_dataclass(one) else []
        for field, below in pairwise(body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def class_body(section: type) -> list[ast.stmt]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(section)))
    except (OSError, TypeError, SyntaxError):
        return []
    return tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
