"""What is predicted for a corrupted patch, and its loss: the three targets of the paper (appendix B.1.2)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from einops import rearrange, repeat
from pydantic import Field
from torch import Tensor

from mpp.patches import Size, class_colors, color_classes, color_levels, to_patches

MAX_CLASSES = 65_536  # a softmax over more is a mistake in the recipe, not a target
MAX_OUTPUTS = 1_048_576  # so is a head that is wider


@dataclass(frozen=True, kw_only=True)
class ColorTarget:
    """Shared by the two classifying targets: `cells` softmax predictions of a quantised colour for each patch."""

    bits: Annotated[int, Ge(1), Le(8)] = 3
    """bits per channel: 2**bits levels, (2**bits)**channels classes"""

    is_class: ClassVar[bool] = True
    unit: ClassVar[str] = "nats"
    least_information: ClassVar[float] = 0.2  # nats: under it nearly every patch has the same label

    @property
    def cells(self) -> Size:
        return 1, 1

    def num_classes(self, channels: int) -> int:
        """(2**bits)**channels; ValueError over 65,536."""
        count = (2**self.bits) ** channels
        if count > MAX_CLASSES:
            raise ValueError(
                f"{self.bits} bits for {channels} channels make {count:,} classes, expected at most {MAX_CLASSES:,}; "
                f"try fewer bits, or the `pixels` target"
            )
        return count

    def num_outputs(self, channels: int, patch_size: Size) -> int:
        """Width of the head: classes times cells; ValueError over 1,048,576."""
        count = self.num_classes(channels) * self.cells[0] * self.cells[1]
        if count > MAX_OUTPUTS:
            raise ValueError(f"{count:,} outputs per patch, expected at most {MAX_OUTPUTS:,}; try fewer bits or cells")
        return count

    def labels(self, images: Tensor, patch_size: Size) -> Tensor:
        """uint8 (B, C, H, W) -> int64 (B, N, cells) classes."""
        return color_classes(color_levels(images, patch_size, self.bits, self.cells), self.bits)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """outputs (B, K, cells * classes), labels (B, K, cells) -> float32 (B, K): cross-entropy, mean of the cells."""
        logits = self._logits(outputs, labels)
        losses = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none")
        return losses.view(labels.shape).mean(-1)

    def correct(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """float32 (B, K): the share of a patch's cells whose likeliest class is right."""
        return (self._logits(outputs, labels).argmax(-1) == labels).float().mean(-1)

    def predicted_pixels(self, outputs: Tensor, channels: int, patch_size: Size) -> Tensor:
        """outputs (B, K, ...) -> (B, K, P*Q*C) in [0, 1]: each cell in the likeliest colour."""
        cells = self.cells[0] * self.cells[1]
        classes = rearrange(outputs, "b k (s c) -> b k s c", s=cells).argmax(-1)
        return _paint(class_colors(classes, self.bits, channels), self.cells, patch_size)

    def true_pixels(self, images: Tensor, patch_size: Size) -> Tensor:
        """What a perfect prediction would look like: (B, N, P*Q*C) in [0, 1]."""
        levels = color_levels(images, patch_size, self.bits, self.cells)
        return _paint((levels.float() + 0.5) / 2**self.bits, self.cells, patch_size)

    def _logits(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return rearrange(outputs.float(), "b k (s c) -> b k s c", s=labels.shape[-1])


@dataclass(frozen=True, kw_only=True)
class MeanColor(ColorTarget):
    """Target 1: the mean colour of the patch, 3 bits per channel, as one of 512 classes."""

    kind: Literal["mean_color"] = "mean_color"


@dataclass(frozen=True, kw_only=True)
class DownsizedColor(ColorTarget):
    """Target 2: the patch downsized to 4x4, each of the 16 cells as one of 512 colours; the loss is their mean."""

    kind: Literal["downsized_color"] = "downsized_color"
    size: Annotated[int, Ge(1), Le(64)] = 4
    """cells per side"""

    @property
    def cells(self) -> Size:
        return self.size, self.size


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Target 3: L2 regression of every pixel of the patch, in [0, 1]; the loss is the mean over them."""

    kind: Literal["pixels"] = "pixels"
    normalize: bool = False
    """per-patch normalisation: subtract the patch's mean, divide by its standard deviation (unbiased, + 1e-6)"""

    is_class: ClassVar[bool] = False
    unit: ClassVar[str] = "squared pixel"
    least_information: ClassVar[float] = 1e-5  # a standard deviation of 0.8 of 255 levels

    def num_outputs(self, channels: int, patch_size: Size) -> int:
        """P * Q * C."""
        return patch_size[0] * patch_size[1] * channels

    def labels(self, images: Tensor, patch_size: Size) -> Tensor:
        """uint8 (B, C, H, W) -> float32 (B, N, P*Q*C)."""
        patches = to_patches(images, patch_size).float() / 255
        if not self.normalize:
            return patches
        variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
        return (patches - mean) / (variance + 1e-6).sqrt()

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """outputs, labels (B, K, P*Q*C) -> float32 (B, K)."""
        return (outputs.float() - labels).square().mean(-1)

    def correct(self, outputs: Tensor, labels: Tensor) -> None:
        """A regression has no accuracy."""
        return None

    def predicted_pixels(self, outputs: Tensor, channels: int, patch_size: Size) -> Tensor:
        """Clamped to [0, 1]; normalised predictions are drawn around mid-grey, since the true mean is not predicted."""
        pixels = outputs.float()
        return (pixels / 6 + 0.5 if self.normalize else pixels).clamp(0, 1)

    def true_pixels(self, images: Tensor, patch_size: Size) -> Tensor:
        return self.predicted_pixels(self.labels(images, patch_size), images.shape[1], patch_size)


def _paint(colors: Tensor, cells: Size, patch_size: Size) -> Tensor:
    """Cell colours (B, K, cells, C) -> pixels (B, K, P*Q*C), nearest cell."""
    rows = torch.arange(patch_size[0], device=colors.device) * cells[0] // patch_size[0]
    columns = torch.arange(patch_size[1], device=colors.device) * cells[1] // patch_size[1]
    index = repeat(rows * cells[1], "p -> p q", q=patch_size[1]) + columns
    return colors[:, :, index.flatten()].flatten(2)


Target = Annotated[MeanColor | DownsizedColor | Pixels, Field(discriminator="kind")]
