"""The classifier of a finished fine-tuning on other labelled images; its classes must be theirs, in the same order."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mpp.data.dataset import check_classes
from mpp.data.loader import FixedViews, Pictures
from mpp.data.sources import Source
from mpp.data.views import View
from mpp.evaluation.checks import check_labels
from mpp.evaluation.scoring import score
from mpp.heads import Classifier

if TYPE_CHECKING:
    from mpp.evaluation.features import Features, Split


@dataclass(frozen=True, kw_only=True)
class StoredClassifier:
    """Top-1, top-5 and per-class accuracy of the stored classifier on the test split."""

    kind: Literal["classifier"] = "classifier"
    data: Source | None = None
    "labelled images with the classes of the model; null: those it was trained on"
    view: View | None = None
    "views of them; null: those that the run was tested with"

    pool: ClassVar[tuple[Any, ...]] = ()  # it reads no pooled features
    layers: ClassVar[tuple[int, ...]] = ()

    def check(self, split: "Split") -> None:
        """ValueError for what cannot be evaluated; reads only train_y, test_y, classes and name."""
        check_labels(split)

    def check_classifier(self, classifier: Classifier | None, classes: tuple[str, ...], where: str) -> None:
        """ValueError without a classifier, or where its classes are not those of the data."""
        if classifier is None:
            raise ValueError("evaluation classifier: these weights hold no classifier; name a fine-tuned run")
        check_classes(classifier.classes, classes, where)

    def __call__(self, features: "Features") -> Iterator[dict[str, Any]]:
        """Rows top1, top5, mean_class_accuracy and, for each class, class_accuracy; none for an untrained backbone."""
        classifier = features.classifier
        if classifier is None:
            return
        began, source = time.perf_counter(), self.data or features.default
        test = features.open(source).heldout
        self.check_classifier(classifier, test.classes or (), test.dataset.description)
        view = self.view or classifier.view
        views = FixedViews(Pictures(test, source.channels, source.range), features.backbone.image_size, view)
        features.backbone.eval()
        scored = score(classifier.logits, len(classifier.classes), views, features.runtime, classifier.sigmoid)
        name = features.names[repr(source)]
        features.skipped += [(f"{name} test", skip) for skip in scored.skipped]
        counts, setting = scored.counts(len(classifier.classes)), {"view": view.kind, "crop": view.crop}
        seconds = time.perf_counter() - began
        found = counts.rows(name, setting, seconds), counts.class_rows(name, setting, seconds, classifier.classes)
        yield from (row | {"evaluation": self.kind} for rows in found for row in rows)
