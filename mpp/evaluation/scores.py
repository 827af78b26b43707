"""What evaluations share: hits, the summary over seeds, and how a setting is chosen without looking at test."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpp.chance import Purpose, hashed

# 97.5 % quantiles of Student's t for 1 .. 30 degrees of freedom (any table; a test holds them against scipy).
_T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
_Z = 1.959964


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Scores of several seeds as a row tells them: {"value": mean, "spread", "interval", "seeds", "values"}.

    spread: sample standard deviation. interval: [low, high], 95 % for the mean by Student's t over the seeds (what
    another choice of seeds would change; test images are taken as given); not cut at 0 and 1. Both null for one seed.
    """
    mean, count = statistics.fmean(values), len(values)
    spread = statistics.stdev(values) if count > 1 else None
    half = None if spread is None else t_quantile(count - 1) * spread / math.sqrt(count)
    interval = None if half is None else [mean - half, mean + half]
    return {"value": mean, "spread": spread, "interval": interval, "seeds": count, "values": list(values)}


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, to 1e-4: a table, then the first terms of its series in 1 / freedom."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    return _Z + (_Z**3 + _Z) / (4 * freedom) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)


def tops_of(classes: int) -> tuple[int, ...]:
    """Which top-c accuracies say something: 1, and 5 where there are more than 5 classes."""
    return (1, 5) if classes > 5 else (1,)


def places_ahead(scores: Tensor, truth: Tensor) -> Tensor:
    """int64 (M,): how many classes come before the true one; equal scores (M, C): lowest class first.

    A score that is no number comes last: NaN is never right.
    """
    own = scores.gather(1, truth[:, None])
    lower = torch.arange(scores.shape[1], device=scores.device) < truth[:, None]
    return (~(scores <= own) | ((scores == own) & lower)).sum(dim=1)


def hits(scores: Tensor, truth: Tensor, tops: Sequence[int]) -> Tensor:
    """int64 (len(tops),): how many of M images have their class among the first `top` of scores (M, C)."""
    ahead = places_ahead(scores, truth)
    return torch.stack([(ahead < top).sum() for top in tops])


def hold_back(labels: Tensor, ids: Tensor, share: float, seed: int) -> Tensor:
    """bool (N,): the slice of train on which a setting is chosen, stratified by class.

    Of n images of a class round(share * n) are held back, at least 1 and at most n - 1; a class with a single image
    keeps it for training. Which ones is a function of (seed, id). labels, ids: int64 (N,).
    """
    order = hashed(seed, ids, Purpose.PROBE).argsort(stable=True)
    by_class = order[labels[order].argsort(stable=True)]
    counts = torch.bincount(labels)
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[by_class]]
    wanted = torch.minimum((share * counts).round().long().clamp(min=1), counts - 1)
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[by_class] = rank < wanted[labels[by_class]]
    return held


def check_can_hold_back(labels: Tensor, name: str) -> None:
    """ValueError where no class of train can spare an image to choose a setting on."""
    if int(torch.bincount(labels).max()) < 2:
        raise ValueError(
            f"evaluation on {name}: every class has one train image, so none is left to choose among settings on; "
            f"give more images, or a sweep of one value"
        )


def choose(scores: Sequence[float]) -> int:
    """The best of a sweep's scores; of equal ones the middle one (the lower of two), so that a plateau is no edge."""
    best = max(scores)
    tied = [index for index, score in enumerate(scores) if score == best]
    return tied[(len(tied) - 1) // 2]


def at_edge(index: int, count: int) -> bool:
    """Whether the chosen one is the first or last of a sweep: a wider sweep might find better."""
    return count > 1 and index in (0, count - 1)


def check_learned(loss: float, classes: int, where: str) -> None:
    """ValueError where training a probe ended no better than knowing nothing: its scores would mean nothing."""
    if not loss < math.log(classes):  # so written, NaN is refused too
        raise ValueError(
            f"{where}: the probe's training loss is {loss:.4f}, not below ln({classes}) = {math.log(classes):.4f} of a "
            f"probe that knows nothing; try lower or higher learning rates, more epochs, or look at the features"
        )
