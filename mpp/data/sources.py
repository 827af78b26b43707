"""Where images come from: the sources a recipe can name, and the two parts of one: train and held out."""

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
    """Some images of a dataset: `ids` int64 (n,), ascending and without repeats."""

    dataset: Dataset
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self.dataset.classes

    def labels(self) -> np.ndarray | None:
        """int64 (n,) in the order of `ids`; -1: none. None: the data has no labels."""
        labels = self.dataset.labels()
        return None if labels is None else labels[self.ids]


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
    return Splits(train=_whole(train), heldout=_whole(test))


def held_out(dataset: Dataset, share: float, seed: int) -> Splits:
    """One dataset in two parts: max(1, round(share * n)) images held out, at least one left to train on."""
    import torch

    from mpp.chance import Purpose, hashed

    count = len(dataset)
    if not 0 < share < 1:
        raise ValueError(f"heldout: expected a share between 0 and 1, got {share}")
    if count < 2:
        raise ValueError(f"{dataset.description}: expected at least 2 images, one of them to hold out")
    out = min(max(1, round(share * count)), count - 1)
    order = torch.argsort(hashed(seed, torch.arange(count), Purpose.HELDOUT), stable=True).numpy()
    return Splits(Subset(dataset, np.sort(order[out:])), Subset(dataset, np.sort(order[:out])))


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


def _whole(dataset: Dataset) -> Subset:
    return Subset(dataset, np.arange(len(dataset), dtype=np.int64))


Source = Annotated[
    Demo | Folder | ClassFolders | HuggingFace | Torchvision,
    Field(discriminator="kind"),
]
