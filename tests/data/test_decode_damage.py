"""Damaged, hostile and foreign data give a picture or a DecodeError, in bounded time and memory, and no side effect."""

import io
import random
import struct
import subprocess
import sys
import threading
import time
import warnings
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, features

from mpp.data import readers
from mpp.data.decode import DecodeError, decode

ROOT = Path(__file__).parents[2]
FORMATS = ["JPEG", "PNG", "WEBP", "TIFF"] + ["AVIF"] * features.check("avif")

# A warning that gets out of decode() fails the test: a run must not depend on anybody's warning filters.
pytestmark = pytest.mark.filterwarnings("error")


def corners(width: int = 48, height: int = 32) -> Image.Image:
    """A picture whose four quarters differ, in flat 16-pixel blocks that lossy formats keep."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:16, :16], pixels[:16, 16:] = (200, 40, 40), (40, 200, 40)
    pixels[16:, :16], pixels[16:, 16:] = (40, 40, 200), (220, 220, 60)
    return Image.fromarray(pixels)


def noise(seed: int = 0, shape: tuple[int, ...] = (24, 20, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(image: Image.Image, format: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# Damage


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        b"\xff\xd8",
        b"\xff\xd8\xff\xd9",
        b"\x93NUMPY",
        b"hello, world " * 40,
        None,
        "path.jpg",
        [1, 2],
        7,
    ],
)
def test_what_is_no_picture_is_refused_in_one_line(raw):
    with pytest.raises(DecodeError) as caught:
        decode(raw)
    assert str(caught.value) and "\n" not in str(caught.value) and " at 0x" not in str(caught.value)


@pytest.mark.parametrize("data", [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"%PDF-1.4\n", b"<svg/>"])
def test_nothing_that_starts_another_program_is_opened(data, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    with pytest.raises(DecodeError, match="no picture"):
        decode(data)
    if data.startswith(b"%!PS"):
        with pytest.raises(DecodeError, match="EPS"):
            decode(Image.open(io.BytesIO(data)))


def whole_files() -> dict[str, bytes]:
    image = Image.fromarray(noise())
    files = {format: encoded(image, format) for format in [*FORMATS, "PPM", "BMP"]}
    files["progressive JPEG"] = encoded(image, "JPEG", progressive=True)
    files["gray JPEG"] = encoded(image.convert("L"), "JPEG")
    files["CMYK JPEG"] = encoded(image.convert("CMYK"), "JPEG")
    files["GIF"] = encoded(image.quantize(64), "GIF")
    files["lossless WEBP"] = encoded(image, "WEBP", lossless=True)
    np.save(array := io.BytesIO(), noise())
    files["npy"] = array.getvalue()
    files["16-bit PNG"] = encoded(Image.fromarray(noise()[..., 0].astype(np.uint16) * 257), "PNG")
    if features.check("jpg_2000"):
        files["JPEG2000"] = encoded(image, "JPEG2000")
        files["tiled JPEG2000"] = encoded(image, "JPEG2000", tile_size=(8, 8))
    if features.check("libtiff"):
        files["JPEG in TIFF"] = encoded(image, "TIFF", compression="jpeg")
        files["LZW TIFF"] = encoded(image, "TIFF", compression="tiff_lzw")
    return files


FILES = whole_files()


@pytest.mark.parametrize("name", FILES)
def test_a_cut_off_file_is_never_half_a_picture(name, capfd):
    whole = decode(FILES[name])
    for length in range(1, len(FILES[name])):
        with suppress(DecodeError):
            assert torch.equal(decode(FILES[name][:length]), whole), f"{name}, {length} of {len(FILES[name])} bytes"


def test_others_cannot_switch_on_half_pictures(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for name in ("PNG", "BMP", "CMYK JPEG"):
        with pytest.raises(DecodeError):
            decode(FILES[name][: len(FILES[name]) // 2])
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_a_broken_png_stream_is_refused():
    data = bytearray(encoded(Image.fromarray(noise(shape=(128, 128, 3))), "PNG", exif=Image.Exif()))
    data[20_000:20_010] = b"\xff" * 10
    for raw in (bytes(data), Image.open(io.BytesIO(data))):
        with pytest.raises(DecodeError):
            decode(raw)


@pytest.mark.parametrize("name", FILES)
def test_random_damage_gives_a_picture_or_a_decode_error(name, capfd):
    chance = random.Random(name)  # seeded by the name
    for _ in range(60):
        data = bytearray(FILES[name])
        for _ in range(chance.choice([0, 1, 1, 3, 10])):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        try:
            pixels = decode(bytes(data), max_pixels=1_000_000)
        except DecodeError:
            continue
        assert pixels.shape[0] == 3 and pixels.dtype == torch.uint8 and pixels.is_contiguous()


def test_a_jpeg_of_endless_scans_is_refused():
    data = encoded(corners(), "JPEG", progressive=True)
    start = data.index(b"\xff\xda")
    with pytest.raises(DecodeError, match="scans"):
        decode(data[:start] + b"\xff\xda\x00\x08\x01\x01\x00\x00\x00\x00" * 300 + data[start:])


# Bombs

BOMBS = """
import resource, struct, sys, time, zlib
sys.path[:0] = [{root!r}, {here!r}]
from test_decode_damage import bombs
from mpp.data.decode import DecodeError, decode
for data in bombs().values():
    try: decode(data[:40])
    except DecodeError: pass
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name, data in bombs().items():
    start = time.perf_counter()
    try:
        decode(data)
        print(name, "was decoded")
    except DecodeError as error:
        if time.perf_counter() - start > 1: print(name, "took", time.perf_counter() - start, "seconds")
