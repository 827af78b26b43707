"""One feature function for every evaluation: a frozen backbone, every image exactly once, the same on any processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpp.backbones import Backbone, Readout
from mpp.data.dataset import SourceFields
from mpp.data.loader import FixedViews, Pictures, Skipped, chunks_of, fixed_batches
from mpp.data.sources import Splits, Subset, open_splits, require_labels, require_test_images
from mpp.heads import Classifier
from mpp.runtime import Runtime

CHUNK = 64  # images per forward pass, fixed: digits must not depend on the number of processes


@dataclass(frozen=True)
class Split:
    """Features and labels of a labelled source: x float32 (N, D), y int64 (N,), on the CPU."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: tuple[str, ...]
    name: str


class Features:
    """Frozen features of labelled sources, computed once for all evaluations that ask.

    evaluations: recipe sections with `data`, `pool` and `layers`; they tell what one pass must yield. default: the
    source of those whose `data` is null. Pictures that cannot be read are left out and listed in `skipped`,
    with where they were met: "cifar10 test". which: what notes call the backbone, trained or untrained.
    """

    def __init__(
        self,
        backbone: Backbone,
        runtime: Runtime,
        evaluations: Sequence[Any],
        default: SourceFields,
        splits: dict[Any, Splits] | None = None,
        which: str = "trained",
    ):
        self.which = which
        self.backbone, self.runtime, self.default = backbone, runtime, default
        self.evaluations, self.splits = evaluations, {} if splits is None else splits
        self.names = names_of([default, *(e.data for e in evaluations if e.data is not None)])
        self.skipped: list[tuple[str, Skipped]] = []
        self.classifier: Classifier | None = None
        self._done: dict[Any, dict[tuple[Readout, int], Split]] = {}

    def get(self, source: Any, pool: Readout, layer: int) -> Split:
        """The features of a source (null: the default one) under a pooling, after a block."""
        source = source or self.default
        key = repr(source)
        if key not in self._done:
            self._done[key] = self._extract(source)
        return self._done[key][pool, layer]

    def readouts(self, evaluation: Any) -> list[tuple[Readout, int]]:
        """What an evaluation asks for, (pool, layer), in its order; `all` layers become numbers."""
        layers = self.backbone.layers_of(evaluation.layers)
        return [(pool, layer) for pool in evaluation.pool for layer in layers]

    def note(self, kind: str, name: str, text: str) -> None:
        """A line about an evaluation of this backbone on the data of that name."""
        self.runtime.log(f"note       {kind} on {name}, {self.which} backbone, {text}")

    def open(self, source: Any) -> Splits:
        """The source's two splits; opened once."""
        key = repr(source)
        if key not in self.splits:
            self.splits[key] = open_splits(source)
        return self.splits[key]

    def _extract(self, source: Any) -> dict[tuple[Readout, int], Split]:
        asking = [e for e in self.evaluations if repr(e.data or self.default) == repr(source)]
        pools = sorted({pool for e in asking for pool in e.pool})
        layers = sorted({layer for e in asking for layer in self.backbone.layers_of(e.layers)})
        splits = self.open(source)
        classes, name = splits.train.classes or (), self.names[repr(source)]
        train_x, train_y = self._subset(splits.train, source, f"{name} train", pools, layers)
        test_x, test_y = self._subset(splits.heldout, source, f"{name} test", pools, layers)
        return {at: Split(train_x[at], train_y, test_x[at], test_y, classes, name) for at in train_x}

    @torch.no_grad()
    def _subset(
        self, subset: Subset, source: Any, where: str, pools: Sequence[Readout], layers: Sequence[int]
    ) -> tuple[dict[Any, Tensor], Tensor]:
        """Every image of a subset through the backbone: features by (pool, layer), and labels."""
        runtime, count = self.runtime, len(subset)
        self.backbone.eval()
        views = FixedViews(Pictures(subset, source.channels, source.range), self.backbone.image_size)
        chunks = chunks_of(count, CHUNK, runtime.rank, runtime.world)
        rows = {(pool, layer): torch.zeros(count, self.backbone.width(pool)) for pool in pools for layer in layers}
        seen = torch.zeros(count, dtype=torch.int64)
        skipped = 0
        for batch in fixed_batches(views, [places for _, places in chunks]):
            skipped += len(batch["skipped"])
            self.skipped += [(where, skip) for skip in batch["skipped"]]
            if len(batch["place"]):
                seen[batch["place"]] += 1
                outputs = self.backbone.features(batch["image"].to(runtime.device), pools, layers)
                for at, values in outputs.items():
                    rows[at][batch["place"]] = values.float().cpu()
        rows = {at: self.runtime.summed(values) for at, values in rows.items()}
        seen, skipped = self.runtime.summed(seen), int(self.runtime.summed(torch.tensor(skipped)))
        assert int(seen.sum()) == count - skipped and int(seen.max()) <= 1, "an image was not counted exactly once"
        good = seen.bool()
        return {at: values[good] for at, values in rows.items()}, torch.from_numpy(subset.labels())[good]


def check(evaluation: Any, splits: Splits, backbone: Backbone) -> None:
    """ValueError for labels or features that this evaluation cannot work with; before anything is computed."""
    require_labels(splits, evaluation.kind)
    require_test_images(splits)
    backbone.check_readout(evaluation.pool, evaluation.layers)
    none, train, test = torch.empty(0), splits.train.labels(), splits.heldout.labels()
    assert train is not None and test is not None
    classes, name = splits.train.classes or (), splits.train.dataset.description
    evaluation.check(Split(none, torch.from_numpy(train), none, torch.from_numpy(test), classes, name))


def name_of(source: Any, parts: int = 1) -> str:
    """A short name for result rows: the kind, or the last parts of what distinguishes the data."""
    what = getattr(source, "path", None) or getattr(source, "name", None)
    if not what:
        return source.kind
    pieces = [piece for piece in str(what).split("/") if piece not in ("", ".") and "*" not in piece]
    configuration = getattr(source, "name", None) if getattr(source, "path", None) else None
    return "/".join([*pieces[-parts:], *([configuration] if configuration else [])]) or str(what)


def names_of(sources: Sequence[Any]) -> dict[str, str]:
    """repr(source) -> a name that no other of them has: as much of the path as tells them apart, then a number."""
    distinct = {repr(source): source for source in sources}
    names = {key: name_of(source) for key, source in distinct.items()}
    for parts in (2, 3, 4):
        twice = {name for name in names.values() if list(names.values()).count(name) > 1}
        names |= {key: name_of(distinct[key], parts) for key, name in names.items() if name in twice}
    seen: dict[str, int] = {}
    for key, name in names.items():
        seen[name] = seen.get(name, 0) + 1
        names[key] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return names
