"""Where images come from: the sources a recipe can name, and the two parts of one: train and held out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from mpp.data.dataset import Dataset, SourceFields, Split, check_classes
from mpp.data.demo import Demo
from mpp.data.folders import ClassFolders, Folder
from mpp.data.huggingface import HuggingFace
from mpp.data.torchvision_sets import Torchvision
from mpp.words import plural

__all__ = [
    "ClassFolders",
    "Dataset",
    "Demo",
    "Folder",
    "HuggingFace",
    "Source",
    "SourceFields",
    "Split",
    "Splits",
    "Subset",
    "Torchvision",
    "open_splits",
    "require_labels",
]


@dataclass(frozen=True)
class Subset:
    """Some images of a dataset: `chosen` int64 (n,), ascending and without repeats; None: all, at no cost in memory."""

    dataset: Dataset
    chosen: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.dataset) if self.chosen is None else len(self.chosen)

    @property
    def ids(self) -> np.ndarray:
        """int64 (n,), ascending."""
        return np.arange(len(self.dataset), dtype=np.int64) if self.chosen is None else self.chosen

    def at(self, places: np.ndarray | Sequence[int]) -> np.ndarray:
        """The ids, a new int64 array, at these places of `ids`."""
        return np.array(places, dtype=np.int64) if self.chosen is None else self.chosen[places]

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self.dataset.classes

    def labels(self) -> np.ndarray | None:
        """int64 (n,) in the order of `ids`; -1: none. None: the data has no labels."""
        labels = self.dataset.labels()
        return labels if labels is None or self.chosen is None else labels[self.chosen]


@dataclass(frozen=True)
class Splits:
    """What a run learns from, and what it is measured on without learning from it."""

    train: Subset
    heldout: Subset

    @property
    def description(self) -> str:
        """One line for the header."""
        if self.heldout.dataset is self.train.dataset:
            return f"{self.train.dataset.description}; {len(self.heldout):,} of them held out"
        return f"{self.train.dataset.description}; held out: {self.heldout.dataset.description}"


def open_splits(source: "Source", seed: int = 0) -> Splits:
    """Train, and the source's test split; a part of train is held out where the source has none.

    Which part is a function of (seed, id) alone. ValueError: nothing there, or too little to hold any out.
    """
    train = source.open("train")
    if train is None:
        raise ValueError(f"{source.kind}: there is no training split")
    test = source.open("test")
    if test is None:
        return held_out(train, source.heldout, seed)
    if test.classes is not None and test.classes != train.classes:
        check_classes(train.classes or (), test.classes, f"{test.description} (train: {train.description})")
    return Splits(train=Subset(train), heldout=Subset(test))


def held_out(dataset: Dataset, share: float, seed: int) -> Splits:
    """One dataset in two parts: max(1, round(share * n)) images held out, at least one left to train on."""
    count = len(dataset)
    if not 0 < share < 1:
        raise ValueError(f"heldout: expected a share between 0 and 1, got {share}")
    if count < 2:
        raise ValueError(f"{dataset.description}: expected at least 2 images, one of them to hold out")
    out = min(max(1, round(share * count)), count - 1)
    is_out = _smallest(_draws(seed, count), out)
    return Splits(Subset(dataset, np.flatnonzero(~is_out)), Subset(dataset, np.flatnonzero(is_out)))


def _draws(seed: int, count: int, block: int = 1 << 18) -> np.ndarray:
    """int64 (count,): a number of its own for each image; made in blocks that fit into a processor's cache."""
    import torch

    from mpp.chance import Purpose, hashed

    draws = np.empty(count, dtype=np.int64)
    for begin in range(0, count, block):
        ids = torch.arange(begin, min(begin + block, count))
        draws[begin : begin + block] = hashed(seed, ids, Purpose.HELDOUT).numpy()
    return draws


def _smallest(values: np.ndarray, count: int) -> np.ndarray:
    """bool, where the `count` smallest values are; of equal ones the first."""
    last = np.partition(values, count - 1)[count - 1]
    found = values < last
    found[np.flatnonzero(values == last)[: count - int(found.sum())]] = True
    return found


def require_labels(splits: Splits, purpose: str) -> None:
    """ValueError unless every image of both parts has a label, and train has two classes or more.

    purpose: what the labels are for, as the message's first words: "fine-tuning".
    """
    for part in (splits.train, splits.heldout):
        labels, what = part.labels(), part.dataset.description
        if labels is None or part.classes is None:
            raise ValueError(
                f"{purpose} needs labels, and this has none: {what}; try kind: class_folders for a folder "
                f"with one sub-folder per class, or label_column for kind: huggingface"
            )
        if (missing := int((labels < 0).sum())) > 0:
            raise ValueError(f"{purpose} needs a label for every image, {missing:,} have none: {what}")
        if part is splits.train and (found := len(np.unique(labels))) < 2:
            raise ValueError(
                f"{purpose} needs at least two classes to tell apart, and train has {found}: {what}; try "
                f"other data (pretraining, which needs no labels, takes this as it is)"
            )


def require_test_images(splits: Splits) -> None:
    """ValueError where images kept from train, for want of a test split, are too few to say anything: under one for
    each class."""
    kept, classes = len(splits.heldout), len(splits.train.classes or ())
    if splits.heldout.dataset is splits.train.dataset and kept < classes:
        raise ValueError(
            f"data.heldout: the data has no test split, and {plural(kept, 'image')} kept from train cannot test "
            f"{plural(classes, 'class', 'classes')}: {splits.train.dataset.description}; try --data.heldout 0.2"
        )


Source = Annotated[
    Demo | Folder | ClassFolders | HuggingFace | Torchvision,
    Field(discriminator="kind"),
]
