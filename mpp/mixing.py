"""Labels as supervised training sees them: smoothed, and mixed with another image's (mixup and cutmix).

Works on a whole micro-batch on its device. What is drawn for an image is a function of (seed, epoch, id); whom it is
mixed with is its neighbour in the micro-batch, so with mixing on, results depend on how a batch is split.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor

from mpp.chance import Purpose, uniform


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Mixup and cutmix, drawn anew for every image (timm's mode elem, its defaults for training ViTs).

    Sources: Zhang et al., mixup (arXiv 1710.09412); Yun et al., CutMix (arXiv 1905.04899).
    """

    mixup: Annotated[float, Ge(0), Le(100)] = 0.8
    """alpha of the Beta(alpha, alpha) that says how much of an image is kept when two are blended; 0: no mixup"""
    cutmix: Annotated[float, Ge(0), Le(100)] = 1.0
    """the same for the area that is kept when a rectangle of another image is pasted in; 0: no cutmix"""
    probability: Annotated[float, Gt(0), Le(1)] = 1.0
    """share of the images that are mixed at all"""
    switch_probability: Annotated[float, Ge(0), Le(1)] = 0.5
    """share of cutmix among them, where both are on"""

    def faults(self) -> Iterator[tuple[str, str]]:
        if not self.mixup and not self.cutmix:
            yield "mixup", "mixup and cutmix are both 0, so nothing would be mixed; leave the section out (null)"

    def check_micro_batch(self, size: int) -> None:
        """ValueError where an image has no neighbour to be mixed with."""
        if size < 2:
            raise ValueError("mix: takes a second image from the micro-batch, and it has one; try a larger batch")

    def __call__(
        self, images: Tensor, labels: Tensor, epochs: Tensor, ids: Tensor, seed: int, classes: int, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """Mixed images and their targets, float32 (B, C, H, W) in 0..255 and (B, classes).

        images: uint8 or float (B, C, H, W) in 0..255. labels, epochs, ids: int64 (B,). Each image is mixed with the
        next one, the last with the first. ValueError: there is no other image.
        """
        if len(images) < 2:
            raise ValueError(
                "mixup and cutmix take a second image from the micro-batch, and it has one; "
                "try train.micro_batch_size 2 or more"
            )
        height, width = images.shape[-2:]
        kept = self.kept(seed, epochs.to(images.device), ids.to(images.device), height, width)
        images = images.float()
        targets = soft_targets(labels, classes, smoothing)
        mixed = torch.lerp(images.roll(-1, 0), images, kept[:, None].float())
        # The label goes by what is left of the image: for cutmix by the true area, cut off at the border.
        share = kept.mean((1, 2), dtype=torch.float64)[:, None].float()
        return mixed, torch.lerp(targets.roll(-1, 0), targets, share)

    def kept(self, seed: int, epochs: Tensor, ids: Tensor, height: int, width: int) -> Tensor:
        """How much of each pixel is the image's own: float64 (B, H, W), 1 outside a pasted rectangle, 0 inside."""
        draws = uniform(seed, Purpose.MIX, epochs[:, None], ids[:, None], torch.arange(5, device=ids.device))
        mix, switch, share, row, column = draws.T
        cut = switch < self.switch_probability if self.mixup and self.cutmix else switch < float(self.cutmix > 0)
        blended = beta(self.mixup, share) if self.mixup else torch.ones_like(share)
        pasted = beta(self.cutmix, share) if self.cutmix else torch.ones_like(share)
        outside = 1 - _rectangles(pasted, row, column, height, width)
        kept = torch.where(cut[:, None, None], outside, blended[:, None, None])
        return torch.where((mix < self.probability)[:, None, None], kept, 1.0)


def soft_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """float32 (B, classes): 1 - smoothing at the label, and smoothing spread over all classes, the label's too."""
    return F.one_hot(labels, classes) * (1 - smoothing) + smoothing / classes


def beta(alpha: float, draws: Tensor) -> Tensor:
    """Uniform draws in [0, 1) -> Beta(alpha, alpha), float64: the inverse of its distribution, from a table.

    A library's sampler would need a generator for every image, and may change with its version.
    """
    if alpha == 1:
        return draws
    values, below = (table.to(draws.device) for table in _beta_table(alpha))
    lower = torch.minimum(draws, 1 - draws)
    at = torch.searchsorted(below, lower.contiguous()).clamp(1, len(below) - 1)
    # For a large alpha the first steps hold less than the smallest float: nothing over nothing.
    place = ((lower - below[at - 1]) / (below[at] - below[at - 1]).clamp(min=1e-300)).clamp(0, 1)
    half = 0.5 * torch.lerp(values[at - 1], values[at], place) ** (1 / min(alpha, 1))
    return torch.where(draws < 0.5, half, 1 - half)


@lru_cache(maxsize=8)
def _beta_table(alpha: float, steps: int = 8192) -> tuple[Tensor, Tensor]:
    """u from 0 to 1, and P(x < 0.5 u**(1/m)) with m = min(alpha, 1): float64, half of a symmetric distribution.

    The density x**(alpha - 1) (1 - x)**(alpha - 1) has a pole at 0 for alpha < 1; per step of u it has none:
    it is (1 - x)**(alpha - 1) up to a factor. For alpha >= 1, u is 2x and there was no pole.
    """
    power = min(alpha, 1.0)
    u = torch.linspace(0, 1, 2 * steps + 1, dtype=torch.float64)
    x = 0.5 * u ** (1 / power)
    density = (1 - x) ** (alpha - 1) * x ** max(alpha - 1, 0.0)
    simpson = (density[:-2:2] + 4 * density[1:-1:2] + density[2::2]).cumsum(0)
    below = torch.cat([torch.zeros(1, dtype=torch.float64), 0.5 * simpson / simpson[-1]])
    return u[::2], below


def _rectangles(kept: Tensor, row: Tensor, column: Tensor, height: int, width: int) -> Tensor:
    """float64 (B, H, W), 1 inside: as long and wide as the image times sqrt(1 - kept), centred anywhere, cut off.

    kept, row, column: (B,) in [0, 1].
    """
    inside = []
    for length, centre in ((height, row), (width, column)):
        side, middle = (length * (1 - kept).sqrt()).long(), (length * centre).long()
        place = torch.arange(length, device=kept.device)
        first, end = middle - side // 2, middle + (side + 1) // 2
        inside.append((place >= first[:, None]) & (place < end[:, None]))
    return (inside[0][:, :, None] & inside[1][:, None, :]).double()
