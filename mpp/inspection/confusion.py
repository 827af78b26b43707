"""The confusion matrix as a picture: which class was taken for which, as shares of the true class's images."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED = 40  # more classes than this are joined in blocks: their names could not be read
WRITTEN = 16  # up to here each cell can hold its numbers


def figure(confusion: np.ndarray, classes: Sequence[str], title: str = "") -> "Figure":
    """confusion: int (C, C), rows the true classes, columns the predicted ones; classes: C names.

    A cell's colour is its share of the row: of the true class's images. Cividis can be read without red and green
    receptors and in grey; its scale is the square root, so that a few percent still differ from none.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    assert confusion.shape == (len(classes), len(classes)), f"{confusion.shape} for {len(classes)} classes"
    shown, names = (confusion, list(classes)) if len(classes) <= NAMED else blocks(confusion, NAMED)
    shares = row_shares(shown)
    side = 3.6 + (0.42 if len(names) <= WRITTEN else 0.2) * len(names)
    made = Figure(figsize=(side + 1.2, side + 0.6), layout="constrained")
    FigureCanvasAgg(made)
    axes = made.subplots()
    axes.set_facecolor("lightgrey")  # seen where a row has no images
    image = axes.imshow(shares, cmap="cividis", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    _label(axes, shown, names)
    if len(names) <= WRITTEN:
        _write(axes, shown, shares)
    bar = made.colorbar(image, ax=axes, shrink=0.7, ticks=[0, 0.01, 0.05, 0.1, 0.25, 0.5, 1])
    bar.ax.set_yticklabels(["0", "1", "5", "10", "25", "50", "100"], fontsize=7)
    bar.set_label("% of the row's images (square-root scale)", fontsize=7)
    _outline_diagonal(axes, len(names))
    made.suptitle(textwrap.fill(title, max(24, int(12 * (side + 1.2)))), fontsize=9)  # about 12 letters an inch
    made.supxlabel(caption(confusion, classes), fontsize=7)
    return made


def draw(confusion: np.ndarray, classes: Sequence[str], path: Path, title: str = "") -> None:
    """Writes `figure` as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure(confusion, classes, title).savefig(path, dpi=110)


def caption(confusion: np.ndarray, classes: Sequence[str], most: int = 3) -> str:
    """How the picture was computed, and the confusions that happen most."""
    images, right = int(confusion.sum()), int(np.trace(confusion))
    text = (
        f"{right:,} of {images:,} images right ({100 * right / max(images, 1):.1f} %). "
        "Each row is divided by its number of images, n.\n"
    )
    if len(classes) > NAMED:
        text += f"{len(classes):,} classes in blocks of neighbours: the diagonal holds mistakes inside a block too.\n"
    if empty := int((confusion.sum(1) == 0).sum()):
        text += f"{empty:,} classes have no image (grey where a row has none).\n"
    wrong = confusion - np.diag(np.diag(confusion))
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    pairs = [(*divmod(int(i), len(classes)), int(wrong.flat[i])) for i in order if wrong.flat[i]]
    named = [f"{_short(classes[true])} taken for {_short(classes[other])} {n:,} times" for true, other, n in pairs]
    return text + ("Most often: " + "; ".join(named) if named else "No mistakes.")


def row_shares(confusion: np.ndarray) -> np.ndarray:
    """float64 (C, C), each row over its sum; NaN in a row without images."""
    with np.errstate(invalid="ignore"):
        return confusion / confusion.sum(1, keepdims=True)


def blocks(confusion: np.ndarray, most: int) -> tuple[np.ndarray, list[str]]:
    """Neighbouring classes joined, at most `most` blocks as equal as possible: summed counts and names '0-24'."""
    edges = np.linspace(0, len(confusion), most + 1).round().astype(int)
    joined = np.add.reduceat(np.add.reduceat(confusion, edges[:-1], axis=0), edges[:-1], axis=1)
    return joined, [
        f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]


def _label(axes: "Axes", confusion: np.ndarray, names: Sequence[str]) -> None:
    counts = confusion.sum(1).tolist()
    rows = [f"{_short(name)}  n={count:,}" for name, count in zip(names, counts, strict=True)]
    axes.set_yticks(range(len(names)), rows, fontsize=7)
    axes.set_xticks(range(len(names)), [_short(name) for name in names], fontsize=7, rotation=90)
    axes.set_ylabel("true class", fontsize=8)
    axes.set_xlabel("predicted class", fontsize=8)


def _write(axes: "Axes", confusion: np.ndarray, shares: np.ndarray) -> None:
    """Percent and count in each cell that is not empty; dark on light and light on dark."""
    for row, column in np.argwhere(confusion > 0):
        share = float(shares[row, column])
        axes.text(
            column, row, f"{100 * share:.0f}%\n{confusion[row, column]:,}", ha="center", va="center", fontsize=6,
            color="black" if share > 0.25 else "white",
        )  # fmt: skip


def _outline_diagonal(axes: "Axes", count: int) -> None:
    """A frame around each cell of right answers."""
    from matplotlib.patches import Rectangle

    for place in range(count):
        axes.add_patch(Rectangle((place - 0.5, place - 0.5), 1, 1, fill=False, edgecolor="#D55E00", linewidth=1.2))


def _short(name: str, most: int = 24) -> str:
    # A dollar sign would start a formula.
    return (name if len(name) <= most else name[: most - 1] + "…").replace("$", r"\$")
