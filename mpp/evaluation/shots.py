"""A few labelled images of every class, drawn anew with each seed; the same ones for every evaluation."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mpp.chance import Purpose, hashed
from mpp.evaluation.checks import listed

if TYPE_CHECKING:
    from mpp.evaluation.features import Split

Shots = Annotated[int, Ge(1)] | Literal["all"]


def draw(y: Tensor, shots: Shots, seed: int) -> Tensor:
    """Indices into the train labels y (N,) of exactly `shots` images of every class, ascending; "all": all.

    A function of (seed, index): within its class an image's rank is that of its hash, so more shots of one
    seed contain the fewer. Every class must have that many (`check_shots`).
    """
    indices = torch.arange(len(y), device=y.device)
    if shots == "all":
        return indices
    shuffled = hashed(seed, indices, Purpose.FEWSHOT).argsort(stable=True)
    by_class = shuffled[y[shuffled].argsort(stable=True)]
    counts = torch.bincount(y)
    first = counts.cumsum(0) - counts
    rank = indices - first[y[by_class]]
    return by_class[rank < shots].sort().values


def possible(split: "Split", asked: Sequence[Shots]) -> list[Shots]:
    """The `asked` shots that every class has train images for: all of them, unless some pictures cannot be read."""
    fewest = int(torch.bincount(split.train_y, minlength=len(split.classes)).min())
    return [shots for shots in asked if shots == "all" or shots <= fewest]


def check_shots(split: "Split", asked: Sequence[Shots]) -> None:
    """ValueError where a class has fewer train images than the most `shots` asked for, naming class and count."""
    shots = max((count for count in asked if count != "all"), default=1)
    counts = torch.bincount(split.train_y, minlength=len(split.classes)).tolist()
    short = [f"{name!r} has {n}" for name, n in zip(split.classes, counts, strict=True) if n < shots]
    if short:
        raise ValueError(
            f"evaluation on {split.name}: {shots} shots need {shots} train images of every class, "
            f"but {listed(short)} that can be read; ask for fewer `shots`, or for `all`"
        )
