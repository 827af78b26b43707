"""What a run read at each step: sample ids, and a hash of each view with what was drawn for it. For comparing runs."""

import hashlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mpp.metrics import JsonLines


class Trace:
    """Collects the micro-batches of a step on every process and writes the step as one line, in global order."""

    def __init__(self, file: JsonLines, micro_batches: int, gather: Callable[[list[Any]], list[Any]]):
        self.file, self.micro_batches, self.gather = file, micro_batches, gather
        self.seen: list[tuple[int, str]] = []
        self.count = 0

    def add(self, step: int, batch: dict[str, Tensor], *plan: Tensor) -> None:
        """One micro-batch, still on the CPU, and what else was decided for each of its images (B, ...).

        The last micro-batch of a step writes it, so call it on all processes.
        """
        rows = zip(batch["image"], *plan, strict=True)
        self.seen += zip(batch["id"].tolist(), (_hash(*row) for row in rows), strict=True)
        self.count += 1
        if self.count == self.micro_batches:
            gathered = self.gather(self.seen)
            self.file.write({"step": step, "ids": [id for id, _ in gathered], "views": [view for _, view in gathered]})
            self.seen, self.count = [], 0


def _hash(*tensors: Tensor) -> str:
    digest = hashlib.blake2b(digest_size=4)
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
