"""Probes trained on views that are made afresh every epoch: the frozen backbone runs at each step, nothing is cached.

Digits do not depend on the number of processes: a batch is cut into micro-batches of a fixed size, and each process
takes every world-th of them. What a probe then adds up over them it adds exactly (`augmented`) or in float64
(`attentive`).
"""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

import torch
from annotated_types import Ge, Gt, Lt, MinLen
from torch import Tensor

from mpp.backbones import Backbone, Layers
from mpp.chance import Purpose, seed_of
from mpp.data.loader import FixedViews, Pictures, TrainingViews, chunks_of, fixed_batches
from mpp.data.order import Order
from mpp.data.sources import Source, Splits, Subset
from mpp.data.transforms import Augment, RandomResizedCrop
from mpp.evaluation.checks import check_labels, repeats
from mpp.evaluation.features import CHUNK, Split
from mpp.evaluation.scores import (
    at_edge,
    check_can_hold_back,
    check_learned,
    choose,
    hits,
    hold_back,
    summary,
    tops_of,
)
from mpp.optim import curve
from mpp.runtime import Runtime

if TYPE_CHECKING:
    from mpp.evaluation.features import Features

Place = tuple[Any, ...]  # where the frozen features are read: (pool, layer), or (layer,) for tokens
Rates = Mapping[Place, Sequence[float]]


@dataclass(frozen=True)
class MicroBatch:
    """images uint8 (b, C, H, W) and labels int64 (b,) on the device; rows int64 (b,): where in the batch they are."""

    images: Tensor
    labels: Tensor
    rows: Tensor


