"""Any image classification dataset of torchvision, by the name of its class."""

import inspect
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from mpp.data.dataset import SourceFields, Split, digest, shown
from mpp.data.folders import read_file

# What constructors call the two parts, tried in this order.
SPLITS = {"train": ("train", "trainval", "train-standard"), "test": ("test", "val", "valid")}
OWN_FIELDS = ("root", "train", "download", "loader", "transform", "target_transform", "transforms")
REFUSED = ("LSUN", "LSUNClass")  # unpickle a cache file and hold a database open, which workers would share
PROBES = 10  # images tried until one can be read, to see what the items are


@dataclass(frozen=True, kw_only=True)
class Torchvision(SourceFields):
    """A dataset of torchvision whose items are (image, class number)."""

    kind: Literal["torchvision"] = "torchvision"
    """a dataset of torchvision, by the name of its class"""

    name: str
    """such as CIFAR10, Flowers102, FakeData"""

    root: Path = Path("data")
    """the folder torchvision keeps its files in, relative to the working directory"""

    download: bool = False
    """fetch the files that root lacks"""

    arguments: dict[str, Any] = field(default_factory=dict)
    """further arguments of the constructor; `split` here names the training split: {split: unlabeled}"""

    def faults(self) -> Iterator[tuple[str, str]]:
        yield from super().faults()
        for name in sorted(set(OWN_FIELDS) & set(self.arguments)):
            yield f"arguments.{name}", "expected only what the other fields do not set; leave it out"

    def open(self, split: Split) -> "Items | None":
        """ValueError: unknown name, missing files, or items that are not (image, class number)."""
        try:
            items = self._made(split)
            if items is None:
                return None
            names = class_names(items)
            if names is None and split == "test":
                names = Items(self.name, "train", self._made("train")).classes
            return Items(self.name, split, items, names)
        except ValueError as error:
            raise ValueError(f"torchvision {self.name}: {error}") from error

    def _made(self, split: Split) -> Any:
        """The dataset object; None if the class has no such split."""
        kind = dataset_class(self.name)
        takes = parameters(kind)
        if self.download and "download" not in takes:
            raise ValueError("download is true, but torchvision cannot fetch this one; put its files into root")
        own = {"root": str(self.root.expanduser()), "download": self.download, "loader": read_file}
        own = {name: value for name, value in own.items() if name in takes}
        for choice in self._choices(split, takes):
            try:
                return kind(**{**self.arguments, **own, **choice})
            except Exception as error:
                if "for argument split" not in str(error):
                    again = "; try download: true" if own.get("download") is False else ""
                    raise ValueError(f"{type(error).__name__}: {error}{again}") from error
        if split == "train":
            raise ValueError("none of its splits is a training split; set arguments: {split: ...}")
        return None

    def _choices(self, split: Split, takes: set[str]) -> list[dict[str, Any]]:
        """Arguments that may choose the split, the likeliest first."""
        if "train" in takes:
            return [{"train": split == "train"}]
        if "split" not in takes:
            return [{}] if split == "train" else []
        if split == "train" and "split" in self.arguments:
            return [{}]
        return [{"split": name} for name in SPLITS[split] if name != self.arguments.get("split")]


