"""Every kind of picture file decodes by the rules of `mpp/data/decode.py`."""

import csv
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, features

from mpp.data import readers
from mpp.data.decode import DecodeError, decode

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
ODD = SHARED / "odd_images"
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


def mean(pixels: torch.Tensor) -> np.ndarray:
    return pixels.double().mean((1, 2)).numpy()


def difference(pixels: torch.Tensor, image: Image.Image | np.ndarray) -> int:
    wanted = np.asarray(image).astype(int)
    wanted = wanted[None] if wanted.ndim == 2 else wanted.transpose(2, 0, 1)
    assert pixels.shape == wanted.shape
    return int(np.abs(pixels.numpy().astype(int) - wanted).max())


def looks_like(pixels: torch.Tensor, image: Image.Image) -> bool:
    """Equal in the middle of every block: at the edges lossy formats bleed."""
    assert pixels.shape == (3, image.height, image.width)
    return difference(pixels[:, 8::16, 8::16], np.asarray(image)[8::16, 8::16]) < 16


# The shared collection of odd pictures


def odd_rows() -> list[dict[str, str]]:
    if not (ODD / "index.tsv").exists():
        return []
    with open(ODD / "index.tsv", encoding="utf8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.fixture(scope="module")
def odd() -> dict[str, bytes]:
    if not (ODD / "odd_images.tar").exists():
        pytest.skip(f"{ODD} is not here")
    with tarfile.open(ODD / "odd_images.tar") as tar:  # read in place: nothing is unpacked, whatever the names are
        members = [member for member in tar if member.isfile()]
        return {member.name.removeprefix("files/"): tar.extractfile(member).read() for member in members}  # type: ignore


@pytest.mark.parametrize("row", odd_rows(), ids=lambda row: row["file"].encode("unicode_escape").decode())
def test_every_odd_picture_is_decoded_or_refused_as_its_index_says(odd, row):
    data = odd[row["file"].replace("\\t", "\t").replace("\\n", "\n")]
    try:
        pixels = decode(data, max_pixels=20_000_000)
    except DecodeError as error:
        assert row["expected"] in ("skip", "either")
        assert str(error) and "\n" not in str(error)
        return
    assert row["expected"] in ("decode", "either")
    assert pixels.shape[0] == 3 and pixels.is_contiguous() and pixels.dtype == torch.uint8
    assert f"{pixels.shape[2]}x{pixels.shape[1]}" == row["oriented_wxh"]
    reference = row["ref_mean_alt"] or row["ref_mean_rgb"]
    np.testing.assert_allclose(mean(pixels), [float(v) for v in reference.split(",")], atol=0.1)
    if row["ref_quadrants_rgb_TL_TR_BL_BR"] and not row["ref_mean_alt"]:
        quarters = [half.chunk(2, 2) for half in pixels.chunk(2, 1)]
        wanted = [[float(v) for v in q.split(",")] for q in row["ref_quadrants_rgb_TL_TR_BL_BR"].split(";")]
        np.testing.assert_allclose([mean(q) for half in quarters for q in half], wanted, atol=1.5)


def test_a_shared_cmyk_picture_looks_like_its_rgb_twin(odd):
    twin = mean(decode(odd["jpeg_rgb_twin.jpg"]))
    for name in ("jpeg_cmyk_adobe.jpg", "tiff_cmyk_jpeg.tif"):
        np.testing.assert_allclose(mean(decode(odd[name])), twin, atol=6)


def test_shared_16_bit_pictures_follow_the_range(odd):
    narrow = decode(odd["tiff_gray16_narrow.tif"], range=(291, 694))
    assert narrow.min() == 0 and narrow.max() == 255 and abs(narrow.double().mean() - 58.9) < 0.1
    with pytest.raises(DecodeError, match="data.range needs the stored values of this TIFF"):
        decode(odd["tiff_rgb16.tiff"], range=(0, 1000))


def test_the_fast_path_equals_pillow_on_photographs():
    import pyarrow.parquet as table

    files = sorted((SHARED / "photos_fullres100").glob("*.parquet"))
    if not files:
        pytest.skip(f"{SHARED}/photos_fullres100 is not here")
    for row in table.read_table(files[0]).slice(0, 10)["image"].to_pylist():
        with Image.open(io.BytesIO(row["bytes"])) as image:
            assert difference(decode(row["bytes"]), image.convert("RGB")) == 0


# JPEG


@pytest.mark.parametrize(
    "options",
    [{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_blocks": 1}, {"keep_rgb": True}],
)
def test_the_fast_path_equals_pillow(monkeypatch, options):
    data = encoded(Image.fromarray(noise()), "JPEG", **options)
    fast = decode(data)
    monkeypatch.setattr(readers, "torchvision_reader", lambda name: None)
    assert torch.equal(fast, decode(data))
    assert difference(fast, Image.open(io.BytesIO(data))) == 0


def test_a_plain_jpeg_never_meets_pillow(monkeypatch):
    monkeypatch.setattr(readers.Image, "open", lambda *_, **__: pytest.fail("Pillow was asked"))
    decode(encoded(corners(), "JPEG"))
    decode(encoded(corners().convert("L"), "JPEG"))


def test_without_torchvision_pillow_reads_jpeg_the_same_way(monkeypatch):
    data = encoded(corners(), "JPEG", exif=exif_orientation(3, b"\x06\0\0\0"))
    with_it = decode(data)
    monkeypatch.setattr(readers, "torchvision_reader", lambda name: None)
    assert with_it.shape == (3, 48, 32) and torch.equal(with_it, decode(data))


# Orientation

STORED = {  # how a picture is stored that a viewer has to turn by the EXIF orientation
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("size", [(48, 32), (32, 48)], ids=["landscape", "portrait"])
@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("format", FORMATS)
def test_a_picture_comes_out_upright_however_it_was_held(format, orientation, size):
    upright = corners(*size)
    turn = STORED[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = upright if turn is None else upright.transpose(turn)
    quality = {} if format in ("PNG", "TIFF") else {"quality": 95}
    assert looks_like(decode(encoded(stored, format, exif=exif, **quality)), upright)


def exif_orientation(type: int, value: bytes) -> bytes:
    """EXIF that holds nothing but an orientation: `type` 3 is a 16-bit number, the right one, and 2 is text."""
    return b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01" + struct.pack("<HI", type, 1 + (type == 2)) + value + bytes(4)


@pytest.mark.parametrize("type, value", [(3, b"\0\0\0\0"), (3, b"\x09\0\0\0"), (3, b"\xff\xff\0\0"), (2, b"6\0\0\0")])
def test_an_impossible_orientation_leaves_the_picture_as_it_is(type, value):
    for format in ("JPEG", "PNG", "WEBP"):
        assert decode(encoded(corners(), format, exif=exif_orientation(type, value))).shape == (3, 32, 48)
        assert decode(encoded(corners(), format, exif=exif_orientation(3, b"\x06\0\0\0"))).shape == (
            3,
            48,
            32,
        )


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0", b"Exif\0\0rubbish", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*" * 9]
)
@pytest.mark.parametrize("format", ["JPEG", "WEBP"])
def test_damaged_exif_leaves_the_picture_as_it_is(format, exif):
    assert decode(encoded(corners(), format, exif=exif)).shape == (3, 32, 48)


def test_orientation_that_only_xmp_tells_is_applied():
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    stored = corners().transpose(Image.Transpose.ROTATE_90)
    assert looks_like(decode(encoded(stored, "JPEG", xmp=xmp, quality=95)), corners())


def test_orientation_of_an_open_pil_image_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 8
    data = encoded(corners().transpose(Image.Transpose.ROTATE_270), "PNG", exif=exif)
    assert difference(decode(Image.open(io.BytesIO(data))), corners()) == 0


# Colours and alpha


@pytest.mark.parametrize("format", ["JPEG", "TIFF"])
def test_cmyk_becomes_rgb_and_not_its_negative(format):
    data = encoded(corners().convert("CMYK"), format, **({"quality": 95} if format == "JPEG" else {}))
    assert np.abs(mean(decode(data)) - mean(decode(corners()))).max() < 2
    assert decode(data, channels=4)[3].eq(255).all()


def test_palettes_are_expanded():
    image = corners().quantize(4)
    for format in ("PNG", "GIF", "TIFF", "BMP"):
        assert difference(decode(encoded(image, format)), image.convert("RGB")) == 0


def test_black_and_white_is_0_and_255():
    image = Image.fromarray(noise(shape=(9, 7)) > 127)
    for format in ("PNG", "TIFF", "BMP", "PPM"):
        pixels = decode(encoded(image, format), channels=1)
        assert difference(pixels, np.asarray(image).astype(np.uint8) * 255) == 0


def test_alpha_is_composited_over_white_for_1_and_3_and_kept_for_4():
    rgba = noise(shape=(24, 20, 4))
    colour, alpha = rgba[..., :3].astype(float), rgba[..., 3:] / 255
    wanted = colour * alpha + 255 * (1 - alpha)
    for raw in (Image.fromarray(rgba), encoded(Image.fromarray(rgba), "PNG")):
        assert np.abs(decode(raw).numpy().transpose(1, 2, 0) - wanted).max() <= 0.5001
        assert difference(decode(raw, channels=4), rgba) == 0
        gray = decode(raw, channels=1)[0].numpy()
        assert np.abs(gray - wanted @ [0.299, 0.587, 0.114]).max() <= 1.01


@pytest.mark.parametrize("way", [["LA"], ["LA", "La"], ["RGBa"], ["PA"]], ids=lambda way: way[-1])
def test_every_mode_with_alpha_goes_over_white(way):
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    for mode in way:
        image = image.convert(mode) if mode != "PA" else Image.new("PA", (4, 4), (0, 128))
    assert decode(image).unique().tolist() == [127]


def test_a_transparent_colour_becomes_white():
    palette = encoded(corners().quantize(4), "PNG", transparency=corners().quantize(4).getpixel((0, 0)))
    rgb = encoded(corners(), "PNG", transparency=(200, 40, 40))
    gif = encoded(corners().quantize(4), "GIF", transparency=corners().quantize(4).getpixel((0, 0)))
    for data in (palette, rgb, gif):
        pixels = decode(data)
        assert pixels[:, :16, :16].eq(255).all() and pixels[:, 20, 20].tolist() == [220, 220, 60]


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16"])
def test_every_pillow_mode_gives_the_channels_asked_for(mode, channels):
    image = Image.new(mode, (5, 3))
    pixels = decode(image, channels)
    assert pixels.shape == (channels, 3, 5) and pixels.dtype == torch.uint8 and pixels.is_contiguous()


def test_gray_is_luma_and_the_same_for_every_source():
    rgb = noise()
    wanted = np.asarray(Image.fromarray(rgb).convert("L"))
    for raw in (rgb, Image.fromarray(rgb), encoded(Image.fromarray(rgb), "PNG")):
        assert difference(decode(raw, channels=1), wanted) == 0
    gray = noise(shape=(6, 5))
    assert difference(decode(encoded(Image.fromarray(gray), "PNG"), channels=1), gray) == 0


@pytest.mark.parametrize("channels", [2, 5])
def test_a_picture_has_no_other_number_of_channels(channels):
    with pytest.raises(DecodeError, match=f"3 channels.* {channels}"):
        decode(encoded(corners(), "PNG"), channels)


# Several pictures in one file


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF", "MPO"])
def test_the_first_of_several_pictures_is_taken(format):
    second = Image.new("RGB", (48, 32), "black")
    data = encoded(corners(), format, save_all=True, append_images=[second] * 3)
    assert np.abs(mean(decode(data)) - mean(decode(corners()))).max() < 4
