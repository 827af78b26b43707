"""Accuracy against labels: what each way of using a few labelled images gives."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = tuple[str, int, float, float | None]  # method, labelled images, accuracy, standard deviation over seeds

# Okabe and Ito's colours, told apart without red and green receptors; markers and dashes say the same in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
MARGIN = 1.3  # of the labels' axis, as a factor

UNTRAINED, TRAINED = ", untrained features", ", trained features"


def figure(points: Sequence[Point], title: str = "") -> "Figure":
    """One line for each method over labelled images (logarithmic); bars are one standard deviation over seeds.

    Fine-tuning is drawn through, frozen features are dashed, and those of the untrained backbone dotted and hollow, in
    the colour of their trained twin.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(8.4, 4.4), layout="constrained")
    FigureCanvasAgg(made)
    axes = made.subplots()
    methods = sorted(dict.fromkeys(name for name, *_ in points), key=_is_frozen)  # fine-tuning first
    families = list(dict.fromkeys(_family(method) for method in methods))
    for method in methods:
        own = sorted((images, value, spread or 0.0) for name, images, value, spread in points if name == method)
        images, values, spreads = zip(*own, strict=True)
        number = families.index(_family(method))
        axes.errorbar(
            images,
            [100 * value for value in values],
            yerr=[100 * spread for spread in spreads] if any(spreads) else None,
            label=method,
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            markerfacecolor="white" if method.endswith(UNTRAINED) else None,
            linestyle=":" if method.endswith(UNTRAINED) else "--" if _is_frozen(method) else "-",
            capsize=3,
            markersize=5,
        )
    axes.set_xscale("log")
    counts = sorted({images for _, images, *_ in points})
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()
    axes.set_xlim(counts[0] / MARGIN, counts[-1] * MARGIN)
    axes.set_xlabel("labelled training images")
    axes.set_ylabel("test accuracy, %")
    axes.grid(alpha=0.3)
    made.legend(loc="outside right upper", fontsize=8)
    axes.set_title(title, fontsize=9)
    return made


def _is_frozen(method: str) -> bool:
    return method.endswith((UNTRAINED, TRAINED))


def _family(method: str) -> str:
    """What a trained and an untrained line have in common."""
    return method.removesuffix(UNTRAINED).removesuffix(TRAINED)


def draw(points: Sequence[Point], path: Path, title: str = "") -> None:
    """Writes `figure` as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure(points, title).savefig(path, dpi=120)
