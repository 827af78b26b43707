"""Softmax regression on standardised features: solved to a tolerance, or descended at many learning rates at once."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Lt, MinLen
from pydantic import Field
from torch import Tensor

from mpp.chance import Purpose, seed_of
from mpp.data.order import Order
from mpp.evaluation.checks import repeats
from mpp.evaluation.fewshot import Whitening, fit_whitening
from mpp.evaluation.scores import hits
from mpp.optim import curve

Positive = Annotated[float, Gt(0)]
LARGE = 50_000_000  # numbers of all classes' curvatures: 400 MB
STRETCH = 100  # iterations of L-BFGS between looks at the curvature, which vanishes where classes come apart
BLOCK = 8192  # rows of logits at a time: a thousand classes and a million images would not fit


@dataclass(frozen=True, kw_only=True)
class LBFGS:
    """Multinomial logistic regression, solved to a tolerance in float64: nothing to tune but the penalty.

    Holds the train features in float64; for a million images `sgd` is the one to take.
    """

    kind: Literal["lbfgs"] = "lbfgs"
    l2: Annotated[tuple[Positive, ...], MinLen(1)] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    """penalties l2 / 2 * |W|^2 beside the mean cross-entropy, the bias free: sklearn's C is 1 / (l2 * images)"""
    tolerance: Positive = 1e-5
    """converged: no entry of the gradient is larger"""
    max_iterations: Annotated[int, Ge(1)] = 1000
    """for each penalty; what has not converged by then is marked so in its row"""

    def faults(self) -> Iterator[tuple[str, str]]:
        yield from repeats(l2=self.l2)

    @property
    def settings(self) -> dict[str, Any]:
        """Nothing else tells one solution from another: there is but one for each penalty."""
        return {}

    @property
    def sweep(self) -> tuple[str, tuple[float, ...]]:
        return "l2", tuple(sorted(self.l2))

    def fit(
        self, x: Tensor, y: Tensor, classes: int, l2: Sequence[float], seed: int, device: torch.device
    ) -> "list[Fit]":
        """A fit per penalty, in their order, on the CPU; from the largest down, each begins where the last ended."""
        whiten = fit_whitening(x)
        rows = _with_ones(whiten, x)
        weight, fits = torch.zeros(rows.shape[1], classes, dtype=torch.float64), {}
        for penalty in sorted(l2, reverse=True):
            weight, gradient = _minimized(rows, y, weight, penalty, self.max_iterations, self.tolerance)
            loss, _ = cross_entropy(rows, y, weight, classes)
            fits[penalty] = Fit(whiten, weight, float(loss), gradient <= self.tolerance)
        return [fits[penalty] for penalty in l2]


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Softmax regression by momentum SGD, all learning rates of a sweep trained at once on the same batches."""

    kind: Literal["sgd"] = "sgd"
    learning_rates: Annotated[tuple[Positive, ...], MinLen(1)] = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
    """absolute; each falls to 0 along half a cosine"""
    epochs: Annotated[int, Ge(1)] = 100
    """passes over the train features"""
    batch_size: Annotated[int, Ge(1)] = 1024
    """features per update; where there are fewer, all of them"""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9

    def faults(self) -> Iterator[tuple[str, str]]:
        yield from repeats(learning_rates=self.learning_rates)

    @property
    def settings(self) -> dict[str, Any]:
        """What tells one descent from another, beside the rate that is chosen."""
        return {"epochs": self.epochs, "batch_size": self.batch_size, "momentum": self.momentum}

    @property
    def sweep(self) -> tuple[str, tuple[float, ...]]:
        return "learning_rate", tuple(sorted(self.learning_rates))

    def fit(
        self, x: Tensor, y: Tensor, classes: int, rates: Sequence[float], seed: int, device: torch.device
    ) -> "list[Fit]":
        """A fit per learning rate, in their order; which features make a batch is a function of (seed, position)."""
        whiten = fit_whitening(x)
        rows = torch.cat([_with_ones(whiten, part).float() for part in x.split(BLOCK)]).to(device)
        y = y.to(device)
        weights = self._descended(rows, y, classes, torch.tensor(rates, device=device), seed)
        losses = cross_entropy(rows, y, weights, classes)[0].tolist()
        weights = weights.unflatten(1, (-1, classes)).double().cpu()
        return [Fit(whiten, weights[:, i], loss) for i, loss in enumerate(losses)]

    def _descended(self, rows: Tensor, y: Tensor, classes: int, rates: Tensor, seed: int) -> Tensor:
        """From 0, (D, L * classes) after all epochs: L linear maps side by side, so that one product serves all."""
        count, size = len(rows), min(self.batch_size, len(rows))
        steps, order = math.ceil(self.epochs * count / size), Order(count, seed_of(seed, Purpose.PROBE))
        weights = torch.zeros(rows.shape[1], len(rates) * classes, device=rows.device)
        speed, rates = torch.zeros_like(weights), rates.repeat_interleave(classes)
        stretch = max(1, count // size)  # the order of about an epoch at once: its hash costs as much for one position
        for step in range(steps):
            if step % stretch == 0:
                drawn = order.at(torch.arange(step * size, (step + stretch) * size))[1].to(rows.device).split(size)
            batch = drawn[step % stretch]
            _, gradient = cross_entropy(rows[batch], y[batch], weights, classes)
            speed.mul_(self.momentum).add_(gradient)
            weights.addcmul_(speed, rates, value=-curve(step, steps, "cosine", 1.0, 0.0, 0))
        return weights


Solver = Annotated[LBFGS | SGD, Field(discriminator="kind")]


@dataclass(frozen=True)
class Fit:
    """A linear classifier. weight: float64 (D + 1, classes), the last row the bias. loss: mean over train, no penalty.

    converged: null where the solver has no such notion.
    """

    whiten: Whitening
    weight: Tensor
    loss: float
    converged: bool | None = None

    def scores(self, x: Tensor) -> Tensor:
        """float32 (M, D) -> float64 (M, classes)."""
        return _with_ones(self.whiten, x) @ self.weight

    def hits(self, x: Tensor, y: Tensor, tops: Sequence[int]) -> Tensor:
        """How many of the images have their class among the first `top`, for each top."""
        blocks = zip(x.split(BLOCK), y.split(BLOCK), strict=True)
        return torch.stack([hits(self.scores(rows), truth, tops) for rows, truth in blocks]).sum(0)

    def top1(self, x: Tensor, y: Tensor) -> float:
        return int(self.hits(x, y, (1,))) / len(y)


def cross_entropy(rows: Tensor, y: Tensor, weight: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mean softmax cross-entropy of L classifiers, (L,), and its gradient, like weight.

    rows (N, D), y int64 (N,), weight (D, L * classes), the classifiers side by side.

        dloss/dlogits = softmax(logits) - onehot(y)
    """
    loss, gradient = 0.0, torch.zeros_like(weight)
    for part, truth in zip(rows.split(BLOCK), y.split(BLOCK), strict=True):
        logits = (part @ weight).unflatten(1, (-1, classes))
        logs = logits.log_softmax(-1)
        index = truth[:, None, None].expand(-1, logs.shape[1], 1)
        loss = loss - logs.gather(2, index).sum((0, 2))
        slope = logs.exp().scatter_add_(2, index, torch.full_like(logs[..., :1], -1.0))
        gradient.addmm_(part.T, slope.flatten(1))
    assert isinstance(loss, Tensor)
    return loss / len(rows), gradient / len(rows)


