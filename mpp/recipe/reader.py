"""Trees to dataclasses: laid over one another by the types of a recipe, then built and checked by field."""

import difflib
import re
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args, get_origin

from mpp.recipe.text import COMMAND_LINE, NUMBER, Notes, Plain, join, show
from mpp.recipe.types import (
    cast,
    choose,
    constrain,
    defaults,
    describe,
    has_list,
    hints,
    item,
    kinds,
    members,
    missing,
    names,
    scalars,
    sections,
)


class Dots(dict[str, Any]):
    """A mapping spelled by dotted names: it changes part of what is there, also inside a list."""


class Reader:
    """Lays trees over one another by the types of a recipe, and turns the result into dataclasses."""

    def __init__(self, root: type, notes: Notes) -> None:
        self.root, self.notes = root, notes

    def lay(self, hint: Any, under: Any, over: Any, path: str = "") -> Any:
        """`over` laid over `under`, both trees of one field; sections begin from their defaults.

        A section with another `kind` starts afresh. Lists and free mappings in a file replace what was
        there, dotted overrides change it in part.
        """
        dots = isinstance(over, Dots)
        if isinstance(over, list):
            return [self.lay(item(hint, i), None, one, join(path, i)) for i, one in enumerate(over)]
        if not isinstance(over, dict):
            return over
        section = choose(hint, over, under)
        if section is None and has_list(hint) and not isinstance(under, dict):
            if dots:
                return self.lay_inside(hint, under if isinstance(under, list) else [], over, path)
            return [self.lay(item(hint), None, over, path)] if sections(item(hint)) else over
        if section is None:
            return {**under, **over} if dots and isinstance(under, dict) else over
        if not isinstance(under, dict) or over.get("kind", under.get("kind")) != under.get("kind"):
            under = defaults(section)
        types = hints(section)
        laid = {k: self.lay(types.get(k, Any), under.get(k), v, join(path, k)) for k, v in over.items()}
        return {**under, **laid}

    def lay_inside(self, hint: Any, under: list[Any], over: Dots, path: str) -> list[Any]:
        """Dotted overrides inside a list: `evaluations.0.k`, or `evaluations.k` where there is only one."""
        if not all(key.isdecimal() for key in over):
            if len(under) > 1:
                kinds_of = [one.get("kind", "") if isinstance(one, dict) else one for one in under]
                places = " or ".join(f"{join(path, i)} ({kind})" for i, kind in enumerate(kinds_of))
                message = f"which one? There are {len(under)}: {places}"
                self.notes.add(join(path, next(iter(over))), message, COMMAND_LINE)
                return under
            over = Dots({"0": over})
        laid = list(under)
        for key in sorted(over, key=int):
            index = int(key)
            if index > len(laid):
                message = f"there are only {len(laid)}; the next would be {join(path, len(laid))}"
                self.notes.add(join(path, key), message, COMMAND_LINE)
                continue
            known = laid[index] if index < len(laid) else None
            laid[index : index + 1] = [self.lay(item(hint, index), known, over[key], join(path, key))]
        return laid

    def section(self, section: type, tree: dict[str, Any], path: str) -> Any:
        """One dataclass from its tree, checked by itself (`faults()`) once all below it is right."""
        before, types = len(self.notes.faults), hints(section)
        for name in tree:
            if name not in types:
                self.notes.add(join(path, name), self.unknown(section, name, path, tree[name]))
        values = {name: self.build(types[name], tree[name], join(path, name)) for name in types if name in tree}
        for field in fields(section):
            if field.name in types and field.name not in tree and missing(field):
                needed = f"missing; expected {describe(types[field.name])}"
                self.notes.add(join(path, field.name), needed, self.notes.origin(path))
        if len(self.notes.faults) > before:
            return None
        try:
            made = section(**values)
        except ValueError as error:  # from __post_init__
            return self.notes.add(path, str(error))
        for name, message in self.crossed(made):
            self.notes.add(join(path, name) if name else path, message, crossed=True)
        return made

    def crossed(self, made: Any) -> list[tuple[str, str]]:
        """What a section has to say of its own fields together."""
        try:
            return list(made.faults()) if hasattr(made, "faults") else []
        except Exception:
            if self.notes.crossed:  # it stumbled over what a section inside it has told already
                return []
            raise

    def build(self, hint: Any, value: Any, path: str) -> Any:
        """One field's value from its tree; faults go into the notes."""
        section = choose(hint, value)
        if isinstance(value, dict) and section:
            return self.section(section, value, path)
        if isinstance(value, dict) and sections(hint):
            return self.kind(hint, value, path)
        if isinstance(value, (dict, list)):
            return self.container(hint, value, path)
        return self.scalar(hint, value, path)

    def kind(self, hint: Any, value: dict[str, Any], path: str) -> None:
        """A section whose `kind` is missing or unknown."""
        known = Literal[tuple(sections(hint))]  # type: ignore[valid-type]
        if "kind" in value:
            self.scalar(known, value["kind"], join(path, "kind"))
        else:
            message = f"missing; expected {describe(known)}"
            self.notes.add(join(path, "kind"), message, self.notes.origin(path))

    def container(self, hint: Any, value: Any, path: str) -> Any:
        """A tuple or a free mapping; where a union has several, the first that fits."""
        shape = dict if isinstance(value, dict) else tuple
        fitting = [one for one in members(hint) if get_origin(one[0]) is shape]
        for kind, constraints in fitting:
            trial = self if len(fitting) == 1 else Reader(self.root, Notes())
            before = len(trial.notes.faults)
            made = trial.elements(kind, constraints, value, path)
            if len(trial.notes.faults) == before or trial is self:
                return self.accept(trial, made)
        return self.scalar(hint, value, path)

    def elements(self, kind: Any, constraints: tuple[Any, ...], value: Any, path: str) -> Any:
        types, before = get_args(kind), len(self.notes.faults)
        if isinstance(value, dict):
            made: Any = {
                self.build(types[0], k, path): self.build(types[1], v, join(path, k)) for k, v in value.items()
            }
        else:
            types = types[:1] * len(value) if types[1:] == (...,) else types
            if len(types) != len(value):
                return self.misfit(kind, value, path)
            made = tuple(self.build(types[i], one, join(path, i)) for i, one in enumerate(value))
        try:
            return made if len(self.notes.faults) > before else constrain(constraints, made)
        except ValueError as error:
            return self.misfit(Annotated[(kind, *constraints)], value, path, str(error))

    def scalar(self, hint: Any, value: Any, path: str) -> Any:
        """One value as the first type it fits, or as the only element of a list."""
        reason = ""
        for kind, constraints in scalars(hint):
            try:
                return cast(kind, constraints, value)
            except ValueError as error:
                reason = reason or str(error)
        if isinstance(value, (dict, list)) or not has_list(hint):
            return self.misfit(hint, value, path, reason)
        return self.single(hint, value, path)

    def single(self, hint: Any, value: Any, path: str) -> Any:
        """`trackers: tensorboard` for `trackers: [tensorboard]`."""
        trial = Reader(self.root, Notes())
        made = trial.container(hint, [value], path)
        if not trial.notes.faults:
            return self.accept(trial, made)
        several = len(members(hint)) > 1 or get_args(members(hint)[0][0])[1:] != (...,)
        if several or (isinstance(value, str) and "," in value):
            return self.misfit(hint, value, path)
        return self.build(item(hint), value, path)

    def accept(self, trial: "Reader", made: Any) -> Any:
        if trial is not self:
            self.notes.crossed += trial.notes.crossed
        return made

    def misfit(self, hint: Any, value: Any, path: str, reason: str = "") -> None:
        told = f": {reason}" if reason else ""
        self.notes.add(path, f"expected {describe(hint)}, got {show(value)}{told}{tip(hint, value)}")

    def unknown(self, section: type, name: str, path: str, value: Any) -> str:
        """What to say of a name that a section does not have: its likes here, its namesakes elsewhere."""
        told = [f"unknown name (value {show(value)})"]
        if "." in name:
            return f"{told[0]}; dotted names are for the command line, in a file sections are nested"
        known, name = list(hints(section)), name.replace("-", "_")
        here = re.sub(r"\.[0-9]+(?=\.)", "", join(path, name))
        everywhere = {place: owner for place, owner in names(self.root) if place != here}
        owners = [owner for place, owner in names(self.root) if place == here]
        if owners:
            told.append("it belongs to kind " + " | ".join(kind for one in owners for kind in kinds(one)))
        elif near := difflib.get_close_matches(name, known, 1):
            told.append(f"did you mean {join(path, near[0])}?")
        if not owners and (others := namesakes(name, list(everywhere), not near)):
            told.append(f"there is {' and '.join(others[:3])}")
        told.append(f"known in {path or 'a recipe'}: {', '.join(known)}")
        return "; ".join(told)


