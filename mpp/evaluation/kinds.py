"""The evaluations that a recipe can name."""

from typing import Annotated

from pydantic import Field

from mpp.evaluation.attentive import AttentiveProbe
from mpp.evaluation.augmented import AugmentedProbe
from mpp.evaluation.fewshot import FewShot
from mpp.evaluation.knn import KNN
from mpp.evaluation.linear import LinearProbe

Evaluation = Annotated[
    KNN | FewShot | LinearProbe | AugmentedProbe | AttentiveProbe,
    Field(discriminator="kind"),
]