def _minimized(
    rows: Tensor, y: Tensor, weight: Tensor, l2: float, iterations: int, tolerance: float
) -> tuple[Tensor, float]:
    """The weight that makes cross-entropy + l2 / 2 * |W|^2 smallest, and the largest entry of the gradient there."""
    gradient = math.inf
    while iterations > 0 and gradient > tolerance:
        weight, gradient, made = _walked(rows, y, weight, l2, min(STRETCH, iterations), tolerance)
        iterations -= max(1, made)
    weight[-1] -= weight[-1].mean()  # the same added to all biases changes nothing, and nothing holds it back
    return weight, gradient


def _walked(
    rows: Tensor, y: Tensor, start: Tensor, l2: float, iterations: int, tolerance: float
) -> tuple[Tensor, float, int]:
    """A stretch of L-BFGS from `start`: the weight, the largest entry of the gradient there, iterations made.

    Features are correlated, and along their small directions the loss hardly curves: L-BFGS would creep. So it walks in
    v = L' w for each class, where LL' is the curvature at the start, and every direction curves alike. The minimum is
    the same.
    """
    penalty = torch.full((len(start), 1), l2, dtype=start.dtype)
    penalty[-1] = 0  # the bias
    roots = torch.stack([_root(one + penalty[:, 0].diag()) for one in _curvatures(rows, start)])  # (C or 1, D, D)
    walked = (roots.mT @ start.T[..., None])[..., 0].contiguous().requires_grad_()  # (C, D)
    weight, slope = start, torch.zeros_like(start)

    def loss() -> Tensor:
        nonlocal weight, slope
        with torch.no_grad():
            weight = torch.linalg.solve_triangular(roots.mT, walked[..., None], upper=True)[..., 0].T
            value, gradient = cross_entropy(rows, y, weight, weight.shape[1])
            slope = gradient + penalty * weight
            walked.grad = torch.linalg.solve_triangular(roots, slope.T[..., None], upper=False)[..., 0].contiguous()
            return value.sum() + (penalty * weight.square()).sum() / 2

    # No stop where the loss hardly changes (only where it does not at all, in float64): the gradient tells the bottom.
    solver = torch.optim.LBFGS(
        [walked],
        max_iter=iterations,
        max_eval=2 * iterations,
        tolerance_grad=tolerance / float(roots.abs().sum(2).max()),  # slope = L walked.grad is within tolerance, too
        tolerance_change=1e-300,
        history_size=20,
        line_search_fn="strong_wolfe",
    )
    solver.step(loss)  # pyright: ignore
    loss()
    return weight.detach(), float(slope.abs().max()), solver.state[walked]["n_iter"]