class Learner(Protocol):
    """The heads of all places and learning rates, trained side by side on the same views."""

    rates: Rates

    def learn(self, mine: Sequence[MicroBatch], batch_size: int, factor: float) -> dict[Place, Tensor]:
        """One update from this process's part of a batch, at `factor` times each rate; the mean losses, (L,)."""
        ...

    def scores(self, images: Tensor) -> dict[Place, Tensor]:
        """uint8 (B, C, H, W) -> logits (L, B, classes)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Streamed(ABC):
    """What streamed probes share: training on views, choice of the learning rate on a slice of train, rows.

    With more than one learning rate all are trained in one pass without the slice, and the best again on all of train:
    twice the time of a single rate.
    """

    kind: str
    data: Source | None = None
    """labelled images to evaluate on; null: those of the pretraining"""
    layers: Annotated[Layers, MinLen(1)] = (-1,)
    """blocks after which features are taken; -1 is the last; all: every one"""
    augment: Augment = field(default_factory=lambda: Augment(crop=RandomResizedCrop(scale=(0.08, 1.0))))
    """training views"""
    learning_rates: Annotated[tuple[Annotated[float, Gt(0)], ...], MinLen(1)] = (0.1,)
    """for a batch of 256: multiplied by batch_size / 256"""
    epochs: Annotated[int, Ge(1)] = 90
    """passes over the train images"""
    warmup_epochs: Annotated[int, Ge(0)] = 10
    """of linear rise; then half a cosine to 0"""
    batch_size: Annotated[int, Ge(2)] = 4096
    """images per update over all processes"""
    micro_batch_size: Annotated[int, Ge(1)] = 64
    """images per forward pass; the same on any number of processes, so that digits are too"""
    validation: Annotated[float, Gt(0), Lt(1)] = 0.1
    """share of the train images of each class on which the learning rate is chosen, if there are several"""
    seeds: Annotated[int, Ge(1)] = 1
    """orders, crops, slices and initial weights; value, spread and interval are over them"""

    pool: ClassVar[tuple[Any, ...]] = ()  # a section without pooling still answers the question which poolings it needs

    @abstractmethod
    def places(self, backbone: Backbone) -> list[Place]:
        """Where features are read: one head, and one row, for each."""

    @abstractmethod
    def learner(self, backbone: Backbone, runtime: Runtime, rates: Rates, classes: int, seed: int) -> Learner:
        """Heads with initial weights that are a function of the seed."""

    @abstractmethod
    def setting(self, place: Place, backbone: Backbone) -> dict[str, Any]:
        """What identifies a place's row."""

    @property
    def common_setting(self) -> dict[str, Any]:
        """What tells the rows of two such probes apart, whichever head they have."""
        return {"epochs": self.epochs, "warmup_epochs": self.warmup_epochs, "batch_size": self.batch_size}

    def faults(self) -> Iterator[tuple[str, str]]:
        yield from repeats(layers=self.layers, learning_rates=self.learning_rates)
        if self.warmup_epochs >= self.epochs:
            yield "warmup_epochs", f"{self.warmup_epochs} is not less than epochs {self.epochs}"

    def check(self, split: Split) -> None:
        """ValueError for what cannot be evaluated; reads only train_y, test_y, classes and name."""
        check_labels(split)
        if len(self.learning_rates) > 1:
            check_can_hold_back(split.train_y, split.name)

    def __call__(self, features: "Features") -> Iterator[dict[str, Any]]:
        """One row per place and metric; `chosen`: per seed, the learning rate, by which score, the last epoch's mean
        training loss, and whether it is below that of knowing nothing. `seconds`: all of it, places and seeds together.
        """
        started, where = time.perf_counter(), _Where.of(self, features)
        self.check(where.labels())
        results = [self._probed(where, seed) for seed in range(self.seeds)]
        seconds = round(time.perf_counter() - started, 3)
        for place in self.places(features.backbone):
            for number, top in enumerate(tops_of(where.classes)):
                yield {
                    "evaluation": self.kind,
                    "dataset": where.name,
                    "setting": self.setting(place, features.backbone),
                    "metric": f"top{top}",
                    **summary([int(result[place][0][number]) / result[place][1] for result in results]),
                    "images": results[0][place][1],
                    "seconds": seconds,
                    "chosen": [result[place][2] for result in results],
                }

    def _probed(self, where: "_Where", seed: int) -> dict[Place, tuple[Tensor, int, dict[str, Any]]]:
        """Place -> hits on test for each top, images counted, what was chosen."""
        rates = tuple(sorted(self.learning_rates))
        places = self.places(where.features.backbone)
        best, score = dict.fromkeys(places, 0), dict[Place, float]()
        if len(rates) > 1:
            train, held = where.cut(self.validation, seed)
            learner, _ = self._trained(where, train, dict.fromkeys(places, rates), seed)
            counts, images = where.scored(learner, held, "train", (1,))
            for place, count in counts.items():
                top1 = [int(right) / images for right in count[:, 0]]
                best[place] = choose(top1)
                score[place] = top1[best[place]]
        learner, losses = self._trained(where, where.splits.train, {p: (rates[i],) for p, i in best.items()}, seed)
        learned = self._learned(where, {place: float(loss) for place, loss in losses.items()})
        counts, images = where.scored(learner, where.splits.heldout, "test", tops_of(where.classes))
        return {
            place: (
                counts[place][0],
                images,
                {
                    "learning_rate": rates[i],
                    "validation": score.get(place),
                    "at_edge": at_edge(i, len(rates)),
                    "train_loss": float(losses[place]),
                    "learned": learned[place],
                },
            )
            for place, i in best.items()
        }

    def _learned(self, where: "_Where", losses: Mapping[Place, float]) -> dict[Place, bool]:
        """Which places' loss is below that of knowing nothing. ValueError if none is; one that is not is said."""
        learned = {place: loss < math.log(where.classes) for place, loss in losses.items()}
        if not any(learned.values()):
            check_learned(min(losses.values()), where.classes, f"{self.kind} on {where.name}")
        for place in (place for place, good in learned.items() if not good):
            where.features.note(self.kind, where.name, f"{place} learned nothing")
        return learned

    def _trained(self, where: "_Where", subset: Subset, rates: Rates, seed: int) -> tuple[Learner, dict[Place, Tensor]]:
        """Heads trained on a subset, and their mean loss over the last epoch, (L,) for each place."""
        backbone, runtime, per_epoch = where.features.backbone, where.features.runtime, len(subset) / self.batch_size
        steps = math.ceil(self.epochs * per_epoch)
        warmup = min(round(self.warmup_epochs * per_epoch), steps - 1)
        backbone.eval()
        learner = self.learner(backbone, runtime, rates, where.classes, seed)
        last: deque[dict[Place, Tensor]] = deque(maxlen=math.ceil(per_epoch))
        for step, mine in enumerate(self._batches(where, subset, seed, steps)):
            factor = self.batch_size / 256 * curve(step, steps, "cosine", 1.0, 0.0, warmup)
            last.append(learner.learn(mine, self.batch_size, factor))
            if (step + 1) * 10 // steps > step * 10 // steps:
                told = min(float(losses.min()) for losses in last[-1].values())
                runtime.log(f"{self.kind} on {where.name}: {(step + 1) / steps:.0%} of training, loss {told:.3f}")
        return learner, {place: torch.stack([one[place].double() for one in last]).mean(0).cpu() for place in rates}

    def _batches(self, where: "_Where", subset: Subset, seed: int, steps: int) -> Iterator[list[MicroBatch]]:
        """This process's micro-batches of every step; read in this process (see `training_batches`)."""
        runtime, size = where.features.runtime, where.features.backbone.image_size
        order = Order(len(subset), seed_of(seed, Purpose.PROBE))
        views = TrainingViews(where.pictures(subset), order, self.augment, size)
        chunks = chunks_of(self.batch_size, self.micro_batch_size, runtime.rank, runtime.world)
        for step in range(steps):
            mine = []
            for _, rows in chunks:
                batch = views.__getitems__([step * self.batch_size + row for row in rows])
                where.note("train", batch["skipped"])
                images, labels = batch["image"].to(runtime.device), batch["label"].to(runtime.device)
                mine.append(MicroBatch(images, labels, torch.tensor(rows)))
            yield mine


