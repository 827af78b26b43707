"""The fixed view of a picture for evaluating a classifier."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Le
from torch import Tensor

from mpp.data.transforms import Interpolation, fixed_view, resize
from mpp.patches import Size


@dataclass(frozen=True, kw_only=True)
class View:
    """Resized, and the centre of it; or the whole picture squeezed into the size."""

    kind: Literal["center_crop", "squeeze"] = "center_crop"
    """center_crop: the short side becomes size / crop pixels, then its centre; squeeze: all of it, aspect ratio lost"""
    crop: Annotated[float, Gt(0), Le(1)] = 0.875
    """share of the resized picture that is seen, each way: 224 / 256; 1 for pictures of the right size"""
    interpolation: Interpolation = "bicubic"
    """how pictures are resized, always antialiased"""

    def __call__(self, image: Tensor, size: Size) -> Tensor:
        """uint8 (C, h, w) of any size -> uint8 (C, H, W)."""
        if self.kind == "squeeze":
            return resize(image, size, self.interpolation)
        return fixed_view(image, size, self.interpolation, self.crop)
