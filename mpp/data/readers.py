"""The libraries that read picture files: torchvision's C++ for plain JPEG, Pillow for everything else.

Both give the same pixels for a plain JPEG, to the last bit (4,500 photos); torchvision takes 20 us where
Pillow takes 76 for 32 pixels, and 220 against 380 for 224. Out comes (C, H, W) uint8, upright, C = 1 gray,
3 RGB, 4 RGBA.
"""

import io
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFile, UnidentifiedImageError
from torch import Tensor

from mpp.data.pixels import UPRIGHT, DecodeError, Range, planes, to_uint8, upright

FORMATS = ("JPEG", "MPO", "PNG", "GIF", "WEBP", "AVIF", "TIFF", "BMP", "PPM", "JPEG2000")
MAX_JPEG_SCANS = 256  # usual are about 10; thousands of empty ones over a large picture cost minutes


def read_plain_jpeg(data: bytes, max_pixels: int) -> Tensor | None:
    """(1 | 3, H, W) uint8 of an 8-bit Huffman JPEG of 1 or 3 components, else None: Pillow looks."""
    read = torchvision_reader("decode_jpeg")
    if read is None or (header := _jpeg_header(data)) is None:
        return None
    width, height, has_metadata = header
    check_size(width, height, max_pixels)
    if data.count(b"\xff\xda") > MAX_JPEG_SCANS:
        raise DecodeError(f"JPEG of more than {MAX_JPEG_SCANS} scans: made to waste time")
    pixels = read(_buffer(data), 0, False)  # 0: colours as stored
    if not has_metadata:
        return pixels
    with pillow_switches.held(max_pixels):
        return upright(pixels, _jpeg_orientation(data))


def _jpeg_header(data: bytes) -> tuple[int, int, bool] | None:
    """Width, height, and whether there may be EXIF or XMP; None for a JPEG whose header is not plain.

    Walks the segments as libjpeg does (3 us), so that the size is known before libjpeg allocates anything.
    """
    position, size, has_metadata = 2, None, False
    try:
        while True:
            marker, length = struct.unpack_from(">HH", data, position)
            if marker == 0xFFDA:  # start of scan: here the coded pixels begin
                return size and (*size, has_metadata)
            if marker in (0xFFC0, 0xFFC1, 0xFFC2):  # baseline, extended, progressive
                precision, height, width, components = struct.unpack_from(">BHHB", data, position + 4)
                if precision != 8 or components not in (1, 3):
                    return None
                size = (width, height)
            elif marker not in (0xFFC4, 0xFFDB, 0xFFDD, 0xFFFE) and not 0xFFE0 <= marker <= 0xFFEF:
                return None
            has_metadata |= marker == 0xFFE1
            position += 2 + length
    except struct.error:
        return None


@lru_cache
def torchvision_reader(name: str) -> Callable[..., Tensor] | None:
    """torchvision's C++ operator or None: its Python functions warn at every call that they will go."""
    try:
        import torchvision.io  # noqa: F401  (registers the operators)
    except ImportError:
        return None
    return getattr(torch.ops.image, name, None)


def _buffer(data: bytes) -> Tensor:
    # A copy, because torch warns of memory it may not write.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def read_picture(image: Image.Image, range: Range, max_pixels: int, data: bytes = b"") -> Tensor:
    """(1 | 3 | 4, H, W) uint8 of a PIL image, open or loaded; `data`: its file, where at hand."""
    if image.format not in (None, *FORMATS):  # an EPS not yet loaded would start Ghostscript now
        raise DecodeError(f"{image.format} is none of the formats read here: {', '.join(FORMATS)}")
    check_size(*image.size, max_pixels)
    stored = getattr(image, "tile", [])  # how the pixels are stored; load() forgets it
    reduced, deep_png = _is_reduced(image, stored), image.format == "PNG" and ";16" in str(stored)
    # load() before getexif(): else a broken PNG stream goes unnoticed, and the picture is half black.
    image.load()
    if data and deep_png and ("transparency" in image.info or (reduced and range)):
        pixels = _read_deep_png(data, range, image.info.get("transparency"))
    elif reduced and range:
        raise DecodeError(
            f"data.range needs the stored values of this {image.format}, which Pillow alters: use PNG or .npy"
        )
    else:
        pixels = planes(to_uint8(_expanded(image), range))
    return upright(pixels, _orientation(image))


