"""What every data source offers: the recipe fields they share, and the Dataset that opening one gives."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import numpy as np
from annotated_types import Ge, Gt, Lt

if TYPE_CHECKING:  # decoding imports torch, which checking a recipe should not wait for
    from mpp.data.decode import Raw

Split = Literal["train", "test"]


class Dataset(Protocol):
    """Numbered images, with or without labels. Ids 0..len-1 number everything listed and never change.

    Picklable, holds no open file or random state: workers may fork it or unpickle it.
    """

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names in the order of their numbers; None: unlabelled."""
        ...

    @property
    def description(self) -> str:
        """One line for the header: what, where, how many, what was ignored."""
        ...

    def __len__(self) -> int: ...

    def read(self, ids: Sequence[int]) -> "Sequence[Raw | Exception]":
        """Encoded bytes (or pixels) per id; what cannot be read is its exception, in place, never raised."""
        ...

    def labels(self) -> np.ndarray | None:
        """int64 (len,) numbers into `classes`; -1: this image has none. None: the data has no labels."""
        ...

    def name(self, id: int) -> str:
        """What a person would look for: for lists of skipped images."""
        ...

    def fingerprint(self) -> str:
        """Short hex over count, names and sizes; not over times, nor over where the data lies."""
        ...


@dataclass(frozen=True, kw_only=True)
class SourceFields:
    """What can be said about every data source."""

    kind: str
    """which source"""

    channels: Annotated[int, Ge(1)] = 3
    """channels of the decoded images: 1 gray, 3 RGB, 4 RGBA, n as stored"""

    range: tuple[float, float] | None = None
    """black and white in 16-bit and float images (8-bit ones stay); null: 0 and 65535, or a float image's own range"""

    heldout: Annotated[float, Gt(0), Lt(1)] = 0.02
    """share of train held out for the loss where the source has no test split"""

    def faults(self) -> Iterator[tuple[str, str]]:
        """(field, message) of what the types cannot see."""
        if self.range is not None and not self.range[0] < self.range[1]:
            yield "range", f"expected [black, white] with black < white, got {list(self.range)}"


class Names:
    """A tuple of byte strings in two blocks of memory.

    A million Python objects would be copied page by page in every forked worker, as counting references
    writes to them.
    """

    def __init__(self, names: Iterable[bytes]):
        names = list(names)
        self._ends = np.cumsum([0, *map(len, names)], dtype=np.int64)
        self._bytes = b"".join(names)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, id: int) -> bytes:
        if not 0 <= id < len(self):
            raise IndexError(f"id {id} of {len(self)}")
        return self._bytes[self._ends[id] : self._ends[id + 1]]

    def __iter__(self) -> Iterator[bytes]:
        return (self[id] for id in range(len(self)))


def digest(parts: Iterable[bytes]) -> str:
    """16 hex digits over a sequence of byte strings; where one ends and the next begins counts."""
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def shown(path: bytes | str | Path) -> str:
    """A path that any terminal or log can take: bytes that are not UTF-8 appear as \\xff."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def listed(names: Iterable[str], most: int = 8) -> str:
    """'a', 'b', 'c' and 12 more."""
    names = list(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more


def check_classes(stored: Sequence[str], found: Sequence[str], where: str) -> None:
    """ValueError unless `found` are the classes of `stored`, in the same order: their numbers are the labels.

    where: what has the classes `found`, as the message's first words.
    """
    if tuple(stored) == tuple(found):
        return
    missing, extra = Counter(stored) - Counter(found), Counter(found) - Counter(stored)
    faults = [f"{word} {listed(part.elements())}" for word, part in (("missing", missing), ("extra", extra)) if part]
    raise ValueError(
        f"{where}: expected the {len(stored):,} classes of the model, found {len(found):,}; "
        f"{'; '.join(faults) or _moved(stored, found)}"
    )


def _moved(stored: Sequence[str], found: Sequence[str], most: int = 5) -> str:
    pairs = [(number, *pair) for number, pair in enumerate(zip(stored, found, strict=True)) if pair[0] != pair[1]]
    moved = ", ".join(f"number {number} is {new!r} instead of {old!r}" for number, old, new in pairs[:most])
    return f"the same names in another order: {moved}" + (" and so on" if len(pairs) > most else "")
