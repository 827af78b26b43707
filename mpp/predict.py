"""The job: classes of new images by a fine-tuned run; it needs neither the training data nor the recipe."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Gt
from torch import Tensor

from mpp.agreement import check_same_start
from mpp.architectures import ImageSize
from mpp.backbones import choose_attention
from mpp.data.dataset import listed
from mpp.data.loader import FixedViews, Pictures
from mpp.data.views import View
from mpp.evaluate import recipe_of, run_of
from mpp.evaluation.scoring import score
from mpp.exit_codes import EXIT_FAILED, EXIT_STOPPED
from mpp.positions import Resampling
from mpp.predictions import check_out, open_unlabelled, told_unreadable, write_predictions
from mpp.runtime import Runtime, start
from mpp.stored_classifier import stored_classifier
from mpp.weights import load_backbone
from mpp.words import plural


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """Classes of new images."""

    images: Path | None = None
    """folder of new images, searched to the bottom"""
    out: Path | None = None
    """CSV file; null = predictions.csv in the run's folder"""
    image_size: ImageSize | None = None
    """pixels, or [height, width]; null = that of the run"""
    resampling: Resampling = "bilinear-corners"
    """how position embeddings are interpolated for another image_size"""
    view: View | None = None
    """views of the images; null = those that the run was tested with"""
    range: tuple[float, float] | None = None
    """black and white in 16-bit and float images; null = the run's data.range"""
    threads: Annotated[int, Gt(0)] | None = None
    """CPU threads per process; null = cores / processes"""

    def faults(self) -> Iterator[tuple[str, str]]:
        if self.images is None:
            yield "images", "names no folder; try --images DIR"
        if self.range is not None and not self.range[0] < self.range[1]:
            yield "range", f"expected [black, white] with black < white, got {list(self.range)}"


class Stopped(Exception):
    """A signal came."""


def begin(weights: str, config: PredictConfig) -> "Predicting":
    """Everything that can be refused, done. ValueError for weights without a classifier, or a folder without images."""
    return Predicting(weights, config, start("fp32", config.threads))


class Predicting:
    """The images of one folder."""

    def __init__(self, weights: str, config: PredictConfig, runtime: Runtime):
        assert config.images is not None, "the recipe's faults ask for images"
        self.config, self.runtime = config, runtime
        check_same_start(runtime, config)
        self.backbone = load_backbone(weights, image_size=config.image_size, resampling=config.resampling)
        classifier = stored_classifier(weights, self.backbone)
        if classifier is None:
            raise ValueError(
                f"{weights} holds no classifier; name a run of tools/finetune.py or pretrain_supervised.py"
            )
        self.classifier = classifier
        run = run_of(weights)
        self.range = config.range or classifier.range or (None if run is None else recipe_of(run).data.range)
        self.subset = open_unlabelled(config.images, self.backbone.channels, self.range)
        self.out = config.out or (Path() if run is None else run) / "predictions.csv"
        check_out(self.out, "out")

    def go(self) -> int:
        """A CSV file with a row for each image; 0, or 1 where none could be read; 75 where a signal came before."""
        device, say = self.runtime.device, self.runtime.log
        choose_attention(self.backbone.to(device).eval(), device, "fp32")
        say(f"weights    {self.backbone.origin}")
        say(f"classifier {plural(len(self.classifier.classes), 'class', 'classes')}: {listed(self.classifier.classes)}")
        say(f"images     {self.subset.dataset.description}")
        pictures = Pictures(self.subset, self.backbone.channels, self.range)
        views = FixedViews(pictures, self.backbone.image_size, self.config.view or self.classifier.view)
        classes, sigmoid = self.classifier.classes, self.classifier.sigmoid
        try:
            found = score(self._logits, len(classes), views, self.runtime, sigmoid)
        except Stopped:
            say(f"stopped; {self.out} was not written")
            return EXIT_STOPPED
        if self.runtime.is_main:
            write_predictions(self.out, self.subset, found, classes)
        unreadable = self.runtime.gather_objects(found.skipped)
        for line in told_unreadable(unreadable):
            say(line)
        good = len(found.good) - len(unreadable)
        say(f"{plural(good, 'image')} classified: {self.out}")
        return 0 if good else EXIT_FAILED

    def _logits(self, images: Tensor) -> Tensor:
        """The classifier's, until a signal comes; several processes go on, as none may leave the others waiting."""
        if self.runtime.stop.requested and self.runtime.world == 1:
            raise Stopped
        return self.classifier.logits(images)
