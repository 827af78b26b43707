"""Accounting of a classifier's predictions: top-1, top-5, per class, and who was taken for whom. Counts only."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TOP = 5  # the second score of the usual pair; told only where there are more classes


@dataclass(frozen=True)
class Classification:
    """Counts of predictions; those of several processes or chunks are added.

    confusion: int64 (C, C), rows are the true classes, columns the predicted ones. top: int64 (C,), by true class,
    the images whose class is among the first five.
    """

    confusion: Tensor
    top: Tensor

    @classmethod
    def nothing(cls, classes: int) -> "Classification":
        """Of no image yet."""
        return cls(torch.zeros(classes, classes, dtype=torch.int64), torch.zeros(classes, dtype=torch.int64))

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> "Classification":
        """Of a batch: logits float (N, C), labels int64 (N,). Equal scores: lowest class first.

        ValueError: a label that is none of the classes, or a score that is not a number.
        """
        classes = logits.shape[1]
        check_scores(logits)
        if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
            raise ValueError(
                f"expected labels 0..{classes - 1}, as the model has {classes:,} classes, "
                f"got {int(labels.min())}..{int(labels.max())}"
            )
        pairs = labels * classes + predicted(logits)
        confusion = torch.bincount(pairs.cpu(), minlength=classes * classes).reshape(classes, classes)
        top = torch.bincount(labels[rank_of_truth(logits, labels) < TOP].cpu(), minlength=classes)
        return cls(confusion, top)

    @classmethod
    def of_top(cls, top: Tensor, labels: Tensor, classes: int) -> "Classification":
        """Of predictions: top int64 (N, 1 to 5), most probable class first; labels int64 (N,)."""
        confusion = torch.bincount(labels * classes + top[:, 0], minlength=classes * classes)
        right = labels[(top == labels[:, None]).any(1)]
        return cls(confusion.reshape(classes, classes), torch.bincount(right, minlength=classes))

    def __add__(self, other: "Classification") -> "Classification":
        return Classification(self.confusion + other.confusion, self.top + other.top)

    @property
    def state(self) -> Tensor:
        """int64 (C, C + 1): all the counts in one tensor, to be summed over processes."""
        return torch.cat([self.confusion, self.top[:, None]], dim=1)

    @classmethod
    def from_state(cls, state: Tensor) -> "Classification":
        return cls(state[:, :-1], state[:, -1])

    @property
    def classes(self) -> int:
        return len(self.confusion)

    @property
    def images(self) -> int:
        return int(self.confusion.sum())

    @property
    def top1(self) -> float:
        """Share of the images whose class scored highest."""
        return self._share(self.confusion.diagonal().sum())

    @property
    def top5(self) -> float:
        """Share of the images whose class is among the five that scored highest."""
        return self._share(self.top.sum())

    @property
    def per_class(self) -> Tensor:
        """float64 (C,): the share of each class's images that were taken for it; NaN for a class without any."""
        return self.confusion.diagonal().double() / self.confusion.sum(1)

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
        """A row `class_accuracy` for each class that has images, its name in the setting."""
        for name, value, count in zip(names, self.per_class.tolist(), self.confusion.sum(1).tolist(), strict=True):
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

    def _share(self, count: Tensor) -> float:
        if not self.images:
            raise ValueError("classification: there is no image to count; was every picture of the split unreadable?")
        return int(count) / self.images


def predicted(logits: Tensor) -> Tensor:
    """int64 (N,): the class that scores highest; equal scores: the lowest (`argmax` promises none on a GPU)."""
    classes = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(logits == logits.amax(1, keepdim=True), classes, logits.shape[1]).amin(1)


def rank_of_truth(logits: Tensor, labels: Tensor) -> Tensor:
    """int64 (N,): how many classes come before the true one; of equal scores the lower class does."""
    own = logits.gather(1, labels[:, None])
    lower = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    return ((logits > own) | ((logits == own) & lower)).sum(1)


def check_scores(logits: Tensor) -> None:
    """ValueError where a score is NaN: it is neither higher nor lower than another."""
    if bad := int(logits.isnan().any(1).sum()):
        raise ValueError(
            f"classification: {bad:,} of {len(logits):,} images have a score that is not a number; "
            "the model has diverged, or overflows in this precision"
        )
