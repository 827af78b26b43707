"""Closed-form few-shot accuracy: a ridge on frozen features of a few images per class (METHOD.md 4)."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, MinLen
from torch import Tensor

from mpp.backbones import Layers, Readout
from mpp.data.sources import Source
from mpp.evaluation.checks import check_features, check_labels, repeats
from mpp.evaluation.scores import summary
from mpp.evaluation.shots import Shots, check_shots, draw, possible

if TYPE_CHECKING:
    from mpp.evaluation.features import Features, Split


@dataclass(frozen=True, kw_only=True)
class FewShot:
    """Accuracy on the whole test split of a ridge regression fitted on `shots` train images per class.

    Source: An Image is Worth 16x16 Words (arXiv 2010.11929), section 4.1 "Metrics"; METHOD.md 4.
    """

    kind: Literal["fewshot"] = "fewshot"
    data: Source | None = None
    "labelled images to evaluate on; null: those of the pretraining"
    pool: Annotated[tuple[Readout, ...], MinLen(1)] = ("mean",)
    "features, several in turn: mean of the patch tokens, class token, or both: one behind the other"
    layers: Annotated[Layers, MinLen(1)] = (-1,)
    "blocks after which features are taken; -1 is the last; all: every one"
    shots: Annotated[tuple[Shots, ...], MinLen(1)] = (1, 5, 10, 25)
    "train images per class; all: the full train split"
    seeds: Annotated[int, Ge(1)] = 3
    "draws of the train images; value, spread and interval are over them"
    l2: Annotated[tuple[Annotated[float, Gt(0)], ...], MinLen(1)] = (1024.0,)
    "ridge penalties; a list costs as much as one"

    def faults(self) -> Iterator[tuple[str, str]]:
        yield from repeats(pool=self.pool, layers=self.layers, shots=self.shots, l2=self.l2)

    def check(self, split: "Split") -> None:
        """ValueError for what cannot be evaluated; reads only train_y, test_y, classes and name."""
        check_labels(split)
        check_shots(split, self.shots)

    def __call__(self, features: "Features") -> Iterator[dict[str, Any]]:
        """One row per pool, layer, shots and l2. `seconds`: all seeds and l2 values, without the features."""
        for pool, layer in features.readouts(self):
            split = features.get(self.data, pool, layer)
            check_labels(split)
            check_features(split)
            for shots in possible(split, self.shots):
                yield from self._rows(split, shots, {"pool": pool, "layer": layer})
        check_shots(split, self.shots)

    def _rows(self, split: "Split", shots: Shots, where: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        started = time.perf_counter()
        seeds = 1 if shots == "all" else self.seeds  # every seed would take the same images
        scores = [accuracies(split, draw(split.train_y, shots, seed), self.l2) for seed in range(seeds)]
        seconds = round(time.perf_counter() - started, 3)
        for l2, values in zip(self.l2, zip(*scores, strict=True), strict=True):
            yield {
                "evaluation": self.kind,
                "dataset": split.name,
                "setting": {"shots": shots, "l2": l2, **where},
                "metric": "top1",
                **summary(values),
                "images": len(split.test_y),
                "seconds": seconds,
            }


def accuracies(split: "Split", chosen: Tensor, l2: tuple[float, ...], block: int = 8192) -> list[float]:
    """Test accuracy per `l2` of a ridge fitted on the `chosen` train rows; equal scores: lowest class."""
    x, y = split.train_x[chosen], split.train_y[chosen]
    whiten = fit_whitening(x)
    weights = list(ridge(x, y, len(split.classes), l2, whiten))
    hits = [0] * len(l2)
    for images, truth in zip(split.test_x.split(block), split.test_y.split(block), strict=True):
        rows = whiten(images)
        for i, weight in enumerate(weights):
            hits[i] += int(((rows @ weight).argmax(dim=1) == truth).sum())
    return [count / len(split.test_y) for count in hits]


@dataclass(frozen=True)
class Whitening:
    """(n, d) features -> float64 (n, d + 1): (x - mean) * scale, then the constant that carries the bias."""

    mean: Tensor
    scale: Tensor
    constant = 100.0  # the penalty counts it like any other column; large, it is hardly held back

    @property
    def width(self) -> int:
        return len(self.mean) + 1

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.pad((x.double() - self.mean) * self.scale, (0, 1), value=self.constant)


def fit_whitening(x: Tensor) -> Whitening:
    """Mean and 1 / (population std + 1e-5) of the columns of float32 (N, d); scale 0 if they hardly vary.

    "Hardly": a std under 1e-4 of the median std, or none. On test images such a column, divided by next to
    nothing, could be of any size; it is not looked at.
    """
    mean = _mean(x, lambda rows: rows)
    # Equal float32 values add up exactly in float64, so the std of a constant column is exactly 0.
    std = _mean(x, lambda rows: (rows - mean).square()).sqrt()
    varies = std > 1e-4 * std.quantile(0.5)
    return Whitening(mean, torch.where(varies, 1 / (std + 1e-5), 0.0))


def _mean(x: Tensor, function: Callable[[Tensor], Tensor], block: int = 8192) -> Tensor:
    """Column means of function(x) in float64, without a float64 copy of all of x."""
    return torch.stack([function(rows.double()).sum(dim=0) for rows in x.split(block)]).sum(dim=0) / len(x)


def ridge(
    x: Tensor, y: Tensor, classes: int, l2: tuple[float, ...], whiten: Whitening, block: int = 8192
) -> Iterator[Tensor]:
    """For each `l2` the W, float64 (D, classes), that makes |XW - Y|^2 + l2 |W|^2 smallest.

    X = whiten(x) is (N, D); Y, one-hot of the labels y int64 (N,) in {-1, +1}, is (N, classes).

        N >= D   W = (X'X + l2 I)^-1 X'Y    X'X = U diag(s) U'   so   W = U  diag(1 / (s + l2)) U' X'Y
        N <  D   W = X' (XX' + l2 I)^-1 Y   XX' = U diag(s) U'   so   W = X'U diag(1 / (s + l2)) U' Y

    One eigendecomposition, and every further l2 is nearly free. Y is never made: a product with it is a sum
    over the rows of each class. Where N >= D, X is made `block` rows at a time.
    """
    if len(x) >= whiten.width:
        gram, moments = _normal_equations(x, y, classes, whiten, block)
        values, left = torch.linalg.eigh(gram)
        right = left.T @ moments
    else:
        rows = whiten(x)
        values, vectors = torch.linalg.eigh(rows @ rows.T)
        left, right = rows.T @ vectors, signed_sums(vectors, y, classes)
    values = values.clamp(min=0)  # rounding leaves some zeros a little under it, where l2 may not reach
    for penalty in l2:
        yield left @ (right / (values + penalty)[:, None])


def _normal_equations(x: Tensor, y: Tensor, classes: int, whiten: Whitening, block: int) -> tuple[Tensor, Tensor]:
    """X'X (D, D) and X'Y (D, classes)."""
    gram = torch.zeros(whiten.width, whiten.width, dtype=torch.float64, device=x.device)
    moments = torch.zeros(whiten.width, classes, dtype=torch.float64, device=x.device)
    for part, labels in zip(x.split(block), y.split(block), strict=True):
        rows = whiten(part)
        gram.addmm_(rows.T, rows)
        moments += signed_sums(rows, labels, classes)
    return gram, moments


def signed_sums(rows: Tensor, y: Tensor, classes: int) -> Tensor:
    """rows'Y, (D, classes), for rows (N, D) and Y in {-1, +1}: twice each class's sum, less the sum of all.

    Rows are sorted by class and added in that order: an `index_add_` on a GPU adds in any order.
    """
    order = y.argsort(stable=True)
    counts = torch.bincount(y, minlength=classes)
    sums = torch.segment_reduce(rows[order], "sum", lengths=counts, axis=0)
    return (2 * sums - rows.sum(dim=0)).T
