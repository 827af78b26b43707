"""Accounting of a classifier's predictions: top-1, top-5, per class, and who was taken for whom. Counts only."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TOP = 5  # the second score of the usual pair; told only where there are more classes
LARGE = 5_000  # more classes than this have no matrix (21,000 of them would take 3.5 GB) and no rows of their own


@dataclass(frozen=True)
class Classification:
    """What was predicted of N images.

    truth, guess: int64 (N,), the true and the most probable classes. in_five: bool (N,), whether the true class is
    among the first five. classes: how many there are.
    """

    truth: Tensor
    guess: Tensor
    in_five: Tensor
    classes: int

    @classmethod
    def of_top(cls, top: Tensor, labels: Tensor, classes: int) -> "Classification":
        """top: int64 (N, 1 to 5), most probable class first; labels: int64 (N,).

        ValueError: a label that is none of the classes.
        """
        if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
            raise ValueError(
                f"expected labels 0..{classes - 1}, as the model has {classes:,} classes, "
                f"got {int(labels.min())}..{int(labels.max())}"
            )
        return cls(labels, top[:, 0], (top == labels[:, None]).any(1), classes)

    @property
    def is_large(self) -> bool:
        return self.classes > LARGE

    @property
    def confusion(self) -> Tensor:
        """int64 (C, C): images by true class (rows) and predicted class (columns)."""
        counts = torch.bincount(self.truth * self.classes + self.guess, minlength=self.classes * self.classes)
        return counts.reshape(self.classes, self.classes)

    @property
    def images(self) -> int:
        return len(self.truth)

    @property
    def images_per_class(self) -> Tensor:
        """int64 (C,)"""
        return torch.bincount(self.truth, minlength=self.classes)

    @property
    def top1(self) -> float:
        """Share of the images whose class scored highest."""
        return self._share(self.guess == self.truth)

    @property
    def top5(self) -> float:
        """Share of the images whose class is among the five that scored highest."""
        return self._share(self.in_five)

    @property
    def per_class(self) -> Tensor:
        """float64 (C,): the share of each class's images that were taken for it; NaN for a class without any."""
        right = torch.bincount(self.truth[self.guess == self.truth], minlength=self.classes)
        return right.double() / self.images_per_class

    @property
    def mean_per_class(self) -> float:
        """Mean of `per_class` over the classes that have images: every class counts alike."""
        return float(self.per_class.nanmean())

    def rows(self, dataset: str, setting: Mapping[str, Any], seconds: float) -> Iterator[dict[str, Any]]:
        """Result rows (DESIGN.md, recipes), without what only the job knows (run, step, backbone, commit)."""
        values = {"top1": self.top1, "top5": self.top5, "mean_class_accuracy": self.mean_per_class}
        if self.classes <= TOP:
            del values["top5"]
        for metric, value in values.items():
            yield self._row(dataset, setting, metric, value, self.images, seconds)

    def class_rows(
        self, dataset: str, setting: Mapping[str, Any], seconds: float, names: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        """A row `class_accuracy` for each class that has images, its name in the setting; none of a large number."""
        if self.is_large:
            return
        for name, value, count in zip(names, self.per_class.tolist(), self.images_per_class.tolist(), strict=True):
            if count:
                yield self._row(dataset, {**setting, "class": name}, "class_accuracy", value, count, seconds)

    def _row(self, dataset: str, setting: Mapping[str, Any], metric: str, value: float, images: int, seconds: float):
        return {
            "evaluation": "classification",
            "dataset": dataset,
            "setting": dict(setting),
            "metric": metric,
            "value": value,
            "spread": None,
            "seeds": 1,
            "images": images,
            "seconds": round(seconds, 3),
        }

    def _share(self, right: Tensor) -> float:
        if not self.images:
            raise ValueError("classification: there is no image to count; was every picture of the split unreadable?")
        return int(right.sum()) / self.images


def check_scores(logits: Tensor) -> None:
    """FloatingPointError where a score is NaN: it is neither higher nor lower than another."""
    if bad := int(logits.isnan().any(1).sum()):
        raise FloatingPointError(
            f"classification: {bad:,} of {len(logits):,} images have a score that is not a number; "
            "the model has diverged, or overflows in this precision"
        )
