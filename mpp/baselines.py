"""What predictors get that learn nothing: the yardsticks beside the held-out loss (METHOD.md 1). Pure functions."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpp.masking import Plan
from mpp.patches import Size


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


def pixel_baselines(x: np.ndarray, y: np.ndarray, hx: np.ndarray, hy: np.ndarray) -> dict[str, Any]:
    """Baselines for regression. x: int64 (patches, 1) colour class of the neighbour; y: float (patches, values)."""
    keys, place = np.unique(x[:, 0], return_inverse=True)
    sums = np.zeros((len(keys) + 1, y.shape[1]))  # the last row: classes that train never showed
    np.add.at(sums, place, y)
    counts = np.bincount(place, minlength=len(keys) + 1)[:, None]
    predictions = (sums + y.mean(0)) / (counts + 1)
    found = np.searchsorted(keys, hx[:, 0]).clip(max=len(keys) - 1)
    found = np.where(keys[found] == hx[:, 0], found, len(keys))
    return {
        "baseline_entropy": float(hy.var(0).mean()),
        "baseline_neighbour_loss": float(np.square(hy - predictions[found]).mean()),
        "baseline_neighbour_accuracy": None,
        "heldout_classes": None,
        "label_information": float(y.var(0).mean()),
    }


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