def namesakes(name: str, places: list[str], alike: bool) -> list[str]:
    """The dotted paths that end in a name, or else (if `alike`) in one much like it."""
    ends = {place: place.rpartition(".")[2] for place in places}
    near = difflib.get_close_matches(name, ends.values(), 1, 0.75) if alike else []
    return [place for place in places if ends[place] == name] or [p for p in places if ends[p] in near]


def tip(hint: Any, value: Any) -> str:
    """What the person may have meant, where that can be told."""
    if not isinstance(value, str):
        return ""
    found = sections(hint) or sections(item(hint))
    options = [one for kind, _ in members(hint) if get_origin(kind) is Literal for one in get_args(kind)]
    near = difflib.get_close_matches(value, [str(one) for one in [*options, *found]], 1)
    if value in found:
        return f"; write {{kind: {value}}}"
    if found and not near:
        return f"; write {{{': ..., '.join(list(hints(next(iter(found.values()))))[:3])}: ...}}"
    if near:
        return f"; did you mean {near[0]}?"
    if has_list(hint) and "," in value:
        return f"; a list is written [{value}]"
    if value.lower().lstrip("+-.") in ("inf", "infinity", "nan"):
        return "; numbers are finite here"
    return "; in quotes it is text" if NUMBER.fullmatch(value) and not isinstance(value, Plain) else ""