def open_picture(data: bytes) -> Image.Image:
    """The file opened by content: its header is read, its pixels are not."""
    try:
        image = Image.open(io.BytesIO(data), formats=_formats())
    except UnidentifiedImageError as error:
        raise DecodeError(f"no picture that can be read ({len(data)} bytes, from {data[:12]!r})") from error
    # OpenJPEG invents what was cut off. FF D9 cannot occur in coded pixels (after FF 93): it is the end.
    if image.format == "JPEG2000" and not 0 < data.find(b"\xff\x93") < data.rfind(b"\xff\xd9"):
        raise DecodeError("JPEG 2000 without its end: the file is cut off")
    return image


@lru_cache
def _formats() -> tuple[str, ...]:
    Image.init()
    # MPO opens as JPEG; an older Pillow has no AVIF.
    return tuple(name for name in FORMATS if name in Image.OPEN)


# Gray of more than 8 bits, which numpy reads as it is.
_NATIVE = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")


def _expanded(image: Image.Image) -> np.ndarray:
    """(H, W) gray in its own depth, (H, W, 3) RGB uint8 or (H, W, 4) RGBA uint8."""
    if image.mode in _NATIVE:
        values = np.asarray(image)
        return values.astype(np.uint16) if image.mode == "I" and image.format in ("PPM", "PNG") else values
    gray = "L" if image.mode in ("1", "L") else "RGB"
    mode = "RGBA" if image.mode in _ALPHA or "transparency" in image.info else gray
    image = image.convert("LA") if image.mode == "La" else image  # Pillow knows no direct way
    return np.asarray(image if image.mode == mode else image.convert(mode))


def _is_reduced(image: Image.Image, stored: Sequence[Any]) -> bool:
    """Whether Pillow gives other values than the file: high bytes of 16-bit colours, stretched PPM."""
    layouts = [tile[3] for tile in stored]
    if image.format == "PPM":
        levels = [layout[-1] for layout in layouts if isinstance(layout, tuple)]
        return any(level > 255 and (level < 65535 or image.mode == "RGB") for level in levels)
    return image.mode not in _NATIVE and ";16" in str(layouts)


def _read_deep_png(data: bytes, range: Range, key: int | tuple[int, ...] | None) -> Tensor:
    """(1 | 3 | 4, H, W) uint8 from all 16 bits; `key`: the colour that means transparent."""
    read = torchvision_reader("decode_png")
    if read is None:
        raise DecodeError("16-bit PNG with colour and data.range, or transparency: torchvision lacks its reader")
    values = read(_buffer(data), 0, False).numpy()  # (C, H, W) uint16
    alpha = values[-1:] if len(values) in (2, 4) else None
    colours = to_uint8(values if alpha is None else values[:-1], range)
    if alpha is None and key is not None:
        alpha = (values != np.reshape(key, (-1, 1, 1))).any(0, keepdims=True)
    if alpha is None:
        return torch.from_numpy(colours)
    colours = np.broadcast_to(colours, (3, *colours.shape[1:]))
    return torch.from_numpy(np.concatenate([colours, to_uint8(alpha, None)]))


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(0x0112, 1)
        return value if value in UPRIGHT else 1
    except Exception:  # damaged EXIF: the picture as it is
        return 1


def _jpeg_orientation(data: bytes) -> int:
    try:
        return _orientation(Image.open(io.BytesIO(data), formats=["JPEG"]))
    except Exception:  # libjpeg has read the pixels, Pillow stumbles over the metadata
        return 1


def check_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise DecodeError(f"{width}x{height}: no pixels")
    if width * height > max_pixels:
        raise DecodeError(f"{width}x{height} is more than {max_pixels} pixels: refused before decoding")


class _PillowSwitches:
    """While any thread is inside: no Python warnings, and Pillow's process-wide switches as needed here.

    Others may have set LOAD_TRUNCATED_IMAGES (half grey pictures) or another limit. `warnings.catch_warnings`
    alone would not do: two threads that leave it in the wrong order silence the process for good.
    """

    def __init__(self) -> None:
        self.lock, self.inside = threading.Lock(), 0

    @contextmanager
    def held(self, max_pixels: int) -> Iterator[None]:
        with self.lock:
            if not self.inside:
                self.warnings = warnings.catch_warnings()
                self.others = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
                self.warnings.__enter__()
                warnings.simplefilter("ignore")
            self.inside += 1
            # Pillow refuses from twice this number on: for its own buffers (TIFF tiles, WebP canvas).
            Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = (max_pixels + 1) // 2, False
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if not self.inside:
                    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = self.others
                    self.warnings.__exit__(None, None, None)


pillow_switches = _PillowSwitches()
