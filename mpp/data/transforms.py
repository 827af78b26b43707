"""From a decoded picture to a view of the right size: augmented for training, one fixed view for everything else.

Chance comes in as numbers in [0, 1) made by a hash of (seed, epoch, sample id); nothing here draws. Libraries that do
draw (timm's RandAugment, random erasing, torchvision's colour jitter) draw from generators that such a number starts.
"""

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from PIL import Image, ImageOps
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


Strength = Annotated[float, Ge(0)]


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How a training view is made: crop, flips (METHOD.md 1: inception crop and random flip), then what is set below.

    The order is timm's: RandAugment, colour jitter, random erasing. Here both of the first two may be on.
    """

    crop: Crop = field(default_factory=RandomResizedCrop)
    horizontal_flip: bool = True
    """half of the views are mirrored left to right"""
    vertical_flip: bool = False
    """half of the views are mirrored upside down (microscopy, satellite)"""
    interpolation: Interpolation = "bicubic"
    """how pictures are resized, always antialiased; RandAugment rotates and shears with it too"""
    rand_augment: str | None = None
    """timm's RandAugment by its text: rand-m9-mstd0.5-inc1; RGB pictures only; what moves in is grey 128"""
    color_jitter: Strength | Annotated[tuple[Strength, ...], MinLen(3), MaxLen(4)] | None = None
    """strength of changes of brightness, contrast and saturation, or [brightness, contrast, saturation(, hue)]"""
    random_erasing: Annotated[float, Ge(0), Le(1)] = 0.0
    """share of the views in which a rectangle of 2 to 33 % becomes noise (timm's, mode pixel)"""

    def faults(self) -> Iterator[tuple[str, str]]:
        if self.rand_augment is not None:
            yield from (("rand_augment", message) for message in rand_augment_faults(self.rand_augment))
        if isinstance(self.color_jitter, tuple) and len(self.color_jitter) == 4 and self.color_jitter[3] > 0.5:
            yield "color_jitter", f"hue turns by at most 0.5 (half the circle), got {self.color_jitter[3]:g}"

    def check_channels(self, channels: int) -> None:
        """ValueError where an option has no meaning for pictures of so many channels."""
        for name, works, fits in (
            ("rand_augment", "RGB pictures (3 channels)", channels == 3),
            ("color_jitter", "pictures of 1 or 3 channels", channels in (1, 3)),
        ):
            if getattr(self, name) is not None and not fits:
                raise ValueError(
                    f"augment.{name} works on {works}, and data.channels is {channels}; "
                    f"try augment.{name}: null, or data.channels: 3"
                )

    def draws(self, seed: int, epochs: Tensor, ids: Tensor) -> list[list[float]]:
        """All the chance that the views of a batch need: float [0, 1), B times (num_draws + 2, + 3 with more than
        crop and flips).
        """
        place = torch.arange(self.crop.num_draws)
        crops = uniform(seed, Purpose.CROP, epochs[:, None], ids[:, None], place)
        flips = uniform(seed, Purpose.FLIP, epochs[:, None], ids[:, None], torch.arange(2))
        parts = [crops, flips]
        if any(self._operations()):
            parts.append(uniform(seed, Purpose.AUGMENT, epochs[:, None], ids[:, None], torch.arange(3)))
        return torch.cat(parts, 1).tolist()

    def __call__(self, image: Tensor, size: Size, draws: Sequence[float]) -> Tensor:
        """uint8 (C, h, w) of any size -> uint8 (C, H, W)."""
        count = self.crop.num_draws
        view = self.crop(image, size, draws[:count], self.interpolation)
        axes = [
            axis
            for axis, on, draw in ((2, self.horizontal_flip, draws[count]), (1, self.vertical_flip, draws[count + 1]))
            if on and draw < 0.5
        ]
        view = view.flip(axes) if axes else view
        for operation, draw in zip(self._operations(), draws[count + 2 :], strict=False):
            if operation is not None:
                with generators_from(draw):
                    view = operation(view)
        return view

    def _operations(self) -> tuple[Callable[[Tensor], Tensor] | None, ...]:
        """Each has its own place and its own draw: switching one on changes nothing in the others."""
        return (
            None if self.rand_augment is None else _rand_augment(self.rand_augment, self.interpolation),
            None if self.color_jitter is None else _color_jitter(self.color_jitter),
            _random_erasing(self.random_erasing) if self.random_erasing else None,
        )


RAND_AUGMENT = {  # the sections that timm's text may have; it skips or misreads anything else without a word
    "m": (r"\d+", "m and a whole number: magnitude"),
    "n": (r"[1-9]\d*", "n and a whole number: operations per picture"),
    "p": (r"0?\.\d+|[01](\.0*)?", "p and a number from 0 to 1: probability of each operation"),
    "mstd": (r"\d+(\.\d*)?|\.\d+", "mstd and a number: spread of the magnitude"),
    "mmax": (r"[1-9]\d*", "mmax and a whole number: largest magnitude"),
    "inc": (r"[01]", "inc and 0 or 1: severity grows with the magnitude"),
    "t": (r"weights|3aw?", "tweights, t3a or t3aw: another set of operations"),
}


