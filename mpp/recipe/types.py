"""What a config dataclass admits: fields, sections of a union, types in words, values read as a type."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types as at
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from mpp.recipe.text import NULLS, NUMBER, TRUTH, WHOLE, Plain, dump, guess, join

WORDS = {int: "whole number", float: "number", bool: "true | false", str: "text", Path: "path"}
WORDS |= {NoneType: "null", Any: "anything"}
LIMITS = {at.Ge: ">= {ge}", at.Gt: "> {gt}", at.Le: "<= {le}", at.Lt: "< {lt}"}
LIMITS |= {at.MultipleOf: "a multiple of {multiple_of}"}
LIMITS |= {at.MinLen: "at least {min_length} long", at.MaxLen: "at most {max_length} long"}
TOLD = {"greater_than_equal", "greater_than", "less_than_equal", "less_than", "multiple_of", "too_short"}
TOLD |= {"too_long"}  # pydantic's names for LIMITS: `describe` has said them


@cache
def hints(section: type) -> dict[str, Any]:
    """Field name -> type of a config dataclass, in order, `kind` first."""
    types = get_type_hints(section, include_extras=True)
    found = [field.name for field in fields(section) if field.init]
    return {name: types[name] for name in sorted(found, key=lambda name: name != "kind")}


def members(hint: Any, constraints: tuple[Any, ...] = ()) -> list[tuple[Any, tuple[Any, ...]]]:
    """The types a hint admits, unions in unions laid flat, each with the constraints on it."""
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        return members(inner, (*constraints, *more))
    if get_origin(hint) in (Union, UnionType):
        return [member for part in get_args(hint) for member in members(part, constraints)]
    return [(hint, () if hint is NoneType else constraints)]


def sections(hint: Any) -> dict[str, type]:
    """Kind -> dataclass, for the dataclasses among a hint's members."""
    found = [kind for kind, _ in members(hint) if isinstance(kind, type) and is_dataclass(kind)]
    return {name: section for section in found for name in kinds(section)}


def kinds(section: type) -> tuple[str, ...]:
    """The values of a section's `kind`; its class name where it has none."""
    kind = hints(section).get("kind")
    return get_args(kind) if get_origin(kind) is Literal else (section.__name__,)


def choose(hint: Any, *trees: Any) -> type | None:
    """The dataclass meant: the only one there is, or that of the first `kind` in the trees."""
    found = sections(hint)
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    named = (tree["kind"] for tree in trees if isinstance(tree, dict) and "kind" in tree)
    kind = next(named, None)
    return found.get(kind) if isinstance(kind, str) else None


def has_list(hint: Any) -> bool:
    return any(get_origin(kind) is tuple for kind, _ in members(hint))


def item(hint: Any, index: int = 0) -> Any:
    """The type of the element at `index` where the hint admits a tuple, else Any."""
    for kind, _ in members(hint):
        if get_origin(kind) is tuple:
            types = get_args(kind)
            if len(types) == 2 and types[1] is Ellipsis:
                return types[0]
            if index < len(types):
                return types[index]
    return Any


def missing(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def defaults(section: type) -> dict[str, Any]:
    """A section's default values as a tree; fields without a default are absent."""
    tree = {}
    for field in fields(section):
        if field.name not in hints(section):
            continue
        types = members(hints(section)[field.name])
        if not missing(field):
            made = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
            tree[field.name] = plain(made)
        elif len(types) == 1 and is_dataclass(types[0][0]):
            tree[field.name] = defaults(types[0][0])  # type: ignore[arg-type]
    return tree


def plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, paths as text: what YAML can hold."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in hints(type(value))}
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(child) for child in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, PurePath) else value


def names(section: type, path: str = "") -> Iterator[tuple[str, type]]:
    """Every dotted path below a section, through all members of each union, with the class it belongs to."""
    for name, hint in hints(section).items():
        yield join(path, name), section
        inner = [*sections(hint).values(), *sections(item(hint)).values()]
        if path.count(".") < 5:  # a config that holds itself would have no end
            for child in dict.fromkeys(inner):
                yield from names(child, join(path, name))


