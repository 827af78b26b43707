"""Classification heads on pooled features: one linear map, or the paper's hidden tanh layer before it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Gt
from torch import Tensor, nn

from mpp.data.views import View

Positive = Annotated[int, Gt(0)]


@dataclass(frozen=True, kw_only=True)
class LinearHead:
    """One linear map. Zero-initialised, a fine-tuning starts at loss ln(classes) (paper, section 3.2)."""

    kind: Literal["linear"] = "linear"
    init_std: Annotated[float, Gt(0)] | None = None
    """of a truncated normal (MAE-style fine-tuning: 2e-5); null = zeros, as in the paper"""
    bias: float = 0.0
    """initial bias of every class; -10 for the sigmoid loss of supervised pretraining"""

    def build(self, width: int, classes: int) -> "Head":
        return Head(None, _last(width, classes, self.init_std, self.bias))


@dataclass(frozen=True, kw_only=True)
class MLPHead:
    """A hidden tanh layer, then a zero-initialised linear map: the paper's head for supervised pretraining."""

    kind: Literal["mlp"] = "mlp"
    hidden: Positive | None = None
    """width of the hidden layer; null = the backbone's"""
    bias: float = 0.0
    """initial bias of every class; -10 for the sigmoid loss of supervised pretraining"""

    def build(self, width: int, classes: int) -> "Head":
        hidden = nn.Linear(width, self.hidden or width)
        _lecun_normal(hidden.weight)
        nn.init.zeros_(hidden.bias)
        return Head(hidden, _last(hidden.out_features, classes, None, self.bias))


ClassHead = LinearHead | MLPHead


class Head(nn.Module):
    """Pooled features (B, D) -> logits (B, classes)."""

    def __init__(self, hidden: nn.Linear | None, last: nn.Linear):
        super().__init__()
        self.hidden, self.last = hidden, last

    def forward(self, features: Tensor) -> Tensor:
        return self.last(features if self.hidden is None else self.hidden(features).tanh())


@dataclass(frozen=True)
class Classifier:
    """A head on its backbone. logits: images uint8 (B, C, H, W) on the device -> (B, classes)."""

    classes: tuple[str, ...]
    logits: Callable[[Tensor], Tensor]
    view: View = field(default_factory=View)
    """of the images it was tested on"""
    sigmoid: bool = False
    """whether its classes were trained one by one"""
    range: tuple[float, float] | None = None
    """black and white in the 16-bit and float images it was trained on"""


def _last(width: int, classes: int, std: float | None, bias: float) -> nn.Linear:
    layer = nn.Linear(width, classes)
    if std is None:
        nn.init.zeros_(layer.weight)
    else:
        nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    nn.init.constant_(layer.bias, bias)
    return layer


def _lecun_normal(weight: Any) -> None:
    """flax's default: a normal cut at two standard deviations whose result has variance 1 / inputs."""
    std = math.sqrt(1 / weight.shape[1]) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