def rand_augment_faults(text: str) -> Iterator[str]:
    """What is wrong with a RandAugment text, as timm would read it."""
    first, *parts = text.split("-")
    if first != "rand":
        yield f"expected 'rand' and sections after it, as in rand-m9-mstd0.5-inc1, got {text!r}"
        return
    values: dict[str, str] = {}
    for part in parts:
        name = next((name for name, (form, _) in RAND_AUGMENT.items() if re.fullmatch(f"{name}({form})", part)), None)
        if name is None:
            known = "; ".join(words for _, words in RAND_AUGMENT.values())
            yield f"cannot read {part!r} in {text!r}; sections are {known}"
        elif name in values:
            yield f"{text!r} gives {name!r} twice"
        else:
            values[name] = part.removeprefix(name)
    if int(values.get("m", 10)) > (most := int(values.get("mmax", 10))):
        yield f"{text!r} has a magnitude over the largest, {most}: timm would lower it; try mmax{values.get('m', 10)}"


@contextmanager
def generators_from(draw: float) -> Iterator[None]:
    """Inside, the global generators of Python, NumPy and torch (CPU) start from `draw` in [0, 1); after, all is as
    it was.

    Not `torch.manual_seed`: it would start the generators of every GPU as well, and nobody would set them back.
    """
    seed = int(draw * 2**53)
    words = [seed & 0xFFFFFFFF, seed >> 32]
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(words)
    torch.default_generator.manual_seed(words[0] ^ words[1])  # on the CPU torch looks at 32 bits alone
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


@lru_cache(maxsize=8)
def _rand_augment(text: str, interpolation: Interpolation) -> Callable[[Tensor], Tensor]:
    from timm.data.auto_augment import rand_augment_transform

    resampling = Image.Resampling.BICUBIC if interpolation == "bicubic" else Image.Resampling.BILINEAR
    change = rand_augment_transform(text, {"img_mean": (128, 128, 128), "interpolation": resampling})
    for one in change.ops:
        if one.name.startswith("Posterize"):
            one.aug_fn = _posterize

    def operation(view: Tensor) -> Tensor:
        assert view.shape[0] == 3, f"RandAugment on {view.shape[0]} channels: check_channels was not asked"
        changed = change(Image.fromarray(view.permute(1, 2, 0).contiguous().numpy()))
        return torch.from_numpy(np.array(changed)).permute(2, 0, 1).contiguous()

    return operation


def _posterize(picture: Image.Image, bits: int, **_: Any) -> Image.Image:
    """timm asks for 0 bits at its largest magnitudes: black in older Pillow, an error in Pillow 13."""
    return ImageOps.posterize(picture, bits) if bits else Image.new(picture.mode, picture.size)


@lru_cache(maxsize=8)
def _color_jitter(strength: float | tuple[float, ...]) -> Callable[[Tensor], Tensor]:
    from torchvision.transforms import ColorJitter

    return ColorJitter(*(strength if isinstance(strength, tuple) else (strength,) * 3))


@lru_cache(maxsize=8)
def _random_erasing(probability: float) -> Callable[[Tensor], Tensor]:
    """timm's, mode pixel: standard normal noise where a normalised picture would be.

    In values of 0..255 that is a mean of 127.5 and a std of 63.75 (pictures normalised by 0.5 and 0.25, which is
    within 15 % of ImageNet's statistics), cut off at black and white: 4.6 % of the values are.
    """
    from timm.data.random_erasing import RandomErasing

    erase = RandomErasing(1.0, mode="pixel", device="cpu")

    def operation(view: Tensor) -> Tensor:
        if random.random() >= probability:
            return view
        noise = cast(Any, erase)(torch.full(view.shape, math.nan))  # NaN marks what stays, to the last bit
        pixels = (127.5 + 63.75 * noise).round().clamp(0, 255).nan_to_num(0).to(torch.uint8)
        return torch.where(noise.isnan(), view, pixels)

    return operation


def fixed_view(image: Tensor, size: Size, interpolation: Interpolation = "bicubic", crop: float = 1.0) -> Tensor:
    """uint8 (C, h, w) -> uint8 (C, H, W): resized until it covers size / crop, then the centre."""
    height, width = image.shape[1:]
    if crop == 1 and (height, width) == size:
        return image
    # Crop first, in source pixels: an extreme picture (3000x2) must not be blown up whole.
    share = crop * min(height / size[0], width / size[1])
    h, w = (max(1, min(whole, round(side * share))) for whole, side in ((height, size[0]), (width, size[1])))
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
