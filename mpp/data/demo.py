"""Data without a download: small labelled crops of nine photographs from scikit-image and scikit-learn.

The photographs, as the packages' own documentation credits them:

=====================  ============  ====================================================================
astronaut              scikit-image  Eileen Collins, NASA Great Images database; public domain
chelsea                scikit-image  Stefan van der Walt; CC0
coffee                 scikit-image  Rachel Michetti, courtesy of Pikolo Espresso Bar; CC0
rocket                 scikit-image  launch of DSCOVR on Falcon 9, SpaceX; released into the public domain
immunohistochemistry   scikit-image  Center for Microscopy And Molecular Imaging (CMMI); no known restrictions
hubble                 scikit-image  Hubble eXtreme Deep Field, NASA (HubbleSite); public domain
retina                 scikit-image  Mikael Häggström, 2014 (doi 10.15347/wjm/2014.008); CC0
china                  scikit-learn  danielbuechele on flickr (6061409035); CC BY 2.0
flower                 scikit-learn  vultilion on flickr (6056698931); CC BY 2.0
=====================  ============  ====================================================================
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Le
from PIL import Image

from mpp.data.dataset import SourceFields, Split, digest

PHOTOS = {
    "astronaut": "skimage/data/astronaut.png",
    "chelsea": "skimage/data/chelsea.png",
    "coffee": "skimage/data/coffee.png",
    "rocket": "skimage/data/rocket.jpg",
    "immunohistochemistry": "skimage/data/ihc.png",
    "hubble": "skimage/data/hubble_deep_field.jpg",
    "retina": "skimage/data/retina.jpg",
    "china": "sklearn/datasets/images/china.jpg",
    "flower": "sklearn/datasets/images/flower.jpg",
}
PROJECTS = {"skimage": "scikit-image", "sklearn": "scikit-learn"}
SMALLEST, LARGEST = 40, 110  # side of a window in pixels of the photograph
_DEMO = 0xDE30  # sets these draws apart from those of training
DIMMEST, BRIGHTEST = 600, 1200  # brightness in thousandths: whole numbers give the same pixels everywhere


@dataclass(frozen=True, kw_only=True)
class Demo(SourceFields):
    """Crops of nine photographs; the label is which one.

    Train comes from the left halves, test from the right ones. The order of the channels and the brightness
    differ from crop to crop, so that colour does not give the label away.
    """

    kind: Literal["demo"] = "demo"
    """crops of nine photographs that come with scikit-image and scikit-learn"""

    size: Annotated[int, Ge(8), Le(512)] = 32
    """side of a crop in pixels"""

    train_images: Annotated[int, Ge(9)] = 4000
    """number of training crops"""

    test_images: Annotated[int, Ge(9)] = 1000
    """number of test crops"""

    def open(self, split: Split) -> "Crops":
        """ValueError: scikit-image or scikit-learn is missing."""
        return _crops(split, self.train_images if split == "train" else self.test_images, self.size)


class Crops:
    """Crops in memory: pixels uint8 (N, size, size, 3), labels int64 (N,)."""

    classes = tuple(PHOTOS)

    def __init__(self, split: Split, pixels: np.ndarray, labels: np.ndarray):
        self._split, self._pixels, self._labels = split, pixels, labels

    @property
    def description(self) -> str:
        side = self._pixels.shape[1]
        return f"demo {self._split}: {len(self):,} crops of {side}x{side} px from {len(PHOTOS)} photographs"

    def __len__(self) -> int:
        return len(self._pixels)

    def read(self, ids: Sequence[int]) -> list[np.ndarray]:
        """uint8 (size, size, 3) each, RGB in some order."""
        return list(self._pixels[np.asarray(ids, dtype=np.int64)])

    def labels(self) -> np.ndarray:
        return self._labels

    def name(self, id: int) -> str:
        return f"demo {self._split}[{id}] ({self.classes[self._labels[id]]})"

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        # Over the pixels themselves: another Pillow may round otherwise, and then it is other data.
        return digest([self._pixels.tobytes(), self._labels.tobytes()])


class Plan(NamedTuple):
    """What every crop is made of: a function of (split, number of the crop) alone."""

    labels: np.ndarray  # (N,) which photograph
    boxes: np.ndarray  # (N, 4) left, top, right, bottom
    orders: np.ndarray  # (N, 3) a permutation of the channels
    brightness: np.ndarray  # (N,) thousandths


@lru_cache(maxsize=4)
def _crops(split: Split, count: int, size: int) -> Crops:
    photos = [_photo(name) for name in PHOTOS]
    plan = crop_plan(split, count, [photo.size for photo in photos])
    pixels = np.empty((count, size, size, 3), dtype=np.uint8)
    for pixel, label, box in zip(pixels, plan.labels, plan.boxes.tolist(), strict=True):
        # Cropped before it is resized: a resize with `box=` reads pixels beyond it, across the middle.
        pixel[:] = photos[label].crop(box).resize((size, size), Image.Resampling.BICUBIC)
    pixels = np.take_along_axis(pixels, plan.orders[:, None, None, :], axis=3)
    scaled = (pixels * plan.brightness.astype(np.uint32)[:, None, None, None] + 500) // 1000
    return Crops(split, np.minimum(scaled, 255).astype(np.uint8), plan.labels)


def crop_plan(split: Split, count: int, sizes: Sequence[tuple[int, int]]) -> Plan:
    """Balanced labels in shuffled order and one window each, inside the left (train) or right (test) half.

    sizes: (width, height) of the photographs. Each draw is a hash of (split, number of the crop, which draw).
    """
    import torch

    from mpp.chance import uniform

    def drawn(draw: int) -> np.ndarray:
        """float64 (N,) in [0, 1)"""
        return uniform(_DEMO, int(split == "test"), torch.arange(count), draw).numpy()

    labels = np.argsort(drawn(0), kind="stable") % len(sizes)
    widths, heights = np.asarray(sizes).T[:, labels]
    side = SMALLEST + (drawn(1) * (LARGEST - SMALLEST + 1)).astype(np.int64)
    start = (widths + 1) // 2 if split == "test" else 0
    left = start + (drawn(2) * (widths // 2 - side + 1)).astype(np.int64)
    top = (drawn(3) * (heights - side + 1)).astype(np.int64)
    boxes = np.stack([left, top, left + side, top + side], axis=1)
    orders = np.argsort(np.stack([drawn(4), drawn(5), drawn(6)], axis=1), axis=1)
    brightness = DIMMEST + (drawn(7) * (BRIGHTEST - DIMMEST + 1)).astype(np.int64)
    return Plan(labels, boxes, orders, brightness)


def _photo(name: str) -> Image.Image:
    """One photograph out of an installed package, which is not imported for it."""
    package, _, file = PHOTOS[name].partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the demo data needs the photograph {name!r}, which comes inside {PROJECTS[package]}, and that "
            f"is not installed; try: pip install -e '.[demo]'"
        )
    path = Path(spec.submodule_search_locations[0], file)
    if not path.is_file():
        raise ValueError(
            f"the demo data needs the photograph {name!r}, expected at {path}, but the installed "
            f"{PROJECTS[package]} does not carry it; try: pip install --upgrade -e '.[demo]'"
        )
    with Image.open(path) as photo:
        return photo.convert("RGB")
