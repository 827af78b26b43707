"""Classes of new images, as a CSV file that spreadsheets and pandas open."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mpp.data.sources import Folder, Subset
from mpp.durable import replace_file
from mpp.evaluation.scoring import Scored


def open_unlabelled(folder: Path, channels: int, range: tuple[float, float] | None) -> Subset:
    """All images of a folder. ValueError where there are none."""
    dataset = Folder(path=folder, channels=channels, range=range).open("train")
    assert dataset is not None
    return Subset(dataset, np.arange(len(dataset)))


def write_predictions(path: Path, subset: Subset, scored: Scored, classes: Sequence[str]) -> None:
    """One row for each picture of the folder, also for those that could not be read; whole or not at all."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows(subset, scored, classes))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, [text.getvalue().encode()])


def rows(subset: Subset, scored: Scored, classes: Sequence[str]) -> Iterator[list[str]]:
    """File, most probable class, its probability, then the next best ones; no class where a picture is unreadable."""
    others = [f"class_{place}" for place in range(2, scored.top.shape[1] + 1)]
    yield ["file", "class", "probability", *others]
    for id, good, top, chance in zip(
        subset.ids, scored.good.tolist(), scored.top.tolist(), scored.probability.tolist(), strict=True
    ):
        name = subset.dataset.name(int(id))
        best, *rest = (classes[int(number)] for number in top)
        cells = [best, f"{chance:.4f}", *rest] if good else [""] * (len(rest) + 2)
        yield [name, *cells]
