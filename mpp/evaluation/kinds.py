"""The evaluations that a recipe can name."""

from typing import Annotated

from pydantic import Field

from mpp.evaluation.attentive import AttentiveProbe
from mpp.evaluation.augmented import AugmentedProbe
from mpp.evaluation.classifier import StoredClassifier
from mpp.evaluation.fewshot import FewShot
from mpp.evaluation.knn import KNN
from mpp.evaluation.linear import LinearProbe

Frozen = KNN | FewShot | LinearProbe | AugmentedProbe | AttentiveProbe
# Of any backbone, and so also in the course of a pretraining.
Evaluation = Annotated[Frozen, Field(discriminator="kind")]
# Of weights on disk, which may hold a classifier.
AnyEvaluation = Annotated[Frozen | StoredClassifier, Field(discriminator="kind")]
