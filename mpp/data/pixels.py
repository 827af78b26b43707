"""Pixels after reading: stored values to uint8, turned upright, brought to other channels. Pure functions.

Values are numpy arrays, (H, W) or (H, W, C), as stored; pictures are (C, H, W) uint8 tensors.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

Range = tuple[float, float] | None
# (channels there are, channels asked for) -> the way from one to the other
Steps = Mapping[tuple[int, int], Callable[[Tensor], Tensor]]


class DecodeError(ValueError):
    """This picture cannot be decoded; the text is the reason, in one line."""


def to_uint8(values: np.ndarray, range: Range) -> np.ndarray:
    """Any numbers to uint8 of the same shape, by `range` or the rule for their type (see `decode.py`)."""
    kind, size = values.dtype.kind, values.dtype.itemsize
    if kind == "b":
        return values * np.uint8(255)
    if kind == "u" and size == 1:
        return values
    if kind == "u" and size == 2:
        return _table(*(range or (0, 65535)))[values]
    if kind not in "iuf":
        raise DecodeError(f"pixels of type {values.dtype}: expected booleans, whole numbers or floats")
    return _stretched(values, range)


@lru_cache
def _table(low: float, high: float) -> np.ndarray:
    """uint8 for each 16-bit value: ten times as fast as arithmetic on floats, and an eighth of the memory."""
    return _stretched(np.arange(65536), (low, high))


def _stretched(values: np.ndarray, range: Range) -> np.ndarray:
    """`range`, or else minimum..maximum, to 0..255, rounded to the nearest."""
    with np.errstate(all="ignore"):  # a long double too large for a float is caught as infinity below
        values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise DecodeError("NaN or infinite pixels")
    low, high = range or (float(values.min()), float(values.max()))
    if low == high:
        return np.zeros(values.shape, np.uint8)
    if not math.isfinite(high - low):
        raise DecodeError(f"pixels from {low:g} to {high:g} are too far apart to scale: give data.range")
    np.clip(values, low, high, out=values)
    values -= low
    values /= high - low
    values *= 255
    values += 0.5  # the cast below cuts off
    return values.astype(np.uint8)


def planes(values: np.ndarray) -> Tensor:
    """(H, W) or (H, W, C) -> (C, H, W); always a copy, independent of the caller's array."""
    values = values[:, :, None] if values.ndim == 2 else values
    return torch.from_numpy(values.transpose(2, 0, 1).copy())


# EXIF 2.32, tag 0x0112: do rows and columns change places, and which axes of (C, H, W) are then reversed?
UPRIGHT = {
    2: (False, (2,)),
    3: (False, (1, 2)),
    4: (False, (1,)),
    5: (True, ()),
    6: (True, (2,)),
    7: (True, (1, 2)),
    8: (True, (1,)),
}


def upright(pixels: Tensor, orientation: int) -> Tensor:
    """The picture as it was seen; any other orientation than 2..8 leaves it as it is."""
    if orientation not in UPRIGHT:
        return pixels
    transposed, backwards = UPRIGHT[orientation]
    return (pixels.transpose(1, 2) if transposed else pixels).flip(backwards)


def to_channels(pixels: Tensor, channels: int, steps: Steps) -> Tensor:
    """(C, H, W) -> (channels, H, W), contiguous, where `steps` know how; DecodeError where not."""
    step = steps.get((len(pixels), channels))
    if step is None and len(pixels) != channels:
        raise DecodeError(f"it has {len(pixels)} channels, data.channels asks for {channels}")
    pixels = step(pixels) if step else pixels
    # Decoders interleave channels; numpy takes them apart in half the time of torch's contiguous().
    return torch.from_numpy(np.ascontiguousarray(pixels.numpy()))


def replicated(pixels: Tensor) -> Tensor:
    return pixels.expand(3, -1, -1)


def luma(pixels: Tensor) -> Tensor:
    """(3, H, W) -> (1, H, W), as Pillow's convert("L") to the last bit; equal channels keep their value."""
    total = pixels[0].int() * 19595
    total += pixels[1].int() * 38470
    total += pixels[2].int() * 7471
    return ((total + 32768) >> 16).to(torch.uint8)[None]


def opaque(pixels: Tensor) -> Tensor:
    return torch.cat([pixels, torch.full_like(pixels[:1], 255)])


def over_white(pixels: Tensor) -> Tensor:
    """(4, H, W) -> (3, H, W): (colour * alpha + 255 * (255 - alpha)) / 255, to the nearest."""
    alpha = pixels[3].int()
    return torch.stack(
        [((255 * 255 + 127 + (plane.int() - 255) * alpha) // 255).to(torch.uint8) for plane in pixels[:3]]
    )


ARRAY_STEPS: Steps = {(1, 3): replicated, (3, 1): luma}
PICTURE_STEPS: Steps = {
    (1, 3): replicated,
    (1, 4): lambda pixels: opaque(replicated(pixels)),
    (3, 1): luma,
    (3, 4): opaque,
    (4, 1): lambda pixels: luma(over_white(pixels)),
    (4, 3): over_white,
}
