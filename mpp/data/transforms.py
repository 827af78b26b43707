"""From a decoded picture to a view of the right size: crops and flips for training, one fixed view for everything else.

Chance comes in as numbers in [0, 1) made by a hash of (seed, epoch, sample id); nothing here draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from pydantic import Field
from torch import Tensor

from mpp.chance import Purpose, uniform
from mpp.patches import Size

Interpolation = Literal["bicubic", "bilinear"]
Box = tuple[int, int, int, int]  # top, left, height, width


@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop:
    """Inception crop: a random part of the picture, resized (the paper's authors: area 5-100 %, aspect 3/4-4/3)."""

    kind: Literal["random_resized_crop"] = "random_resized_crop"
    scale: tuple[Annotated[float, Gt(0), Le(1)], Annotated[float, Gt(0), Le(1)]] = (0.05, 1.0)
    """smallest and largest share of the picture's area"""
    ratio: tuple[Annotated[float, Gt(0)], Annotated[float, Gt(0)]] = (3 / 4, 4 / 3)
    """smallest and largest width / height, before resizing"""

    attempts: ClassVar[int] = 10
    num_draws: ClassVar[int] = 2 * attempts + 2

    def faults(self):
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            if low > high:
                yield name, f"[{low:g}, {high:g}] has the larger value first"

    def __call__(self, image: Tensor, size: Size, draws: Sequence[float], interpolation: Interpolation) -> Tensor:
        top, left, height, width = self.box(image.shape[1], image.shape[2], draws)
        return resize(image[:, top : top + height, left : left + width], size, interpolation)

    def box(self, height: int, width: int, draws: Sequence[float]) -> Box:
        """The first of ten proposals that fits; else the largest centred part of an allowed aspect ratio."""
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for attempt in range(self.attempts):
            share, aspect = draws[2 * attempt : 2 * attempt + 2]
            area = height * width * (self.scale[0] + share * (self.scale[1] - self.scale[0]))
            shape = math.exp(low + aspect * (high - low))
            w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
            if 0 < w <= width and 0 < h <= height:
                return int(draws[-2] * (height - h + 1)), int(draws[-1] * (width - w + 1)), h, w
        w = max(1, min(width, round(height * self.ratio[1])))
        h = max(1, min(height, round(width / self.ratio[0])))
        return (height - h) // 2, (width - w) // 2, h, w


@dataclass(frozen=True, kw_only=True)
class ShiftedCrop:
    """The whole picture, moved by a few pixels; what comes in at the edge is its reflection (for small pictures)."""

    kind: Literal["shifted_crop"] = "shifted_crop"
    padding: Annotated[int, Ge(0)] = 4
    """largest shift in pixels, each way"""

    num_draws: ClassVar[int] = 2

    def __call__(self, image: Tensor, size: Size, draws: Sequence[float], interpolation: Interpolation) -> Tensor:
        image = fixed_view(image, size, interpolation)
        down, right = (int(draw * (2 * self.padding + 1)) - self.padding for draw in draws)
        rows, columns = _reflected(size[0], down), _reflected(size[1], right)
        return image[:, rows[:, None], columns]


@dataclass(frozen=True, kw_only=True)
class CenterCrop:
    """The same view as in evaluation: no chance."""

    kind: Literal["center_crop"] = "center_crop"

    num_draws: ClassVar[int] = 0

    def __call__(self, image: Tensor, size: Size, draws: Sequence[float], interpolation: Interpolation) -> Tensor:
        return fixed_view(image, size, interpolation)


Crop = Annotated[RandomResizedCrop | ShiftedCrop | CenterCrop, Field(discriminator="kind")]


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How a training view is made: crop, then flips (METHOD.md 1: inception crop and random flip)."""

    crop: Crop = field(default_factory=RandomResizedCrop)
    horizontal_flip: bool = True
    """half of the views are mirrored left to right"""
    vertical_flip: bool = False
    """half of the views are mirrored upside down (microscopy, satellite)"""
    interpolation: Interpolation = "bicubic"
    """how pictures are resized, always antialiased"""

    def draws(self, seed: int, epochs: Tensor, ids: Tensor) -> list[list[float]]:
        """All the chance that the views of a batch need: float [0, 1) of shape (B, num_draws + 2)."""
        place = torch.arange(self.crop.num_draws)
        crops = uniform(seed, Purpose.CROP, epochs[:, None], ids[:, None], place)
        flips = uniform(seed, Purpose.FLIP, epochs[:, None], ids[:, None], torch.arange(2))
        return torch.cat([crops, flips], 1).tolist()

    def __call__(self, image: Tensor, size: Size, draws: Sequence[float]) -> Tensor:
        """uint8 (C, h, w) of any size -> uint8 (C, H, W)."""
        view = self.crop(image, size, draws[:-2], self.interpolation)
        axes = [
            axis
            for axis, on, draw in ((2, self.horizontal_flip, draws[-2]), (1, self.vertical_flip, draws[-1]))
            if on and draw < 0.5
        ]
        return view.flip(axes) if axes else view


def fixed_view(image: Tensor, size: Size, interpolation: Interpolation = "bicubic") -> Tensor:
    """uint8 (C, h, w) -> uint8 (C, H, W): resized until it covers the size, then the centre."""
    height, width = image.shape[1:]
    if (height, width) == size:
        return image
    scale = max(size[0] / height, size[1] / width)
    # Crop first, in source pixels: an extreme picture (3000x2) must not be blown up whole.
    h, w = min(height, max(1, round(size[0] / scale))), min(width, max(1, round(size[1] / scale)))
    top, left = (height - h) // 2, (width - w) // 2
    return resize(image[:, top : top + h, left : left + w], size, interpolation)


def resize(image: Tensor, size: Size, interpolation: Interpolation = "bicubic") -> Tensor:
    """uint8 (C, h, w) -> uint8 (C, H, W), antialiased."""
    if image.shape[1:] == size:
        return image
    return F.interpolate(image[None], size, mode=interpolation, antialias=True)[0]


@lru_cache(maxsize=1024)  # few shifts, many pictures; nobody writes into an index
def _reflected(length: int, shift: int) -> Tensor:
    """Indices 0 .. length - 1 moved by `shift`, reflected at the edges (the edge itself is not repeated)."""
    index = (torch.arange(length) + shift).abs()
    period = max(1, 2 * (length - 1))
    index = index % period
    return torch.where(index >= length, period - index, index)