print("grown", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def tiff_of_one_tile(side: int) -> bytes:
    """A picture of 16x16 cut out of one deflated tile of side x side."""
    data = zlib.compress(bytes(5_000_000))
    tags = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side, 324: 8, 325: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)


def bombs() -> dict[str, bytes]:
    """Small files whose headers promise pictures of 0.3 to 16 gigapixels."""
    jpeg, tiff, bmp = (bytearray(encoded(corners(), format)) for format in ("JPEG", "TIFF", "BMP"))
    frame = jpeg.index(b"\xff\xc0") + 5
    jpeg[frame : frame + 4] = struct.pack(">HH", 65500, 65500)
    for tag in (256, 257):
        entry = tiff.index(struct.pack("<HHI", tag, 4, 1)) + 8
        tiff[entry : entry + 4] = struct.pack("<I", 100_000)
    bmp[18:26] = struct.pack("<ii", 60_000, 60_000)
    header = struct.pack(">IIBBBBB", 40_000, 40_000, 1, 0, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9_000_000)))
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(30_000_000), 1))
    webp = b"WEBPVP8X" + struct.pack("<IIHBHB", 10, 0, 16383, 0, 16383, 0) + b"VP8 " + struct.pack("<I", 20) + bytes(20)
    return {
        "JPEG": bytes(jpeg),
        "progressive JPEG": bytes(jpeg).replace(b"\xff\xc0", b"\xff\xc2"),
        "TIFF": bytes(tiff),
        "BMP": bytes(bmp),
        "PNG": png,
        "PNG text": encoded(corners(), "PNG").replace(chunk(b"IEND", b""), text + chunk(b"IEND", b"")),
        "GIF": b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b",\0\0\0\0\xff\xff\xff\xff\0\x02\0;",
        "TIFF tile": tiff_of_one_tile(60_000),
        "PPM": b"P6 100000 100000 255\n" + bytes(1000),
        "WEBP": b"RIFF" + struct.pack("<I", len(webp)) + webp,
        "npy": b"\x93NUMPY\1\0F\0{'descr': '|u1', 'fortran_order': False, 'shape': (99999, 99999)}    ",
    }


def test_bombs_are_refused_by_their_header_in_little_time_and_memory(tmp_path):
    script = BOMBS.format(root=str(ROOT), here=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert len(lines) == 1 and int(lines[0].split()[1]) < 100_000, lines  # kilobytes


def test_a_tiled_tiff_of_honest_size_is_decoded():
    assert decode(tiff_of_one_tile(16)).shape == (3, 16, 16)


@pytest.mark.parametrize("size", [(100, 101), (101, 100)])
def test_the_limit_is_exact_and_belongs_to_the_call(size, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # somebody else's
    for raw in (
        encoded(Image.new("RGB", size), "PNG"),
        encoded(Image.new("RGB", size), "JPEG"),
        np.zeros(size),
    ):
        assert decode(raw, max_pixels=10_100).shape[0] == 3
        with pytest.raises(DecodeError, match="more than 10099 pixels"):
            decode(raw, max_pixels=10_099)
    assert Image.MAX_IMAGE_PIXELS == 10


def test_two_threads_that_leave_in_any_order_restore_what_was_there():
    filters = list(warnings.filters)
    limit = Image.MAX_IMAGE_PIXELS
    first, second = readers.pillow_switches.held(10), readers.pillow_switches.held(10)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert Image.MAX_IMAGE_PIXELS == 5  # the second is still inside
    warnings.warn("unheard", stacklevel=1)
    second.__exit__(None, None, None)
    assert limit == Image.MAX_IMAGE_PIXELS and list(warnings.filters) == filters


def test_threads_leave_warnings_and_pillow_as_they_found_them():
    data = encoded(corners().quantize(4), "PNG", transparency=b"\0\x80\xff\x10")
    before = list(warnings.filters), Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    results: list[torch.Tensor] = []
    work = [threading.Thread(target=lambda: results.extend(decode(data) for _ in range(50))) for _ in range(4)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(results) == 200 and all(torch.equal(pixels, results[0]) for pixels in results)
    assert (list(warnings.filters), Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES) == before


def test_a_small_jpeg_costs_little():
    data = encoded(Image.fromarray(noise(shape=(32, 32, 3))), "JPEG", quality=75)
    decode(data)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        decode(data)
        times.append(time.perf_counter() - start)
    assert min(times) < 300e-6  # about 40 us on a free core; Pillow and a conversion take 100
