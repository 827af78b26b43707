"""The one way from a stored picture (bytes, PIL image, numpy array) to an upright uint8 tensor, or an error.

The rules, the same for every source:

- Content decides, never a name. Read are JPEG, MPO (its first picture), PNG, GIF, WebP, AVIF, TIFF (first
  page), BMP, PPM / PFM, JPEG 2000 and `.npy`; of an animation the first frame. Nothing that would start
  another program (EPS, PS, PDF, SVG ...).
- Orientation (EXIF, or XMP where EXIF has none) is applied in every format; a damaged one leaves the
  picture as it is.
- Palettes are expanded, CMYK / Lab / YCbCr become RGB; ICC profiles and gamma are ignored.
- `channels` 1: luma (ITU-R 601: .299 R + .587 G + .114 B). 3: RGB. 4: RGBA as stored, alpha 255 where there
  is none. For 1 and 3 alpha is composited over white. Any other number: only arrays that have exactly so
  many; an array also goes from gray to 3 (replicated) and from 3 to 1 (luma), and no other way.
- 8-bit values stay, booleans are 0 / 255. 16-bit unsigned: 0..65535 becomes 0..255 (value / 257, not
  clipped). Other integers and floats: the picture's own minimum..maximum becomes 0..255 (a constant picture
  is black). A `range` takes the place of these two: its ends become 0 and 255, values outside are clamped.
  Alpha knows no range. NaN or infinity is an error.
- 16-bit *colour* files are read by their high byte, at most one level off, but exactly where a PNG meets a
  `range` or has a transparent colour; TIFF and PPM of that kind are refused with a `range`. AVIF and colour
  JPEG 2000 count as 8-bit, and a PIL image that is already loaded counts as what it holds.
- Arrays are (H, W) or (H, W, C), C = 1, 3, 4 or `channels`; (C, H, W) only where the last axis cannot be C.
- Half a picture is no picture: cut-off files are errors. (What cannot be noticed: flipped bits inside a
  JPEG, and a JPEG cut and given a new end marker. libjpeg and libtiff may print a line about damage to
  stderr.)
- More than `max_pixels` is refused by the header, before the pixels are allocated; nothing is decoded
  smaller.
"""

import io
import math
import re

import numpy as np
from numpy.lib import format as npy
from PIL import Image
from torch import Tensor

from mpp.data.pixels import (
    ARRAY_STEPS,
    PICTURE_STEPS,
    DecodeError,
    Range,
    Steps,
    planes,
    to_channels,
    to_uint8,
)
from mpp.data.readers import check_size, open_picture, pillow_switches, read_picture, read_plain_jpeg

Raw = bytes | Image.Image | np.ndarray


def decode(raw: Raw, channels: int = 3, range: Range = None, max_pixels: int = 150_000_000) -> Tensor:
    """The upright picture, uint8 (channels, H, W) in 0..255, contiguous, in memory of its own.

    `range`: the raw values that mean black and white, for 16-bit, 32-bit and float pictures (rules above).
    Raises DecodeError, whatever is wrong with the picture; ValueError for settings that make no sense.
    """
    _check_settings(channels, range)
    try:
        pixels, steps = _read(raw, channels, range, max_pixels)
        return to_channels(pixels, channels, steps)
    except DecodeError:
        raise
    except Exception as error:  # bad data gives OSError, SyntaxError, struct.error, MemoryError, TypeError
        raise DecodeError(_reason(error)) from error


def _read(raw: Raw, channels: int, range: Range, max_pixels: int) -> tuple[Tensor, Steps]:
    """(C, H, W) uint8 with the channels the picture has, and the steps that lead from these to others."""
    data = bytes(raw) if isinstance(raw, (bytes, bytearray, memoryview)) else b""
    if data.startswith(b"\xff\xd8") and (pixels := read_plain_jpeg(data, max_pixels)) is not None:
        return pixels, PICTURE_STEPS
    with pillow_switches.held(max_pixels):
        if data.startswith(b"\x93NUMPY"):
            return _from_array(_npy_array(data), channels, range, max_pixels), ARRAY_STEPS
        if isinstance(raw, np.ndarray):
            return _from_array(raw, channels, range, max_pixels), ARRAY_STEPS
        if isinstance(raw, Image.Image):
            return read_picture(raw, range, max_pixels), PICTURE_STEPS
        if data:
            return read_picture(open_picture(data), range, max_pixels, data), PICTURE_STEPS
    got = "0 bytes" if isinstance(raw, (bytes, bytearray, memoryview)) else type(raw).__name__
    raise DecodeError(f"expected the bytes of a picture, a PIL image or a numpy array, got {got}")


def _from_array(values: np.ndarray, channels: int, range: Range, max_pixels: int) -> Tensor:
    """(H, W), (H, W, C) or (C, H, W) numbers -> (C, H, W) uint8."""
    shape, known = values.shape, {1, 3, 4, channels}
    if min(shape, default=0) < 1:
        raise DecodeError(f"array of shape {shape} has no pixels")
    if values.ndim == 2:
        values = values[:, :, None]
    elif values.ndim == 3 and shape[-1] not in known and shape[0] in known:
        values = np.moveaxis(values, 0, -1)
    elif values.ndim != 3 or shape[-1] not in known:
        raise DecodeError(f"array of shape {shape}: expected (H, W) or (H, W, C), C = {channels} (data.channels)")
    check_size(values.shape[1], values.shape[0], max_pixels)
    return planes(to_uint8(values, range))


def _npy_array(data: bytes) -> np.ndarray:
    """The array in a `.npy` file, header checked against the bytes; nothing unpickled or copied."""
    stream = io.BytesIO(data)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    version = npy.read_magic(stream)
    if version not in readers:
        raise DecodeError(f".npy version {version}: expected (1, 0) or (2, 0)")
    shape, fortran, dtype = readers[version](stream)
    if dtype.kind not in "buif":
        raise DecodeError(f".npy of {dtype}: expected booleans, whole numbers or floats")
    start, count = stream.tell(), math.prod(shape)
    if min(shape, default=0) < 1 or count * dtype.itemsize > len(data) - start:
        raise DecodeError(f".npy promises {shape} {dtype}, but only {len(data) - start} bytes follow")
    return np.frombuffer(data, dtype, count, start).reshape(shape, order="F" if fortran else "C")


def _check_settings(channels: int, range: Range) -> None:
    if channels < 1:
        raise ValueError(f"data.channels = {channels}: expected 1, 3, 4 or the number your arrays have")
    if range is not None and not (math.isfinite(range[1] - range[0]) and range[0] < range[1]):
        raise ValueError(f"data.range = {range}: expected two finite numbers, black below white")


def _reason(error: Exception) -> str:
    """One line; torchvision puts the path of its source file first, which says nothing to anybody."""
    text = re.sub(r"^decode_\w+, \S+, ", "", str(error).partition("\n")[0])
    return f"{type(error).__name__}: {text}"[:300]