def describe(hint: Any) -> str:
    """A type in words, as it is written in a recipe: `whole number >= 1 | null`, `[number, number]`."""
    found = sections(hint)
    named = all("kind" in hints(section) for section in found.values())
    words = [f"{word(kind)}{limits(constraints)}" for kind, constraints in members(hint) if not is_dataclass(kind)]
    if found:
        words.insert(0, "section of kind " + " | ".join(found) if named else "section")
    return " | ".join(dict.fromkeys(words))


def word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " | ".join(one if isinstance(one, str) else dump(one).strip() for one in get_args(kind))
    if get_origin(kind) is tuple:
        inner = ["..." if part is Ellipsis else describe(part) for part in get_args(kind)]
        return f"[{', '.join(inner)}]"
    if get_origin(kind) is dict:
        return "{{{}: {}, ...}}".format(*map(describe, get_args(kind)))
    return WORDS.get(kind) or getattr(kind, "__name__", str(kind))


def limits(constraints: tuple[Any, ...]) -> str:
    """` >= 1 and <= 8` for the constraints that have words."""
    words = [LIMITS[type(one)].format(**asdict(one)) for one in flat(constraints) if type(one) in LIMITS]
    return " " + " and ".join(words) if words else ""


def flat(constraints: Any) -> Iterator[Any]:
    for one in constraints:
        if isinstance(one, FieldInfo):
            yield from flat(one.metadata)
        elif isinstance(one, at.GroupedMetadata):
            yield from flat(one)
        else:
            yield one


def cast(kind: Any, constraints: tuple[Any, ...], value: Any) -> Any:
    """A scalar of a tree as a checked value of one type; or a ValueError (with a reason if it has one)."""
    if get_origin(kind) is Literal:
        made = option(kind, value)
    elif kind in READERS:
        made = READERS[kind](value)
    else:
        made = checked(kind, guess(value))
    return constrain(constraints, made)


def option(kind: Any, value: Any) -> Any:
    for known in get_args(kind):
        with suppress(ValueError):
            if READERS[type(known)](value) == known:
                return known
    raise ValueError


def constrain(constraints: tuple[Any, ...], value: Any) -> Any:
    """The value, if it keeps its constraints (pydantic and annotated_types know how to check them)."""
    return checked(Annotated[(Any, *constraints)], value) if constraints and value is not None else value


def checked(hint: Any, value: Any) -> Any:
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        told = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise ValueError("" if first["type"] in TOLD else told) from None


def whole(value: Any) -> int:
    if isinstance(value, Plain) and WHOLE.fullmatch(value):
        return int(value)
    if type(value) is int:
        return value
    real = number(value)
    if not real.is_integer() or abs(real) > 2**53:  # beyond, a float no longer names one whole number
        raise ValueError
    return int(real)


def number(value: Any) -> float:
    if (isinstance(value, Plain) and not NUMBER.fullmatch(value)) or isinstance(value, bool):
        raise ValueError
    if not isinstance(value, (Plain, int, float)) or not math.isfinite(real := float(value)):
        raise ValueError
    return real


def truth(value: Any) -> bool:
    if isinstance(value, Plain) and value.lower() in TRUTH:
        return TRUTH[value.lower()]
    if isinstance(value, bool):
        return value
    raise ValueError


def nothing(value: Any) -> None:
    if value is not None and not (isinstance(value, Plain) and value in {*NULLS, "none"}):
        raise ValueError


def text(value: Any) -> str:
    """Text as it was typed (`2024`, `1e5`, `on` stay what they are); an unquoted `~/` is the home folder."""
    if isinstance(value, Plain) and value not in NULLS:
        return os.path.expanduser(value) if value.startswith("~/") else str(value)
    if isinstance(value, str) and not isinstance(value, Plain):
        return value
    raise ValueError


def path(value: Any) -> Path:
    name = text(value)
    if not name or "\0" in name:
        raise ValueError
    return Path(name)


# In this order where a union admits several: what looks like a number is one, and text is what is left.
READERS = {NoneType: nothing, bool: truth, int: whole, float: number, Any: guess, Path: path, str: text}


def scalars(hint: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """The members of a hint that one value can be, in the order in which they are tried."""
    order = list(READERS)
    found = [one for one in members(hint) if get_origin(one[0]) not in (tuple, dict) and not is_dataclass(one[0])]
    return sorted(found, key=lambda one: order.index(one[0]) if one[0] in order else -1)
