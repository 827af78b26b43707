"""What evaluations refuse: labels and features that no score could be made of, and lists that name a value twice."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mpp.evaluation.features import Split


def check_labels(split: "Split") -> None:
    """ValueError unless there are two classes or more, each with train images, numbered by the labels."""
    classes, where = split.classes, f"evaluation on {split.name}"
    if len(classes) < 2:
        raise ValueError(f"{where}: expected 2 or more classes, got {len(classes)}; name labelled `data`")
    for part, labels in {"train": split.train_y, "test": split.test_y}.items():
        if len(labels) == 0:
            raise ValueError(f"{where}: the {part} split has no images")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= len(classes):
            raise ValueError(f"{where}: {part} labels must be 0..{len(classes) - 1}, got {low}..{high}")
    counts = torch.bincount(split.train_y, minlength=len(classes)).tolist()
    missing = [repr(name) for name, count in zip(classes, counts, strict=True) if count == 0]
    if missing:
        raise ValueError(f"{where}: {len(missing)} of {len(classes)} classes have no train image: {listed(missing)}")


def check_features(split: "Split") -> None:
    """ValueError where a feature is NaN or infinite: no neighbour and no fit means anything then."""
    for part, x in {"train": split.train_x, "test": split.test_x}.items():
        bad = sum(int((~rows.isfinite()).any(dim=1).sum()) for rows in x.split(8192))
        if bad:
            raise ValueError(
                f"evaluation on {split.name}: {bad} of {len(x)} {part} images have NaN or infinite features; "
                "the backbone has diverged, or overflows in this precision"
            )


def repeats(**fields: tuple[Any, ...] | str) -> Iterator[tuple[str, str]]:
    """Faults of a recipe section: (field, message) for every list that names a value twice."""
    for field, values in fields.items():
        listed = () if isinstance(values, str) else values  # a word, such as `all`, is no list
        twice = sorted({str(value) for value in listed if listed.count(value) > 1})
        if twice:
            yield field, f"names {', '.join(twice)} more than once"


def listed(names: list[str], most: int = 5) -> str:
    """The first few of many names, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