def _curvatures(rows: Tensor, weight: Tensor) -> Tensor:
    """float64 (C, D, D): the curvature of the mean cross-entropy along the weights of each class.

    Where that would be large, (1, D, D): the mean over classes, for all of them.

        X' diag(p_c (1 - p_c)) X / N
    """
    width, classes = weight.shape
    own = classes * width**2 <= LARGE
    total = torch.zeros(classes if own else 1, width, width, dtype=rows.dtype)
    for part in rows.split(BLOCK):
        chances = (part @ weight).softmax(1)
        curving = chances * (1 - chances)
        for curvature, along in zip(total, curving.T if own else curving.mean(1)[None], strict=True):
            curvature.addmm_(part.T, part * along[:, None])
    return total / len(rows)


def _root(curvature: Tensor) -> Tensor:
    """The lower triangular L of LL' = curvature; where rounding leaves that singular, of a little more."""
    for little in (0.0, 1e-12, 1e-9, 1e-6, 1e-3):
        more = little * curvature.trace() * torch.eye(len(curvature), dtype=curvature.dtype)
        root, failed = torch.linalg.cholesky_ex(curvature + more)
        if not failed:
            return root
    return torch.eye(len(curvature), dtype=curvature.dtype)


def _with_ones(whiten: Whitening, x: Tensor) -> Tensor:
    """float64 (N, D + 1): standardised features (few-shot's rule for columns that hardly vary), and 1 for the bias."""
    rows = whiten(x)
    rows[:, -1] = 1.0
    return rows
