"""ImageNet-ReaL: validation accuracy against reassessed labels, any number of which are right for an image.

Source: Beyer et al., Are we done with ImageNet? (arXiv 2006.07159); METHOD.md 4. The user brings `real.json`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mpp.data.dataset import listed

IMAGES, CLASSES = 50_000, 1_000
NAME = re.compile(r"ILSVRC2012_val_(\d{8})(?!\d)")
SYNSET = re.compile(r"n\d{8}")

Labels = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RealScore:
    """right of counted images; dropped: no label fits them; missing: not among the files (0 unless allowed)."""

    right: int
    counted: int
    dropped: int
    missing: int

    @property
    def value(self) -> float:
        return self.right / self.counted

    def __str__(self) -> str:
        rest = f", {self.missing:,} missing" if self.missing else ""
        return (
            f"ImageNet-ReaL top-1 {100 * self.value:.2f} % = {self.right:,} of {self.counted:,} images "
            f"({self.dropped:,} without any label dropped{rest})"
        )

    def row(self, dataset: str, setting: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The result row, without what only the job knows."""
        return {
            "evaluation": "imagenet_real",
            "dataset": dataset,
            "setting": {**setting, "dropped": self.dropped, "missing": self.missing},
            "metric": "real_top1",
            "value": self.value,
            "spread": None,
            "seeds": 1,
            "images": self.counted,
            "seconds": round(seconds, 3),
        }


def read_real(path: Path) -> Labels:
    """The label lists of `real.json`, entry i - 1 for ILSVRC2012_val_0000000i. ValueError: it is something else."""
    try:
        lists = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected ImageNet-ReaL's real.json, which cannot be read: {error}") from None
    if not isinstance(lists, list) or len(lists) != IMAGES:
        came = f"{len(lists):,} entries" if isinstance(lists, (list, dict)) else type(lists).__name__
        raise ValueError(
            f"{path}: expected one list of labels for each of the {IMAGES:,} validation images, got {came}"
        )
    for number, labels in enumerate(lists, 1):
        if not isinstance(labels, list) or not all(type(one) is int and 0 <= one < CLASSES for one in labels):
            raise ValueError(
                f"{path}: entry {number:,}: expected a list of whole numbers 0..{CLASSES - 1}, got {labels!r:.80}"
            )
    return tuple(map(tuple, lists))


def real_score(predictions: Tensor, names: Sequence[str], labels: Labels, allow_missing: bool = False) -> RealScore:
    """Accuracy of the predicted classes, int64 (N,) in the usual order, of the validation files called `names`.

    Files are matched by the number in their names, wherever they lie and in whatever order. allow_missing: score the
    files that are there (unreadable ones are left out of evaluations), and say how many are not. ValueError: a name
    without a number, one number twice, missing files, or a prediction that is none of the 1,000 classes.
    """
    assert len(predictions) == len(names), f"{len(predictions)} predictions for {len(names)} files"
    if len(predictions) and not (int(predictions.min()) >= 0 and int(predictions.max()) < CLASSES):
        raise ValueError(
            f"ImageNet-ReaL: expected predictions 0..{CLASSES - 1}, "
            f"got {int(predictions.min())}..{int(predictions.max())}"
        )
    predicted = dict(zip(numbered(names), predictions.tolist(), strict=True))
    absent = [number for number in range(1, len(labels) + 1) if labels[number - 1] and number not in predicted]
    if absent and not allow_missing:
        files = listed(f"ILSVRC2012_val_{number:08d}" for number in absent)
        raise ValueError(
            f"ImageNet-ReaL: {len(absent):,} of the validation images that have labels are missing, {files}; "
            f"the score is over all of them"
        )
    counted = [number for number in predicted if labels[number - 1]]
    if not counted:
        raise ValueError("ImageNet-ReaL: none of the given files has a label")
    right = sum(predicted[number] in labels[number - 1] for number in counted)
    return RealScore(right, len(counted), sum(not one for one in labels), len(absent))


def check_imagenet_classes(classes: Sequence[str]) -> None:
    """ValueError unless these can be ImageNet-1k's 1,000 classes in their usual order, which ReaL's numbers follow.

    Seen by the synset names (n01440764), where the classes are called so; other names are taken as they come.
    """
    if len(classes) != CLASSES:
        raise ValueError(f"ImageNet-ReaL: expected a model of {CLASSES:,} classes, got {len(classes):,}")
    synsets = [SYNSET.match(name) for name in classes]
    if all(synsets) and list(classes) != sorted(classes):
        first = next(i for i, (one, other) in enumerate(zip(classes, sorted(classes), strict=True)) if one != other)
        raise ValueError(
            f"ImageNet-ReaL: expected the classes in the order of their synset names, "
            f"number {first} is {classes[first]!r} instead of {sorted(classes)[first]!r}"
        )


def numbered(names: Sequence[str]) -> list[int]:
    """The number of each validation file, 1..50,000. ValueError names those that have none, or one twice."""
    found = [NAME.findall(name.rsplit("/", 1)[-1]) for name in names]
    strange = [
        name for name, hits in zip(names, found, strict=True) if len(hits) != 1 or not 1 <= int(hits[0]) <= IMAGES
    ]
    if strange:
        raise ValueError(
            f"ImageNet-ReaL: expected files called ILSVRC2012_val_00000001 to ILSVRC2012_val_{IMAGES:08d}, "
            f"{len(strange):,} of {len(names):,} are not: {listed(strange)}"
        )
    seen: dict[int, str] = {}
    for name, (number,) in zip(names, found, strict=True):
        if int(number) in seen:
            raise ValueError(f"ImageNet-ReaL: one image comes twice: {seen[int(number)]!r} and {name!r}")
        seen[int(number)] = name
    return list(seen)
