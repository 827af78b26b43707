"""The list of pictures that could not be used: each named once, in `skipped.jsonl`."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from mpp.data.loader import Skipped
from mpp.metrics import JsonLines

FEW = 20


class SkipList:
    """Collects what any process skipped; `flush` (on all processes) writes what is new.

    gather: the lists of all processes as one.
    """

    def __init__(self, file: JsonLines, gather: Callable[[list[Any]], list[Any]]):
        self.file, self.gather = file, gather
        self.known = {(row["split"], row["id"]) for row in file.read()}
        self.pending: dict[tuple[str, int], Skipped] = {}

    def __len__(self) -> int:
        return len(self.known)

    def count(self, split: str) -> int:
        """How many of a split are named in the file; the same on every process after a flush."""
        return sum(name == split for name, _ in self.known)

    @staticmethod
    def is_too_much(bad: int, seen: int, limit: float) -> bool:
        """Whether so many bad ones of those seen say that something is wrong as a whole; a few never do."""
        return bad >= FEW and bad > limit * seen

    def add(self, split: str, skipped: Iterable[Skipped]) -> None:
        """What was met while reading a split: train, heldout, or an evaluation's data by name."""
        self.pending |= {(split, s.id): s for s in skipped if (split, s.id) not in self.known}

    def flush(self) -> None:
        """Every process must call this at the same step."""
        new = dict(self.gather(list(self.pending.items())))
        for (split, id), skip in sorted(new.items()):
            if (split, id) not in self.known:
                self.file.write({"split": split} | asdict(skip))
        self.known |= set(new)
        self.pending.clear()
