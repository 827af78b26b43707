"""Classes of new images, as a CSV file that spreadsheets and pandas open."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpp.data.loader import Skipped
from mpp.data.sources import Folder, Subset
from mpp.durable import check_can_write, replace_file
from mpp.evaluation.scoring import Scored
from mpp.words import plural


def open_unlabelled(folder: Path, channels: int, range: tuple[float, float] | None) -> Subset:
    """All images of a folder. ValueError where there are none."""
    dataset = Folder(path=folder, channels=channels, range=range).open("train")
    assert dataset is not None
    return Subset(dataset)


def told_unreadable(skipped: Sequence[Skipped], most: int = 10) -> Iterator[str]:
    """The first of the pictures that could not be read, with reasons, as lines for a person."""
    if skipped:
        yield f"{plural(len(skipped), 'image')} could not be read (no class):"
    for one in sorted(skipped, key=lambda skip: skip.id)[:most]:
        yield f"  {one.name}: {one.reason}"
    if len(skipped) > most:
        yield f"  and {len(skipped) - most:,} more: the rows without a class"


def check_out(file: Path, option: str) -> None:
    """ValueError where the CSV file cannot be written; looks only."""
    if file.is_dir():
        raise ValueError(f"{option}: {file} is a folder; name a file, such as {file / 'predictions.csv'}")
    check_can_write(file.parent, option)


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
