"""The ladder's picture: every method its own line, twins in one colour, nothing shared by strangers."""

from mpp.inspection.ladder import figure

FROZEN = [f"{name}, {which} features" for name in ("few-shot", "knn", "linear") for which in ("untrained", "trained")]
TUNED = ["fine-tuned, mpp", "fine-tuned, scratch", "fine-tuned, scratch, total compute", "fine-tuned, supervised"]


def test_no_two_methods_look_alike_and_twins_share_their_colour():
    points = [(name, images, 0.5, None if images == 20 else 0.01) for name in FROZEN + TUNED for images in (20, 100)]
    axes = figure(points, "title").axes[0]
    looks = {}
    for bars in axes.containers:
        line = bars.lines[0]
        looks[bars.get_label()] = (line.get_color(), line.get_linestyle(), line.get_markerfacecolor() == "white")
    assert looks.keys() == set(FROZEN + TUNED) and len(set(looks.values())) == len(looks)
    assert list(looks)[:4] == TUNED  # fine-tuning comes first in the legend
    for name in ("few-shot", "knn", "linear"):
        assert looks[f"{name}, trained features"][0] == looks[f"{name}, untrained features"][0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["20", "100"]


def test_values_are_percent_at_their_images():
    axes = figure([("fine-tuned, mpp", 20, 0.5, 0.01), ("fine-tuned, mpp", 100, 0.75, None)]).axes[0]
    assert axes.containers[0].lines[0].get_xydata().tolist() == [[20, 50.0], [100, 75.0]]