@dataclass(frozen=True)
class _Where:
    """A labelled source, opened, with the features' backbone and runtime."""

    features: "Features"
    source: Any
    splits: Splits
    name: str

    @classmethod
    def of(cls, probe: Streamed, features: "Features") -> "_Where":
        source = probe.data or features.default
        return cls(features, source, features.open(source), features.names[repr(source)])

    @property
    def classes(self) -> int:
        return len(self.splits.train.classes or ())

    def labels(self) -> Split:
        """A Split without features."""
        none = torch.empty(0)
        train, test = (_labels(part) for part in (self.splits.train, self.splits.heldout))
        return Split(none, train, none, test, self.splits.train.classes or (), self.name)

    def pictures(self, subset: Subset) -> Pictures:
        return Pictures(subset, self.source.channels, self.source.range)

    def note(self, part: str, skipped: Sequence[Any]) -> None:
        self.features.skipped += [(f"{self.name} {part}", skip) for skip in skipped]

    def cut(self, share: float, seed: int) -> tuple[Subset, Subset]:
        """Train without the slice on which a setting is chosen, and the slice."""
        train = self.splits.train
        held = hold_back(_labels(train), torch.from_numpy(train.ids), share, seed).numpy()
        return Subset(train.dataset, train.ids[~held]), Subset(train.dataset, train.ids[held])

    @torch.no_grad()
    def scored(
        self, learner: Learner, subset: Subset, part: str, tops: Sequence[int]
    ) -> tuple[dict[Place, Tensor], int]:
        """Hits per place, int64 (L, len(tops)), on the fixed views of a subset, and how many images were counted.

        Every readable image counts once, on any number of processes.
        """
        runtime, labels = self.features.runtime, _labels(subset)
        views = FixedViews(self.pictures(subset), self.features.backbone.image_size)
        chunks = chunks_of(len(subset), CHUNK, runtime.rank, runtime.world)
        seen, skipped = torch.zeros(len(subset), dtype=torch.int64), 0
        right = {place: torch.zeros(len(rates), len(tops)).long() for place, rates in learner.rates.items()}
        for batch in fixed_batches(views, [places for _, places in chunks]):
            skipped += len(batch["skipped"])
            self.note(part, batch["skipped"])
            if len(batch["place"]):
                seen[batch["place"]] += 1
                truth = labels[batch["place"]]
                for place, scores in learner.scores(batch["image"].to(runtime.device)).items():
                    right[place] += torch.stack([hits(one, truth, tops) for one in scores.cpu()])
        seen, skipped = runtime.summed(seen), int(runtime.summed(torch.tensor(skipped)))
        assert int(seen.sum()) == len(subset) - skipped and int(seen.max()) <= 1, (
            "an image was not counted exactly once"
        )
        if not seen.any():
            raise ValueError(f"evaluation on {self.name}: none of {len(subset)} {part} images could be read")
        return {place: runtime.summed(counts) for place, counts in right.items()}, int(seen.sum())


def _labels(subset: Subset) -> Tensor:
    labels = subset.labels()
    if labels is None:
        raise ValueError(f"a probe needs labels, and this has none: {subset.dataset.description}")
    return torch.from_numpy(labels)
