"""The recipe of a pretraining run: its sections, what no section can see alone, and what may change on the way."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mpp import train_recipe
from mpp.architectures import BackboneSpec, ViT
from mpp.data.sources import Demo, Source
from mpp.data.transforms import Augment
from mpp.evaluation.kinds import Evaluation
from mpp.heldout import HeldOut
from mpp.masking import Corruption, Masking, RandomMasking
from mpp.optim import AdamW, Optim
from mpp.patches import pair
from mpp.positions import Resampling
from mpp.targets import MeanColor, Target
from mpp.tasks import MaskedPatches, Objective
from mpp.train_recipe import Train, contradictions

FREE = train_recipe.FREE | {"train.eval_every", "heldout.pictures", "evaluations"}


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Masked patch pretraining."""

    out: Path | None = None
    """run folder; null = runs/<recipe name>"""
    init: str | None = None
    """weights to begin with: a run or checkpoint, a timm folder, timm:NAME, or a file; the schedule is new"""
    resampling: Resampling = "bilinear-corners"
    """how position embeddings of init are interpolated where the resolution differs"""
    data: Source = field(default_factory=Demo)
    """unlabelled images"""
    augment: Augment = field(default_factory=Augment)
    """training views"""
    backbone: BackboneSpec = field(default_factory=ViT)
    """the network"""
    objective: Objective = field(default_factory=MaskedPatches)
    """what is learned"""
    masking: Masking = field(default_factory=RandomMasking)
    """which patches are corrupted"""
    corruption: Corruption = field(default_factory=Corruption)
    """what stands in their place"""
    target: Target = field(default_factory=MeanColor)
    """what is predicted for them"""
    optim: Optim = field(default_factory=AdamW)
    """optimiser and learning rate"""
    train: Train = field(default_factory=Train)
    """how long, how much at a time"""
    heldout: HeldOut = field(default_factory=HeldOut)
    """is my loss normal?"""
    evaluations: tuple[Evaluation, ...] = ()
    """does it help? on labelled images, trained beside untrained features"""

    def faults(self) -> Iterator[tuple[str, str]]:
        """What no section can see alone; before any data is read."""
        yield from contradictions(self.train, self.optim)
        if isinstance(self.backbone, ViT):
            yield from self._misfits(self.backbone)
        for number, evaluation in enumerate(self.evaluations):
            data = evaluation.data or self.data
            if data.channels != self.data.channels:
                yield (
                    f"evaluations.{number}.data.channels",
                    f"{data.channels} is not data.channels {self.data.channels}",
                )

    def _misfits(self, backbone: ViT) -> Iterator[tuple[str, str]]:
        image, patch = pair(backbone.image_size), pair(backbone.patch_size)
        if not (image[0] % patch[0] or image[1] % patch[1]):
            try:
                self.masking.num_corrupted((image[0] // patch[0], image[1] // patch[1]))
            except ValueError as error:
                yield "masking.ratio", str(error)
        try:
            self.target.num_outputs(self.data.channels, patch)
        except ValueError as error:
            yield "target", str(error)
        for name in ("pixel_mean", "pixel_std"):
            value = getattr(backbone, name)
            if isinstance(value, tuple) and len(value) != self.data.channels:
                yield (
                    f"backbone.{name}",
                    f"{len(value)} values for {self.data.channels} channels; give one, or one each",
                )
        depth = backbone.shape()[1]
        for number, evaluation in enumerate(self.evaluations):
            if evaluation.layers != "all" and not all(-depth <= layer < depth for layer in evaluation.layers):
                yield (
                    f"evaluations.{number}.layers",
                    f"{list(evaluation.layers)} of a backbone with {depth} blocks",
                )
            if set(evaluation.pool) - {"mean"} and not backbone.class_token:
                yield (
                    f"evaluations.{number}.pool",
                    f"{list(evaluation.pool)} asks for a class token and backbone.class_token is false",
                )
