"""Label budgets: which labelled train images a task may use, and which of these are kept back to choose by.

A budget is all the labels that are paid for: the validation slice is taken out of it, not added to it. Both are
functions of (seed, image id), so a smaller budget of one seed is contained in every larger one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Lt
from pydantic import Field

from mpp.data.dataset import listed
from mpp.data.sources import Subset

Parts = tuple[Subset, Subset | None]  # to train on, to choose by


@dataclass(frozen=True, kw_only=True)
class BudgetFields:
    """What can be said about every budget."""

    kind: str
    """which budget"""
    seed: Annotated[int, Ge(0)] = 0
    """which draw of the images"""

    def ranks(self, subset: Subset, labels: np.ndarray) -> np.ndarray:
        """int64 (n,): the place of each image in the drawn order of its class, from 0."""
        from mpp.chance import Purpose

        return _ranks(_keys(self.seed, subset.ids, Purpose.BUDGET), labels)


@dataclass(frozen=True, kw_only=True)
class Sliced(BudgetFields, ABC):
    """A budget with a validation slice of any size."""

    validation: Annotated[int, Ge(0)] | Annotated[float, Gt(0), Lt(1)] = 0
    """kept back from these for early stopping and choosing: a share under 1, or a number of images; 0: none"""

    def split(self, subset: Subset) -> Parts:
        """(to train on, to choose by); ValueError: too few images, of some class or in all."""
        labels = class_labels(subset)
        places = np.flatnonzero(self.chosen(subset, labels))
        return _sliced(subset, labels, places, self.validation, self.seed)

    @abstractmethod
    def chosen(self, subset: Subset, labels: np.ndarray) -> np.ndarray:
        """bool (n,): which images of the subset are in the budget."""


@dataclass(frozen=True, kw_only=True)
class All(Sliced):
    """Every labelled train image."""

    kind: Literal["all"] = "all"
    """every labelled train image"""

    def chosen(self, subset: Subset, labels: np.ndarray) -> np.ndarray:
        return np.ones(len(labels), dtype=bool)


@dataclass(frozen=True, kw_only=True)
class PerClass(Sliced):
    """The same number of images of every class."""

    kind: Literal["per_class"] = "per_class"
    """the same number of images of every class"""
    count: Annotated[int, Ge(1)]
    """images per class"""

    def chosen(self, subset: Subset, labels: np.ndarray) -> np.ndarray:
        counts = np.bincount(labels, minlength=len(subset.classes or ()))
        if (short := np.flatnonzero(counts < self.count)).size:
            few = ", ".join(f"{(subset.classes or ())[c]!r} has {counts[c]:,}" for c in short[:8])
            raise ValueError(
                f"labels.count: expected {self.count:,} train images of every class, and {len(short):,} of "
                f"{len(counts):,} classes have fewer, {few}: {subset.dataset.description}; "
                f"ask for at most {counts.min():,}, or for kind: total"
            )
        return self.ranks(subset, labels) < self.count


@dataclass(frozen=True, kw_only=True)
class Total(Sliced):
    """A number of images in all, of each class as many as of the others.

    A class that has too few gives all it has; the others make up for it.
    """

    kind: Literal["total"] = "total"
    """a number of images in all, spread over the classes as evenly as they allow"""
    count: Annotated[int, Ge(1)]
    """images in all"""

    def chosen(self, subset: Subset, labels: np.ndarray) -> np.ndarray:
        from mpp.chance import Purpose

        _check_count("labels.count", self.count, subset)
        if self.count < (classes := len(subset.classes or ())):
            raise ValueError(
                f"labels.count: expected at least one image for each of the {classes:,} classes, got {self.count:,}: "
                f"{subset.dataset.description}"
            )
        # The first of every class, then the second of every class ...: any beginning of this is even.
        order = np.lexsort((_keys(self.seed, subset.ids, Purpose.BUDGET), self.ranks(subset, labels)))
        chosen = np.zeros(len(labels), dtype=bool)
        chosen[order[: self.count]] = True
        return chosen


@dataclass(frozen=True, kw_only=True)
class Vtab1k(BudgetFields):
    """1,000 train images, 800 to train on and 200 to choose by; the test split stays whole.

    As the benchmark draws them: from all images alike, not class by class, so rare classes may be missing.
    Source: Zhai et al., A Large-scale Study of Representation Learning with the Visual Task Adaptation Benchmark
    (arXiv 1910.04867), section 2.3.
    """

    kind: Literal["vtab_1k"] = "vtab_1k"
    """1,000 images drawn from all alike, as in VTAB-1k: 800 to train on, 200 to choose by"""
    validation: bool = True
    """false: train on all 1,000, as the benchmark does once everything is chosen"""

    def split(self, subset: Subset) -> Parts:
        """(800 images, 200 images) or (1,000 images, None); ValueError: fewer than 1,000, or an empty class."""
        from mpp.chance import Purpose

        class_labels(subset)
        _check_count("labels vtab_1k", 1000, subset)
        drawn = np.argsort(_keys(self.seed, subset.ids, Purpose.BUDGET), kind="stable")[:1000]
        if not self.validation:
            return _part(subset, drawn), None
        return _part(subset, drawn[:800]), _part(subset, drawn[800:])


Budget = Annotated[All | PerClass | Total | Vtab1k, Field(discriminator="kind")]


def class_labels(subset: Subset) -> np.ndarray:
    """int64 (n,), each in 0 .. classes - 1; ValueError: an image without a label, or a class without an image."""
    labels, classes, what = subset.labels(), subset.classes, subset.dataset.description
    if labels is None or classes is None:
        raise ValueError(f"a label budget needs labels, and this has none: {what}; try kind: class_folders")
    if (without := int((labels < 0).sum())) > 0:
        raise ValueError(f"a label budget needs a label for every image, {without:,} have none: {what}")
    if len(labels) and (high := int(labels.max())) >= len(classes):
        raise ValueError(f"expected labels 0..{len(classes) - 1} for {len(classes)} classes, got {high}: {what}")
    if (empty := np.bincount(labels, minlength=len(classes)) == 0).any():
        names = listed(name for name, is_empty in zip(classes, empty, strict=True) if is_empty)
        raise ValueError(
            f"expected train images of every class, found none of {names}: {what}; "
            f"a class that is never shown cannot be learnt, and leaving it out would renumber the others"
        )
    return labels


def _keys(seed: int, ids: np.ndarray, purpose: int) -> np.ndarray:
    """A hash of (seed, id), int64 (n,)."""
    import torch

    from mpp.chance import hashed

    return hashed(seed, torch.from_numpy(np.asarray(ids, dtype=np.int64)), purpose).numpy()


def _ranks(keys: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The place of each image in its class when that is sorted by key."""
    order = np.lexsort((keys, labels))
    counts = np.bincount(labels)
    ranks = np.empty(len(labels), dtype=np.int64)
    ranks[order] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks


