"""16 bits, floats and arrays become 0..255 by the rules of `mpp/data/decode.py`, and lying arrays are refused."""

import io
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mpp.data.decode import DecodeError, decode

# A warning that gets out of decode() fails the test: a run must not depend on anybody's warning filters.
pytestmark = pytest.mark.filterwarnings("error")


def noise(seed: int = 0, shape: tuple[int, ...] = (24, 20, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(image: Image.Image, format: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def npy(values: np.ndarray, **options) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values, **options)
    return stream.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png16(values: np.ndarray, *extra: bytes) -> bytes:
    """A 16-bit PNG of (H, W, 1..4) values, which Pillow cannot write."""
    height, width, channels = values.shape
    header = struct.pack(">IIBBBBB", width, height, 16, (0, 4, 2, 6)[channels - 1], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    parts = [chunk(b"IHDR", header), *extra, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def difference(pixels: torch.Tensor, image: Image.Image | np.ndarray) -> int:
    wanted = np.asarray(image).astype(int)
    wanted = wanted[None] if wanted.ndim == 2 else wanted.transpose(2, 0, 1)
    assert pixels.shape == wanted.shape
    return int(np.abs(pixels.numpy().astype(int) - wanted).max())


# 16 bits, integers, floats


def test_16_bit_gray_is_scaled_and_not_clipped():
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    wanted = np.floor(values / 257 + 0.5)
    pgm = b"P5 256 256 65535\n" + values.astype(">u2").tobytes()
    files = [encoded(Image.fromarray(values), f) for f in ("PNG", "TIFF")] + [
        pgm,
        npy(values),
        npy(values.astype(">u2")),
    ]
    for raw in [*files, values, Image.fromarray(values)]:
        assert difference(decode(raw, channels=1), wanted) == 0


def test_16_bit_gray_follows_the_range_and_clamps():
    values = np.array([[0, 291, 392, 694, 65535]], np.uint16)
    for raw in (
        encoded(Image.fromarray(values), "PNG"),
        encoded(Image.fromarray(values), "TIFF"),
        values,
        npy(values),
    ):
        assert decode(raw, channels=1, range=(291, 694))[0, 0].tolist() == [0, 0, 64, 255, 255]


def test_pgm_levels_are_scaled_by_their_own_white_and_have_no_other_range():
    data = b"P5 3 1 4095\n" + struct.pack(">3H", 0, 1024, 4095)
    assert decode(data, channels=1)[0, 0].tolist() == [0, 64, 255]
    assert decode(b"P5 2 1 65535\n" + struct.pack(">2H", 2570, 5140), channels=1)[0, 0].tolist() == [10, 20]
    with pytest.raises(DecodeError, match="PPM"):
        decode(data, channels=1, range=(0, 100))


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_16_bit_colour_png_uses_all_its_bits_when_a_range_is_given(channels):
    values = np.random.default_rng(1).integers(0, 65536, (6, 5, channels)).astype(np.uint16)
    colour = values[..., : channels - (channels != 3)].astype(float)
    alpha = values[..., 3:] if channels == 4 else values[..., 1:] if channels == 2 else np.full((6, 5, 1), 65535)
    rough = decode(png16(values), channels=4).numpy().transpose(1, 2, 0)
    assert np.abs(rough[..., :3] - colour / 257).max() <= 1 and np.abs(rough[..., 3:] - alpha / 257).max() <= 1
    exact = decode(png16(values), channels=4, range=(1000, 2000)).numpy().transpose(1, 2, 0)
    assert np.abs(exact[..., :3] - np.clip((colour - 1000) / 1000 * 255, 0, 255)).max() <= 0.5
    assert np.abs(exact[..., 3:] - alpha / 257).max() <= 0.5


@pytest.mark.parametrize("channels", [1, 3])
def test_the_transparent_colour_of_a_16_bit_png_becomes_white_and_its_neighbour_does_not(channels):
    values = np.full((1, 2, channels), 1000, np.uint16)
    values[0, 1] += 1
    key = struct.pack(">H", 1000) * channels
    assert decode(png16(values, chunk(b"tRNS", key)))[:, 0].T.tolist() == [[255] * 3, [4] * 3]


def test_16_bit_colour_that_pillow_reduces_is_refused_with_a_range():
    data = b"P6 2 1 65535\n" + struct.pack(">6H", 0, 257, 514, 65535, 1, 2)
    assert decode(data).flatten().tolist()[:4] == [0, 255, 1, 0]
    with pytest.raises(DecodeError, match="stored values of this PPM"):
        decode(data, range=(0, 1000))
    with pytest.raises(DecodeError, match="stored values of this PNG"):  # opened by somebody else: the bytes are gone
        decode(Image.open(io.BytesIO(png16(np.zeros((1, 1, 3), np.uint16)))), range=(0, 1000))


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float64, np.int64, np.int16, np.uint32, np.float16])
def test_floats_and_wide_integers_go_by_minimum_and_maximum_or_by_the_range(dtype):
    values = np.array([[10, 20, 30, 50]], dtype)
    raws = [values, npy(values), npy(np.asfortranarray(values))]
    if dtype in (np.float32, np.int32):
        raws += [Image.fromarray(values), encoded(Image.fromarray(values), "TIFF")]
    for raw in raws:
        assert decode(raw, channels=1)[0, 0].tolist() == [0, 64, 128, 255]
        assert decode(raw, channels=1, range=(20, 40))[0, 0].tolist() == [0, 0, 128, 255]


def test_a_constant_float_picture_is_black():
    assert decode(np.full((3, 3), 7.5)).eq(0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("range", [None, (0, 1)])
def test_a_pixel_that_is_no_number_is_refused(bad, range):
    values = np.zeros((4, 4), np.float32)
    values[1, 2] = bad
    for raw in (values, encoded(Image.fromarray(values), "TIFF"), npy(values)):
        with pytest.raises(DecodeError, match="NaN or infinite"):
            decode(raw, range=range)


def test_floats_of_absurd_size_are_refused_or_clamped():
    values = np.array([[-1.7e308, 1.7e308]])
    with pytest.raises(DecodeError, match="data.range"):
        decode(values)
    assert decode(values, channels=1, range=(0, 1))[0, 0].tolist() == [0, 255]


@pytest.mark.parametrize("settings", [{"channels": 0}, {"range": (1, 1)}, {"range": (2, 1)}, {"range": (0, np.inf)}])
def test_senseless_settings_are_not_the_pictures_fault(settings):
    with pytest.raises(ValueError, match="data\\.") as caught:
        decode(noise(), **settings)
    assert not isinstance(caught.value, DecodeError)


# Arrays


def test_uint8_arrays_pass_as_they_are_and_are_copied():
    for values in (noise(), noise(shape=(24, 20, 1)), noise()[::-1, ::2], np.asfortranarray(noise())):
        pixels = decode(values, channels=values.shape[2])
        assert difference(pixels, values) == 0 and pixels.is_contiguous()
        pixels.zero_()
        assert values.any()


def test_boolean_arrays_are_0_and_255():
    assert decode(np.array([[True, False]]), channels=1).flatten().tolist() == [255, 0]


@pytest.mark.parametrize(
    "shape, channels, wanted",
    [
        ((6, 5), 3, (3, 6, 5)),
        ((6, 5, 1), 3, (3, 6, 5)),
        ((6, 5, 3), 1, (1, 6, 5)),
        ((3, 6, 5), 3, (3, 6, 5)),
        ((1, 6, 5), 3, (3, 6, 5)),
        ((3, 5, 3), 3, (3, 3, 5)),  # both readings are possible: channels last
        ((6, 5, 7), 7, (7, 6, 5)),
        ((7, 6, 5), 7, (7, 6, 5)),
        ((6, 5, 4), 4, (4, 6, 5)),
        ((6, 5, 2), 2, (2, 6, 5)),
    ],
)
def test_array_shapes_have_one_reading(shape, channels, wanted):
    assert decode(noise(shape=shape), channels).shape == wanted
    assert decode(npy(noise(shape=shape)), channels).shape == wanted


def test_channels_first_and_channels_last_are_the_same_picture():
    assert torch.equal(decode(noise()), decode(np.moveaxis(noise(), -1, 0)))


@pytest.mark.parametrize(
    "shape, channels, text",
    [
        ((6, 5, 7), 3, "7.*3"),
        ((6, 5, 4), 3, "4 channels.* 3"),
        ((6, 5, 3), 4, "3 channels.* 4"),
        ((6, 5), 4, "1 channels.* 4"),
        ((6, 5, 3), 7, "3 channels.* 7"),
        ((6,), 3, "shape"),
        ((2, 6, 5, 3), 3, "shape"),
        ((0, 5, 3), 3, "no pixels"),
        ((), 3, "no pixels"),
    ],
)
def test_arrays_of_other_channels_are_refused_with_both_numbers(shape, channels, text):
    with pytest.raises(DecodeError, match=text):
        decode(noise(shape=shape), channels)


@pytest.mark.parametrize("values", [np.zeros((2, 2), complex), np.array([["a"]]), np.array([[None]])])
def test_arrays_of_no_numbers_are_refused(values):
    with pytest.raises(DecodeError, match="expected booleans"):
        decode(values)


class Trap:
    def __reduce__(self):
        return (Path("/tmp/mpp-decode-ran-a-pickle").touch, ())


def test_a_pickled_array_is_refused_unread():
    values = np.array([[Trap()]], dtype=object)
    assert b"mpp-decode-ran-a-pickle" in pickle.dumps(values)
    with pytest.raises(DecodeError, match="object"):
        decode(npy(values, allow_pickle=True))
    assert not Path("/tmp/mpp-decode-ran-a-pickle").exists()


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000, 1000000000)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (40000, 40000)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 4)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (0, 4)}",
        "{'descr': '|S0', 'fortran_order': False, 'shape': (9, 9)}",
        "{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': (1, 1)}",
        "{'descr': '|u1', 'shape': (2, 2)}",
        "__import__('os').system('true')",
        "(" * 5000,
    ],
)
def test_a_lying_npy_header_is_refused(header):
    for version in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        length = struct.pack("<H" if version == b"\x01\x00" else "<I", len(header))
        with pytest.raises(DecodeError):
            decode(b"\x93NUMPY" + version + length + header.encode() + b"\0" * 64)


def test_an_npy_file_that_is_cut_off_says_so():
    with pytest.raises(DecodeError, match=r"promises \(24, 20, 3\) uint8, but only 1439 bytes follow"):
        decode(npy(noise())[:-1])
