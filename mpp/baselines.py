"""What predictors get that learn nothing: the yardsticks beside the held-out loss (METHOD.md 1). Pure functions."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpp.masking import Plan
from mpp.patches import Size

Pairs = tuple[np.ndarray, np.ndarray]  # what the nearest visible patch shows, and the patch's own label


def class_baselines(x: np.ndarray, y: np.ndarray, hx: np.ndarray, hy: np.ndarray, classes: int) -> dict[str, Any]:
    """Baselines for class labels. x, y: int64 (patches, cells) on train, neighbour's and own class; hx, hy: held out.

    p(y|x) = (n_xy + p(y)) / (n_x + 1), and p(y) = (n_y + 1/classes) / (n + 1) by the same rule one level up, so that a
    class that train never showed costs much but not everything.
    """
    cells = np.arange(y.shape[1])
    count_y, count_x = _Counts(cells * classes + y), _Counts(cells * classes + x)
    count_xy = _Counts((cells * classes + x) * classes + y)
    prior = (count_y(cells * classes + hy) + 1 / classes) / (len(y) + 1)
    given = (count_xy((cells * classes + hx) * classes + hy) + prior) / (count_x(cells * classes + hx) + 1)
    return {
        "baseline_entropy": entropy(hy),
        "baseline_neighbour_loss": float(-np.log(given).mean()),
        "baseline_neighbour_accuracy": float((hx == hy).mean()),
        "heldout_classes": len(np.unique(hy)),
        "label_information": entropy(y),
    }


def pixel_baselines(train: Iterable[Pairs], heldout: Iterable[Pairs]) -> dict[str, Any]:
    """Baselines for regression: the mean patch, and the mean patch of each colour class of the nearest visible one.

    Chunks of (x, y), x int64 (patches, 1), y float (patches, values). Summed chunk by chunk in float64: all patches at
    once would fill the memory, and float32 sums of a million of them are wrong in the fourth digit.
    """
    known, shown = _Moments(), _Moments()
    for x, y in train:
        known.add(x[:, 0], y.astype(np.float64))
    mean, squares, patches = known.mean(), 0.0, 0
    for x, y in heldout:
        y = y.astype(np.float64)
        shown.add(x[:, 0], y)
        predictions = np.stack([known.given(key, mean) for key in x[:, 0].tolist()])
        squares += float(np.square(y - predictions).sum())
        patches += y.size
    return {
        "baseline_entropy": shown.variance(),
        "baseline_neighbour_loss": squares / patches,
        "baseline_neighbour_accuracy": None,
        "heldout_classes": None,
        "label_information": known.variance(),
    }


class _Moments:
    """Sums of vectors, in total and by an integer key."""

    def __init__(self) -> None:
        self.sums: dict[int, np.ndarray] = {}
        self.counts: dict[int, int] = {}
        self.squares: Any = 0.0

    def add(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.squares = self.squares + np.square(values).sum(0)
        for key in np.unique(keys).tolist():
            rows = values[keys == key]
            self.sums[key] = self.sums.get(key, 0.0) + rows.sum(0)
            self.counts[key] = self.counts.get(key, 0) + len(rows)

    def mean(self) -> np.ndarray:
        return np.sum(list(self.sums.values()), axis=0) / sum(self.counts.values())

    def variance(self) -> float:
        """Of the population, mean over the entries of the vectors."""
        return float((self.squares / sum(self.counts.values()) - np.square(self.mean())).mean())

    def given(self, key: int, prior: np.ndarray) -> np.ndarray:
        """(sum + prior) / (count + 1): the rule of the class baseline, for means."""
        return (self.sums.get(key, 0.0) + prior) / (self.counts.get(key, 0) + 1)


def entropy(labels: np.ndarray) -> float:
    """Mean over the cells of the entropy of the labels' distribution, in nats. labels: (patches, cells)."""
    total = 0.0
    for cell in labels.T:
        shares = np.unique(cell, return_counts=True)[1] / len(cell)
        total -= float((shares * np.log(shares)).sum())
    return total / labels.shape[1]


def nearest_visible(plan: Plan, grid: Size) -> Tensor:
    """int64 (B, K): for each corrupted patch the nearest that is not; Euclidean, ties to the lowest index."""
    patches = grid[0] * grid[1]
    place = torch.arange(patches, device=plan.permutation.device)
    row, column = place // grid[1], place % grid[1]
    distance = (row[:, None] - row).square() + (column[:, None] - column).square()
    ranked = distance * patches + place  # one number for both: least distance first, then least index
    return ranked[plan.corrupted[:, :, None], plan.visible[:, None, :]].amin(-1) % patches


class _Counts:
    """How often each integer occurs; sparse, since a joint table of 65,536 classes would not fit."""

    def __init__(self, values: np.ndarray):
        self.keys, self.counts = np.unique(values, return_counts=True)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        place = np.searchsorted(self.keys, values).clip(max=len(self.keys) - 1)
        return np.where(self.keys[place] == values, self.counts[place], 0)
