"""Tasks: modules that turn a batch into a loss. One trainer runs them all.

A task's forward takes {"image": uint8 (B, C, H, W), "id": int64 (B,), "epoch": int64 (B,), ...} and returns sums, never
means, so that accumulation and processes add up: {"loss": sum, "count": int, "correct": sum ...}.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Lt
from torch import Tensor, nn

from mpp.backbones import Backbone, Pool
from mpp.heads import Head
from mpp.masking import Corruption, Masking, Plan, gather, make_plan
from mpp.mixing import Mix, soft_targets
from mpp.targets import DownsizedColor, MeanColor, Pixels


@dataclass(frozen=True, kw_only=True)
class MaskedPatches:
    """The paper's objective: the whole sequence is encoded, corrupted patches are predicted (appendix B.1.2)."""

    kind: Literal["masked_patches"] = "masked_patches"
    path: Literal["auto", "general"] = "auto"
    """auto: the short way for plain ViTs, equal to rounding; general: hook and gather for every model"""

    def build(
        self, backbone: Backbone, masking: Masking, corruption: Corruption, target: Any, seed: int
    ) -> "MaskedPatchPrediction":
        return MaskedPatchPrediction(backbone, masking, corruption, target, seed, plain=self.path == "auto")


class MaskedPatchPrediction(nn.Module):
    """Backbone, mask token and a linear head on the corrupted patches.

    Masks are a function of (seed, epoch, sample id); labels come from the raw uint8 pixels, before normalisation.
    """

    def __init__(
        self,
        backbone: Backbone,
        masking: Masking,
        corruption: Corruption,
        target: MeanColor | DownsizedColor | Pixels,
        seed: int = 0,
        plain: bool = True,
    ):
        super().__init__()
        self.backbone, self.masking, self.corruption, self.target = backbone, masking, corruption, target
        self.seed, self.plain = seed, plain
        self.num_corrupted = masking.num_corrupted(backbone.grid)
        width = backbone.embed_dim
        self.mask_token = nn.Parameter(torch.empty(width))
        self.head = nn.Linear(width, target.num_outputs(backbone.channels, backbone.patch_size))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            nn.init.normal_(self.mask_token, std=0.02)
            nn.init.trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """-> {"loss": sum of the patch losses, "count": patches, "correct": sum of right ones, if there are any}."""
        plan = self.plan(batch["epoch"], batch["id"])
        outputs, labels = self.predict(batch["image"], plan)
        result = {"loss": self.target.loss(outputs, labels).sum(), "count": len(labels) * self.num_corrupted}
        with torch.no_grad():
            correct = self.target.correct(outputs, labels)
        return result if correct is None else result | {"correct": correct.sum()}

    def plan(self, epochs: Tensor, ids: Tensor, seed: int | None = None) -> Plan:
        """The plan for images (B,) of an epoch; `seed` replaces the run's own, for held-out images."""
        seed = self.seed if seed is None else seed
        return make_plan(self.masking, self.corruption, self.backbone.grid, seed, epochs, ids)

    def predict(self, images: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """-> outputs (B, K, num_outputs) and labels (B, K, ...) of the corrupted patches, in the plan's order."""
        labels = gather(self.target.labels(images, self.backbone.patch_size), plan.corrupted)
        return self.head(self.backbone.corrupted_features(images, plan, self.mask_token, self.plain)), labels


Objective = MaskedPatches


@dataclass(frozen=True, kw_only=True)
class Softmax:
    """Cross-entropy over the classes."""

    kind: Literal["softmax"] = "softmax"
    smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    """label smoothing: so much of the target is spread evenly over all classes"""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits, targets (B, classes) -> (B,), nats."""
        return -(targets * logits.float().log_softmax(1)).sum(1)


@dataclass(frozen=True, kw_only=True)
class Sigmoid:
    """One binary cross-entropy for each class, summed over classes (the paper's ImageNet-21k pretraining)."""

    kind: Literal["sigmoid"] = "sigmoid"
    smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    """label smoothing: so much of the target is spread evenly over all classes"""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits, targets (B, classes) -> (B,), nats."""
        return F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").sum(1)


ClassLoss = Softmax | Sigmoid


class Classification(nn.Module):
    """Backbone, pooling and a head on labelled images.

    frozen_blocks: the embeddings and the first so many blocks are left as they are ("all": the whole backbone); no
    dropout acts in them. mix: mixup and cutmix of training batches, or None.
    """

    def __init__(
        self,
        backbone: Backbone,
        head: Head,
        classes: tuple[str, ...],
        pool: Pool = "mean",
        loss: Softmax | Sigmoid = Softmax(),
        mix: Mix | None = None,
        frozen_blocks: int | Literal["all"] = 0,
        seed: int = 0,
    ):
        super().__init__()
        self.backbone, self.head, self.classes = backbone, head, classes
        self.pool: Pool = pool
        self.loss, self.mix, self.seed = loss, mix, seed
        backbone.check_readout((pool,), (-1,))
        self.frozen = frozen_modules(backbone, frozen_blocks)
        for part in self.frozen:
            part.requires_grad_(False)

    def train(self, mode: bool = True) -> "Classification":
        super().train(mode)
        for part in self.frozen:
            if isinstance(part, nn.Module):
                part.eval()
        return self

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """-> {"loss": sum over images, "count": images, "correct": sum of right ones, where images are not mixed}."""
        images, labels = batch["image"], batch["label"]
        classes, smoothing = len(self.classes), self.loss.smoothing
        if self.mix is not None and self.training:
            mixed, targets = self.mix(images, labels, batch["epoch"], batch["id"], self.seed, classes, smoothing)
            return {"loss": self.loss(self.logits(mixed), targets).sum(), "count": len(labels)}
        logits = self.logits(images)
        loss = self.loss(logits, soft_targets(labels, classes, smoothing)).sum()
        return {"loss": loss, "count": len(labels), "correct": (logits.detach().argmax(1) == labels).sum()}

    def logits(self, images: Tensor) -> Tensor:
        """Pixels 0..255 (B, C, H, W) -> (B, classes)."""
        return self.head(self.backbone.features(images, (self.pool,))[self.pool, -1])


def frozen_modules(backbone: Backbone, blocks: int | Literal["all"]) -> list[nn.Module | nn.Parameter]:
    """The parts of a backbone below and including a block. ValueError for more blocks than there are."""
    if blocks == "all":
        return [backbone.model]
    if not blocks:
        return []
    if blocks > backbone.depth or not hasattr(backbone.model, "blocks"):
        raise ValueError(f"frozen_blocks: {blocks} of a backbone with {backbone.depth} blocks; try all")
    model: Any = backbone.model
    own = [p for name, p in model.named_parameters(recurse=False)]  # class token, positions, registers
    before = [part for name, part in model.named_children() if name in ("patch_embed", "pos_drop", "norm_pre")]
    return [*own, *before, *model.blocks[:blocks]]
