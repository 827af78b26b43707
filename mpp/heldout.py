"""Is my loss normal? The held-out loss with fixed masks, beside what predictors get that learn nothing (METHOD.md 1)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import Tensor

from mpp.data.loader import FixedViews, chunks_of, fixed_batches, spread
from mpp.masking import Plan, gather
from mpp.patches import Size, color_classes, color_levels
from mpp.runtime import Runtime
from mpp.tasks import MaskedPatchPrediction

CHUNK = 64  # images per forward pass, fixed: digits must not depend on the number of processes
COLOR_BITS = 3  # of the neighbour's colour, where the target itself is no class


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """How the loss is watched on pictures that are never trained on."""

    images: Annotated[int, Gt(0)] = 1000
    """at most so many held-out pictures, evenly spread"""
    train_images: Annotated[int, Gt(0)] = 4000
    """at most so many training pictures on which the baselines are counted"""
    mask_seed: Annotated[int, Ge(0)] = 0
    """the masks of held-out pictures, the same at every evaluation and in every run"""
    min_information: Annotated[float, Ge(0)] | None = None
    """a run whose labels have less entropy (nats; pixels: variance) stops before step 1; null = 0.2 (pixels: 1e-5)"""
    pictures: Annotated[int, Ge(0)] = 6
    """reconstructed pictures at each evaluation"""


class HeldOutLoss:
    """Loss and accuracy on fixed views with fixed masks, in total and for masked, random and kept patches."""

    def __init__(self, config: HeldOut, task: MaskedPatchPrediction, views: FixedViews, runtime: Runtime, workers: int):
        self.config, self.task, self.runtime = config, task, runtime
        places = spread(len(views.pictures.subset), config.images)
        chunks = chunks_of(len(places), CHUNK, runtime.rank, runtime.world)
        self.num_chunks = -(-len(places) // CHUNK)
        batches = fixed_batches(views, [places[rows].tolist() for _, rows in chunks], workers)
        # Kept in memory: the same views come back at every evaluation.
        self.chunks = [(number, batch) for (number, _), batch in zip(chunks, batches, strict=True)]
        self.skipped = [skip for _, batch in self.chunks for skip in batch["skipped"]]

    @torch.no_grad()
    def __call__(self) -> dict[str, Any]:
        """-> heldout_loss, heldout_accuracy, and both by kind of corruption; null for a kind with no patch."""
        names = ("masked", "random", "kept")
        sums = torch.zeros(self.num_chunks, 3, 3, dtype=torch.float64)  # chunk, kind, (loss, correct, count)
        self.task.eval()
        for number, batch in self.chunks:
            plan, outputs, labels = self.predict(batch)
            losses = self.task.target.loss(outputs, labels)
            correct = self.task.target.correct(outputs, labels)
            for kind, name in enumerate(names):
                part = plan.parts()[name]
                hits = torch.zeros(()) if correct is None else correct[:, part].double().sum()
                sums[number, kind, 0] = losses[:, part].double().sum()
                sums[number, kind, 1] = hits
                sums[number, kind, 2] = losses[:, part].numel()
        # Other processes' chunks are zeros here: adding them is exact, and the chunks are added in a fixed order.
        sums = self._reduced(sums).sum(0)
        has_correct = hasattr(self.task.target, "num_classes")
        return _by_kind(dict(zip(names, sums.tolist(), strict=True)), has_correct)

    def predict(self, batch: dict[str, Any]) -> tuple[Plan, Tensor, Tensor]:
        """-> plan, outputs (B, K, ...), labels (B, K, ...) of one chunk, on the device."""
        images, ids = batch["image"].to(self.runtime.device), batch["id"].to(self.runtime.device)
        plan = self.task.plan(torch.zeros_like(ids), ids, seed=self.config.mask_seed)
        with self.runtime.accelerator.autocast():
            outputs, labels = self.task.predict(images, plan)
        return plan, outputs, labels

    def _reduced(self, sums: Tensor) -> Tensor:
        if self.runtime.world == 1:
            return sums
        moved = sums.to(self.runtime.device)
        return self.runtime.accelerator.reduce(moved, reduction="sum").cpu()  # pyright: ignore


def baselines(
    config: HeldOut, task: MaskedPatchPrediction, train: FixedViews, heldout: FixedViews, workers: int
) -> dict[str, Any]:
    """What predictors get that learn nothing, on exactly the patches of `HeldOutLoss`; runs on the CPU.

    baseline_entropy: loss of the best constant predictor (for classes the marginal entropy of the labels, nats).
    baseline_neighbour_loss: loss of the best predictor that sees only the class of the nearest visible patch, counted
    on train. baseline_neighbour_accuracy: of copying that class. heldout_classes: distinct classes among the labels.
    label_information: the constant predictor's loss on train, for the check before step 1.
    """
    seen = list(_neighbours(config, task, train, config.train_images, workers))
    asked = list(_neighbours(config, task, heldout, config.images, workers))
    if not asked or not seen:
        raise ValueError("no readable picture to watch the loss on; check data.path and skipped.jsonl")
    (x, y), (hx, hy) = _joined(seen), _joined(asked)
    if hasattr(task.target, "num_classes"):
        classes = task.target.num_classes(task.backbone.channels)  # pyright: ignore
        return class_baselines(x, y, hx, hy, classes)
    return pixel_baselines(x, y, hx, hy)


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


def _neighbours(
    config: HeldOut, task: MaskedPatchPrediction, views: FixedViews, limit: int, workers: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(neighbour's class, own label) of every corrupted patch, chunk by chunk."""
    places = spread(len(views.pictures.subset), limit)
    chunks: Iterable[Sequence[int]] = [places[rows].tolist() for _, rows in chunks_of(len(places), CHUNK)]
    for batch in fixed_batches(views, chunks, workers):
        if len(batch["id"]):
            plan = task.plan(torch.zeros_like(batch["id"]), batch["id"], seed=config.mask_seed)
            labels = task.target.labels(batch["image"], task.backbone.patch_size)
            known = labels if hasattr(task.target, "num_classes") else _colors(batch["image"], task.backbone.patch_size)
            near = gather(known, nearest_visible(plan, task.backbone.grid))
            yield near.flatten(0, 1).numpy(), gather(labels, plan.corrupted).flatten(0, 1).numpy()


def _colors(images: Tensor, patch_size: Size) -> Tensor:
    return color_classes(color_levels(images, patch_size, COLOR_BITS), COLOR_BITS)


def _joined(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])


class _Counts:
    """How often each integer occurs; sparse, since a joint table of 65,536 classes would not fit."""

    def __init__(self, values: np.ndarray):
        self.keys, self.counts = np.unique(values, return_counts=True)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        place = np.searchsorted(self.keys, values).clip(max=len(self.keys) - 1)
        return np.where(self.keys[place] == values, self.counts[place], 0)


def _by_kind(sums: dict[str, list[float]], has_correct: bool) -> dict[str, Any]:
    total = [sum(column) for column in zip(*sums.values(), strict=True)]
    metrics: dict[str, Any] = {}
    for suffix, (loss, correct, count) in {"": total, **{f"_{kind}": value for kind, value in sums.items()}}.items():
        metrics[f"heldout_loss{suffix}"] = loss / count if count else None
        metrics[f"heldout_accuracy{suffix}"] = correct / count if count and has_correct else None
    return metrics
