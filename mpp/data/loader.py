"""From positions in the order to batches of views: read, decode, crop, stack; bad pictures replaced and named."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from mpp.data.dataset import listed
from mpp.data.decode import DecodeError, decode
from mpp.data.folders import attempt
from mpp.data.order import Order, Share
from mpp.data.sources import Subset
from mpp.data.transforms import Augment, fixed_view
from mpp.data.workers import PREFETCH, Attempts, Whereabouts
from mpp.patches import Size

MAX_SPARES = 100  # unreadable replacements in a row before the data as a whole is called unreadable


@dataclass(frozen=True)
class Skipped:
    """A picture that could not be used, for `skipped.jsonl`."""

    id: int
    name: str
    reason: str


class Pictures:
    """Pictures of a subset, by dataset id."""

    def __init__(self, subset: Subset, channels: int, range: tuple[float, float] | None):
        self.subset, self.channels, self.range = subset, channels, range
        self.whereabouts: Whereabouts | None = None
        self.attempts = Attempts()

    def views(self, ids: Sequence[int], make: Callable[[int, Tensor], Tensor]) -> list[Tensor | Skipped]:
        """`make(row, picture)` of each id, or why there is none. picture: uint8 (C, h, w), upright.

        One picture is decoded at a time: a batch of camera photographs would take gigabytes before it is cropped.
        """
        raws = self._read(ids)
        decoded = (self._decoded(id, raw) for id, raw in zip(ids, raws, strict=True))
        made = [p if isinstance(p, Skipped) else make(row, p) for row, p in enumerate(decoded)]
        self._note(-1)
        return made

    def _note(self, id: int) -> None:
        if self.whereabouts is not None:
            self.whereabouts.note(id)

    def _read(self, ids: Sequence[int]) -> "Sequence[Any]":
        """What the dataset has for each id; what fails for all at once is asked for one by one."""
        self._note(int(ids[0]) if len(ids) else -1)
        try:
            return self.subset.dataset.read(ids)
        except OSError:
            return [attempt(self._read_one, id) for id in ids]

    def _read_one(self, id: int) -> Any:
        return self.subset.dataset.read([id])[0]

    def _decoded(self, id: int, raw: Any) -> Tensor | Skipped:
        self._note(int(id))
        raw = self.attempts.again(raw, lambda: attempt(self._read_one, id))
        try:
            if isinstance(raw, Exception):
                raise DecodeError(f"cannot be read: {raw}")
            return decode(raw, self.channels, self.range)
        except DecodeError as error:
            return Skipped(int(id), self.subset.dataset.name(int(id)), str(error))


class TrainingViews(TorchDataset):
    """Global positions -> one micro-batch of augmented views; a pure function of (seed, position)."""

    def __init__(self, pictures: Pictures, order: Order, augment: Augment, size: Size):
        augment.check_channels(pictures.channels)
        self.pictures, self.order, self.augment, self.size = pictures, order, augment, size
        labels = pictures.subset.dataset.labels()
        self.labels = None if labels is None else torch.from_numpy(labels)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return self.__getitems__([position])

    def __getitems__(self, positions: list[int]) -> dict[str, Any]:
        """-> {"image": uint8 (B, C, H, W), "id", "epoch", "label"?: int64 (B,), "skipped": [Skipped]}."""
        epochs, indices = self.order.at(torch.tensor(positions))
        ids = torch.from_numpy(self.pictures.subset.at(indices.numpy()))
        views = self._views(epochs, ids)
        skipped: list[Skipped] = []
        for row, view in enumerate(views):
            if isinstance(view, Skipped):
                skipped += self._replace(row, epochs, ids, views)
        batch = {"image": torch.stack(cast(list[Tensor], views)), "id": ids, "epoch": epochs, "skipped": skipped}
        return batch if self.labels is None else batch | {"label": self.labels[ids]}

    def _views(self, epochs: Tensor, ids: Tensor) -> list[Tensor | Skipped]:
        draws = self.augment.draws(self.order.seed, epochs, ids)
        return self.pictures.views(ids.tolist(), lambda row, p: self.augment(p, self.size, draws[row]))

    def _replace(self, row: int, epochs: Tensor, ids: Tensor, views: list[Tensor | Skipped]) -> list[Skipped]:
        """Puts the first readable spare in the place of a bad picture; the names of all that were bad."""
        skipped, bad = [cast(Skipped, views[row])], int(ids[row])
        for number in range(MAX_SPARES):
            spare = self.order.spare(int(epochs[row]), bad, number)
            ids[row] = int(self.pictures.subset.at([spare])[0])
            view = self._views(epochs[row : row + 1], ids[row : row + 1])[0]
            if not isinstance(view, Skipped):
                views[row] = view
                return skipped
            skipped.append(view)
        raise ValueError(
            f"{MAX_SPARES} pictures in a row could not be read, the last: {skipped[-1].name}: {skipped[-1].reason}. "
            f"Does data.path hold pictures?"
        )


class FixedViews(TorchDataset):
    """Places in a subset -> the pictures' fixed views; unreadable ones are left out and named."""

    def __init__(self, pictures: Pictures, size: Size, view: Callable[[Tensor, Size], Tensor] = fixed_view):
        self.pictures, self.size, self.view = pictures, size, view

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self.__getitems__([place])

    def __getitems__(self, places: list[int]) -> dict[str, Any]:
        """-> {"image": uint8 (B', C, H, W), "id", "place": int64 (B',), "skipped": [Skipped]}, B' <= B."""
        ids = self.pictures.subset.at(places)
        made = self.pictures.views(ids.tolist(), lambda row, picture: self.view(picture, self.size))
        good = [row for row, view in enumerate(made) if isinstance(view, Tensor)]
        views = [cast(Tensor, made[row]) for row in good]
        return {
            "image": torch.stack(views) if views else torch.empty(0, self.pictures.channels, *self.size).byte(),
            "id": torch.from_numpy(ids[good]),
            "place": torch.tensor(places, dtype=torch.int64)[good],
            "skipped": [view for view in made if isinstance(view, Skipped)],
        }


