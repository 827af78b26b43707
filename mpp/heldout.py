"""Is my loss normal? Held-out pictures with fixed masks: loss by kind of corruption, yardsticks, reconstructions."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import Tensor

from mpp.baselines import Pairs, class_baselines, nearest_visible, pixel_baselines
from mpp.data.loader import FixedViews, Skipped, chunks_of, fixed_batches, spread
from mpp.inspection import reconstruction
from mpp.masking import Plan, gather
from mpp.patches import Size, color_classes, color_levels
from mpp.runtime import Runtime
from mpp.tasks import MaskedPatchPrediction

CHUNK = 64  # images per forward pass, fixed: digits must not depend on the number of processes
COLOR_BITS = 3  # of the neighbour's colour, where the target itself is no class
KINDS = ("masked", "random", "kept")


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
    """a run whose labels carry less stops before step 1; null = entropy of 0.2 nats (pixels: variance of 1e-5)"""
    pictures: Annotated[int, Ge(0)] = 6
    """reconstructed pictures at each evaluation"""


class HeldOutLoss:
    """Loss and accuracy on fixed views with fixed masks, beside baselines on exactly the same patches.

    train, heldout: fixed views of the two parts of the data; the baselines are counted on train. ValueError if the
    labels carry less information than the recipe asks for, or no picture can be read.
    """

    def __init__(
        self,
        config: HeldOut,
        task: MaskedPatchPrediction,
        train: FixedViews,
        heldout: FixedViews,
        runtime: Runtime,
    ):
        self.config, self.task, self.runtime = config, task, runtime
        self.baselines = self._baselines(train, heldout)
        self._check_information(self.baselines.pop("label_information"))
        places = spread(len(heldout.pictures.subset), config.images)
        chunks = chunks_of(len(places), CHUNK, runtime.rank, runtime.world)
        self.num_chunks = -(-len(places) // CHUNK)
        batches = fixed_batches(heldout, [places[rows].tolist() for _, rows in chunks])
        # Kept in memory: the same views come back at every evaluation.
        self.chunks = [(number, batch) for (number, _), batch in zip(chunks, batches, strict=True)]

    @property
    def skipped(self) -> list[Skipped]:
        """Held-out pictures of this process that could not be read."""
        return [skip for _, batch in self.chunks for skip in batch["skipped"]]

    @torch.no_grad()
    def __call__(self) -> dict[str, Any]:
        """-> heldout_loss and heldout_accuracy, in total and by kind (null for a kind with no patch); the baselines."""
        sums = torch.zeros(self.num_chunks, len(KINDS), 3, dtype=torch.float64)  # of loss, right ones, patches
        self.task.eval()
        for number, batch in self.chunks:
            plan, outputs, labels = self.predict(batch)
            losses = self.task.target.loss(outputs, labels)
            correct = self.task.target.correct(outputs, labels)
            for kind, part in enumerate(plan.parts().values()):
                hits = 0.0 if correct is None else correct[:, part].cpu().double().sum().item()
                loss = losses[:, part].cpu().double()
                sums[number, kind] = torch.tensor([loss.sum().item(), hits, loss.numel()], dtype=torch.float64)
        # Other processes' chunks are zeros here: adding them is exact, and the chunks are added in a fixed order.
        totals = self.runtime.summed(sums).sum(0).tolist()
        if not math.isfinite(sum(loss for loss, _, _ in totals)):
            raise FloatingPointError(
                "the held-out loss is not finite: the network has diverged or overflows in this precision; try a lower "
                "optim.lr or precision: fp32, and look for broken values in weights and data"
            )
        return by_kind(dict(zip(KINDS, totals, strict=True)), self.task.target.is_class) | self.baselines

    def predict(self, batch: dict[str, Any]) -> tuple[Plan, Tensor, Tensor]:
        """-> plan, outputs (B, K, ...), labels (B, K, ...) of some held-out views, on the device."""
        images, ids = batch["image"].to(self.runtime.device), batch["id"].to(self.runtime.device)
        plan = self.task.plan(torch.zeros_like(ids), ids, seed=self.config.mask_seed)
        with self.runtime.accelerator.autocast():
            outputs, labels = self.task.predict(images, plan)
        return plan, outputs, labels

    @torch.no_grad()
    def draw(self, path: Path, title: str) -> None:
        """Reconstructions of the first held-out pictures, as PNG; the main process has them."""
        few = {key: value[: self.config.pictures] for key, value in self.chunks[0][1].items()}
        if not len(few["id"]):
            return
        backbone, target = self.task.backbone, self.task.target
        plan, outputs, _ = self.predict(few)
        predicted = target.predicted_pixels(outputs.float().cpu(), backbone.channels, backbone.patch_size)
        truth = target.true_pixels(few["image"], backbone.patch_size)
        reconstruction.draw(
            reconstruction.panels(backbone, few["image"], plan.to("cpu"), predicted, truth), path, title
        )

    def _baselines(self, train: FixedViews, heldout: FixedViews) -> dict[str, Any]:
        """What predictors get that learn nothing; made on the CPU by every process alike.

        baseline_entropy: loss of the best constant predictor (for classes the marginal entropy of the labels, nats).
        baseline_neighbour_loss: loss of the best predictor that sees only the class of the nearest visible patch.
        baseline_neighbour_accuracy: of copying that class. heldout_classes: distinct classes among the labels.
        """
        seen = _some(self._neighbours(train, self.config.train_images))
        asked = _some(self._neighbours(heldout, self.config.images))
        if not self.task.target.is_class:
            return pixel_baselines(seen, asked)
        classes = self.task.target.num_classes(self.task.backbone.channels)  # pyright: ignore
        return class_baselines(*_joined(seen), *_joined(asked), classes)

    def _neighbours(self, views: FixedViews, limit: int) -> Iterator[Pairs]:
        """(neighbour's class, own label) of every corrupted patch, chunk by chunk."""
        task, places = self.task, spread(len(views.pictures.subset), limit)
        chunks: Iterable[Sequence[int]] = [places[rows].tolist() for _, rows in chunks_of(len(places), CHUNK)]
        for batch in fixed_batches(views, chunks):
            if len(batch["id"]):
                plan = task.plan(torch.zeros_like(batch["id"]), batch["id"], seed=self.config.mask_seed)
                labels = task.target.labels(batch["image"], task.backbone.patch_size)
                known = labels if task.target.is_class else _colors(batch["image"], task.backbone.patch_size)
                near = gather(known, nearest_visible(plan, task.backbone.grid))
                yield near.flatten(0, 1).numpy(), gather(labels, plan.corrupted).flatten(0, 1).numpy()

    def _check_information(self, found: float) -> None:
        target, least = self.task.target, self.config.min_information
        least = target.least_information if least is None else least
        if found < least:
            raise ValueError(
                f"the labels carry almost nothing: {found:.4f} {target.unit}, expected at least {least:g}. Nearly "
                f"every patch has the same colour. For 16-bit and float pictures set data.range to the raw values that "
                f"mean black and white; else try more target.bits. --heldout.min_information 0 trains all the same"
            )


def by_kind(sums: dict[str, list[float]], has_accuracy: bool) -> dict[str, Any]:
    """{kind: (loss, right ones, patches)} -> means, in total and by kind; null where there is nothing."""
    total = [sum(column) for column in zip(*sums.values(), strict=True)]
    metrics: dict[str, Any] = {}
    for suffix, (loss, correct, count) in {
        "": total,
        **{f"_{kind}": value for kind, value in sums.items()},
    }.items():
        metrics[f"heldout_loss{suffix}"] = loss / count if count else None
        metrics[f"heldout_accuracy{suffix}"] = correct / count if count and has_accuracy else None
    return metrics


def _colors(images: Tensor, patch_size: Size) -> Tensor:
    return color_classes(color_levels(images, patch_size, COLOR_BITS), COLOR_BITS)


def _some(pairs: Iterator[Pairs]) -> Iterator[Pairs]:
    """The same, with a ValueError if there is none at all."""
    first = next(pairs, None)
    if first is None:
        raise ValueError("no readable picture to watch the loss on; does data.path hold pictures?")
    return itertools.chain([first], pairs)


def _joined(pairs: Iterable[Pairs]) -> Pairs:
    xs, ys = zip(*pairs, strict=True)
    return np.concatenate(xs), np.concatenate(ys)
