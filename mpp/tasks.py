"""Tasks: modules that turn a batch into a loss. One trainer runs them all.

A task's forward takes {"image": uint8 (B, C, H, W), "id": int64 (B,), "epoch": int64 (B,), ...} and returns sums, never
means, so that accumulation and processes add up: {"loss": sum, "count": int, "correct": sum ...}.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mpp.backbones import Backbone
from mpp.masking import Corruption, Masking, Plan, gather, make_plan
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