class Items:
    """One split: encoded bytes where torchvision reads files, PIL images where it keeps pixels."""

    def __init__(self, name: str, split: Split, items: Any, classes: tuple[str, ...] | None = None):
        if not len(items):
            raise ValueError(f"no images in {split}, expected at least one")
        self._name, self._split, self._items, self._classes = name, split, items, classes
        self._probe()

    @property
    def classes(self) -> tuple[str, ...]:
        return self._classes or tuple(map(str, range(int(self.labels().max()) + 1)))

    @property
    def description(self) -> str:
        return f"torchvision {self._name} {self._split}: {len(self):,} images, {len(self.classes)} classes"

    def __len__(self) -> int:
        return len(self._items)

    def read(self, ids: Sequence[int]) -> list[bytes | Image.Image | Exception]:
        return [self._read(int(id)) for id in ids]

    def _read(self, id: int) -> bytes | Image.Image | Exception:
        try:
            return self._items[id][0]
        except Exception as error:  # whatever their code or a broken file raises concerns this image alone
            return error

    def labels(self) -> np.ndarray:
        return self._labels

    @cached_property
    def _labels(self) -> np.ndarray:
        labels = next(filter(self._fits, kept_labels(self._items)), None)
        if labels is None:
            blind = copy(self._items)
            if hasattr(blind, "loader"):
                blind.loader = str  # labels need no file
            labels = [blind[id][1] for id in range(len(blind))]
        labels = np.asarray(labels).astype(np.int64)
        if self._classes and labels.max() >= len(self._classes):
            raise ValueError(
                f"torchvision {self._name}: expected labels below {len(self._classes)}, the number of "
                f"class names, got {labels.max()}"
            )
        return labels

    def _fits(self, labels: np.ndarray) -> bool:
        id, label = self._probed
        return labels.shape == (len(self),) and labels.dtype.kind in "iu" and int(labels[id]) == label

    def _probe(self) -> None:
        """Remember one readable item's (id, label); ValueError if the items are of another sort."""
        failed: Exception | None = None
        for id in range(min(PROBES, len(self))):
            try:
                item = self._items[id]
            except Exception as error:
                failed = failed or error
                continue
            self._probed = id, _label(item)
            return
        raise ValueError(f"none of the first {PROBES} images can be read: {failed}")

    def name(self, id: int) -> str:
        path = next((paths[id] for paths in kept_paths(self._items)), None)
        where = f" ({shown(os.path.relpath(path, self._items.root))})" if path else ""
        return f"{self._name} {self._split}[{id}]{where}"

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        # Sixteen images stand for all: many of these classes keep pixels, whose sizes are all the same.
        ids = np.unique(np.linspace(0, len(self) - 1, 16).astype(int)).tolist()
        return digest([str(len(self)).encode(), self.labels().tobytes(), *map(_content, self.read(ids))])


def dataset_class(name: str) -> Callable[..., Any]:
    """The class of that name; ValueError names the nearest."""
    from torchvision import datasets

    known = {n: getattr(datasets, n) for n in datasets.__all__ if n not in REFUSED}
    known = {n.lower(): kind for n, kind in known.items() if inspect.isclass(kind) and n != "VisionDataset"}
    kind = known.get(name.lower())
    if kind is None or kind.__name__ != name:
        near = [known[n].__name__ for n in get_close_matches(name.lower(), known, n=3, cutoff=0.5)]
        raise ValueError(f"expected the name of a dataset class; nearest: {', '.join(near) or 'none'}")
    return kind


def parameters(kind: Any) -> set[str]:
    """Names a constructor takes, those it hands on to its base classes included."""
    names: set[str] = set()
    for base in inspect.getmro(kind):
        own = inspect.signature(base.__init__).parameters
        names |= set(own)
        if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in own.values()):
            break
    return names


def class_names(items: Any) -> tuple[str, ...] | None:
    """As the dataset object gives them; some give tuples of synonyms."""
    if isinstance(names := getattr(items, "classes", None), list | tuple) and names:
        return tuple(name if isinstance(name, str) else ", ".join(map(str, name)) for name in names)
    count = getattr(items, "num_classes", None)
    return tuple(map(str, range(count))) if isinstance(count, int) else None


def kept_labels(items: Any) -> Iterator[np.ndarray]:
    """What may be the labels of all images, under the attributes torchvision keeps them in."""
    for name in ("targets", "_labels", "labels"):
        if getattr(items, name, None) is not None:
            yield np.asarray(getattr(items, name))
    for name in ("samples", "_samples"):
        if pairs := getattr(items, name, None):
            yield np.asarray([pair[1] for pair in pairs])


def kept_paths(items: Any) -> Iterator[list[str]]:
    """The files of all images, where the dataset object keeps them."""
    for name in ("samples", "_samples"):
        if pairs := getattr(items, name, None):
            yield [pair[0] for pair in pairs]
    if paths := getattr(items, "_image_files", None):
        yield paths


def _label(item: Any) -> int:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], bytes | Image.Image):
        try:
            return operator.index(item[1])
        except TypeError:
            pass
    came = ", ".join(type(part).__name__ for part in item) if isinstance(item, tuple) else type(item).__name__
    raise ValueError(f"expected items (image, class number), got ({came}); only classification datasets fit")


def _content(image: bytes | Image.Image | Exception) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, Exception):
        return type(image).__name__.encode()
    return f"{image.mode} {image.size}".encode() + image.tobytes()
