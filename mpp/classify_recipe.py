"""The recipe of supervised training: pretraining on labels, fine-tuning and from scratch differ in its values only."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from mpp import train_recipe
from mpp.architectures import BackboneSpec, ViT
from mpp.averaging import Average
from mpp.backbones import Pool
from mpp.data.budget import All, Budget
from mpp.data.sources import Demo, Source
from mpp.data.transforms import Augment
from mpp.data.views import View
from mpp.heads import ClassHead, LinearHead
from mpp.mixing import Mix
from mpp.optim import SGD, Optim
from mpp.positions import Resampling
from mpp.tasks import ClassLoss, Softmax
from mpp.train_recipe import Train, contradictions

SCRATCH = "scratch"

FREE = train_recipe.FREE | {"real", "predict", "predictions"}  # early_stopping counts evaluations, so eval_every is not


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Ends the run, and keeps its best weights, once the validation accuracy no longer rises."""

    patience: Annotated[int, Gt(0)] = 5
    """evaluations (train.eval_every) without a new best before the run ends"""


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig:
    """Supervised training of a classifier: from scratch, or from pretrained weights."""

    out: Path | None = None
    """run folder; null = runs/<recipe name>"""
    init: str = SCRATCH
    """scratch, or weights to begin with: a run or checkpoint, a timm folder, timm:NAME, or a file"""
    resampling: Resampling = "bilinear-corners"
    """how position embeddings are interpolated where the resolution differs (bilinear-corners: the paper's)"""
    data: Source = field(default_factory=Demo)
    """labelled images"""
    labels: Budget = field(default_factory=All)
    """how many labelled training images are used, and which of them are kept back to choose by"""
    augment: Augment = field(default_factory=Augment)
    """training views"""
    view: View = field(default_factory=View)
    """views for evaluation"""
    backbone: BackboneSpec = field(default_factory=ViT)
    """the network, also where weights are loaded; only its image_size may differ from theirs"""
    pool: Pool = "mean"
    """mean of the patch tokens, or the class token (untrained in masked patch prediction), after the final norm"""
    head: ClassHead = field(default_factory=LinearHead)
    """on the pooled features"""
    loss: ClassLoss = field(default_factory=Softmax)
    """what is minimised"""
    mix: Mix | None = None
    """mixup and cutmix"""
    frozen_blocks: Annotated[int, Ge(0)] | Literal["all"] = 0
    """embeddings and so many first blocks stay as they are; all = only the head learns"""
    optim: Optim = field(default_factory=SGD)
    """optimiser and learning rate"""
    averaging: Average | None = None
    """evaluate and keep a running average of the weights (Polyak averaging, paper appendix B.1.1: 0.9999)"""
    early_stopping: EarlyStopping | None = None
    """needs labels.validation and train.eval_every"""
    train: Train = field(default_factory=Train)
    """how long, how much at a time"""
    real: Path | None = None
    """real.json of ImageNet-ReaL: scores the ImageNet validation images by it as well"""
    predict: Path | None = None
    """a folder of new images: their classes are written to `predictions` at the end"""
    predictions: Path | None = None
    """CSV file; null = predictions.csv in the run folder"""

    def faults(self) -> Iterator[tuple[str, str]]:
        """What no section can see alone; before any data is read."""
        yield from contradictions(self.train, self.optim)
        if self.early_stopping and not self.labels.validation:
            yield "early_stopping", "needs images to judge by; try labels.validation 0.1"
        if self.early_stopping and not self.train.eval_every:
            yield "early_stopping", "judges at each evaluation, and train.eval_every is 0"
        if self.early_stopping and self.train.extend:
            yield "train.extend", "goes on from the last weights, and early_stopping keeps the best ones; take one away"
        if self.predictions is not None and self.predict is None:
            yield "predictions", "is where predict writes, and predict is null"
        if isinstance(self.backbone, ViT):
            yield from self._misfits(self.backbone)

    def _misfits(self, backbone: ViT) -> Iterator[tuple[str, str]]:
        if self.pool == "cls" and not backbone.class_token:
            yield "pool", "cls asks for a class token and backbone.class_token is false"
        for name in ("pixel_mean", "pixel_std"):
            value = getattr(backbone, name)
            if isinstance(value, tuple) and len(value) != self.data.channels:
                yield (
                    f"backbone.{name}",
                    f"{len(value)} values for {self.data.channels} channels; give one, or one each",
                )