def _sliced(subset: Subset, labels: np.ndarray, places: np.ndarray, validation: float, seed: int) -> Parts:
    """The chosen places in two parts. Every class keeps one image to train on, whatever the slice.

    The slice takes every (n / count)-th of the images sorted by class: of each class its share, up to rounding, and
    exactly `count` in all.
    """
    from mpp.chance import Purpose

    if not validation:
        return _part(subset, places), None
    count = validation if isinstance(validation, int) else max(1, round(validation * len(places)))
    keys = _keys(seed, subset.at(places), Purpose.VALIDATION)
    order = np.lexsort((keys, _keys(seed, labels[places], Purpose.VALIDATION)))  # classes in no order of their names
    pool = order[_ranks(keys, labels[places])[order] > 0]
    if count > len(pool):
        raise ValueError(
            f"labels.validation: {count:,} of {len(places):,} labelled images asked, and at most {len(pool):,} can be "
            f"kept back, as every class needs one to train on: {subset.dataset.description}"
        )
    out = pool[(2 * np.arange(count) + 1) * len(pool) // (2 * count)]
    kept = np.ones(len(places), dtype=bool)
    kept[out] = False
    return _part(subset, places[kept]), _part(subset, places[out])


def _part(subset: Subset, places: np.ndarray) -> Subset:
    return Subset(subset.dataset, np.sort(subset.at(places)))


def _check_count(where: str, count: int, subset: Subset) -> None:
    if count > len(subset):
        raise ValueError(
            f"{where}: {count:,} train images asked, and there are {len(subset):,}: {subset.dataset.description}"
        )