def training_batches(
    views: TrainingViews,
    share: Share,
    first_step: int,
    last_step: int,
    workers: int,
    pin: bool = False,
    timeout: int = 0,
) -> Iterator[dict[str, Any]]:
    """One process's micro-batches from `first_step` on, the same for any number of workers.

    RuntimeError from a worker that ends, or that takes longer than `timeout` seconds (0: for ever) for a batch.

    The only place that forks workers, and once: a fork right after another loader has ended may meet its dying threads
    and hang for ever (seen with CPython 3.11.7: the child waits for the lock over thread states).
    """
    views.pictures.whereabouts = Whereabouts(workers)
    loader = DataLoader(
        views,
        batch_sampler=cast(Any, share.micro_batches(first_step, last_step)),
        num_workers=workers,
        collate_fn=_as_it_is,
        worker_init_fn=_leave_signals_to_the_parent,
        pin_memory=pin,
        prefetch_factor=PREFETCH if workers else None,
        timeout=timeout if workers else 0,
    )
    return iter(loader)


def told_worker(error: str, pictures: Pictures) -> str:
    """What became of a worker that is gone, or too slow, and the pictures it was at. error: in torch's words."""
    ids = pictures.whereabouts.of(error) if pictures.whereabouts else []
    at = f"; it was at {listed(pictures.subset.dataset.name(id) for id in ids)}" if ids else ""
    return (
        f"train.workers: {error.partition('. ')[0].rstrip('.')}{at}. A picture that ends or stops a program should be "
        f"taken out; a machine short of memory wants fewer workers. The same command goes on from the last checkpoint"
    )


def fixed_batches(views: FixedViews, chunks: Iterable[Sequence[int]]) -> Iterator[dict[str, Any]]:
    """The views of given chunks of places, in order; read in this process (see `training_batches`)."""
    return (views.__getitems__(list(places)) for places in chunks)


def chunks_of(count: int, size: int, rank: int = 0, world: int = 1) -> list[tuple[int, list[int]]]:
    """0 .. count - 1 in fixed chunks, numbered; those of one process. The cut does not depend on the processes."""
    starts = list(enumerate(range(0, count, size)))
    return [(number, list(range(at, min(at + size, count)))) for number, at in starts[rank::world]]


def spread(count: int, limit: int) -> np.ndarray:
    """At most `limit` of 0 .. count - 1, evenly spread: which pictures stand for a large split."""
    return np.arange(count) if count <= limit else np.arange(limit) * count // limit


def _as_it_is(batch: Any) -> Any:
    return batch


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ctrl-C reaches the whole process group: workers must live until the parent has finished its step."""
    import ctypes
    import signal
    import sys

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: one that hangs must not outlive the parent
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
