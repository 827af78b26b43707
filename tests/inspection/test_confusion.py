"""The confusion picture: rows are shares of the truth, blocks keep every count, the caption says what was done."""

import numpy as np
import pytest
from matplotlib import image

from mpp.inspection.confusion import NAMED, blocks, caption, draw, figure, row_shares


def matrix(classes, seed=0):
    return np.random.default_rng(seed).integers(0, 20, (classes, classes)) + 50 * np.eye(classes, dtype=np.int64)


def names(classes):
    return [f"class_{i}" for i in range(classes)]


def labels(ticks):
    return [tick.get_text() for tick in ticks]


def test_cells_are_shares_of_the_true_class_and_written_with_their_counts():
    made = figure(np.array([[3, 1], [0, 0]]), ["ant", "bee"], "title")
    axes = made.axes[0]
    shown = axes.images[0].get_array()
    assert (shown[0].tolist() == [0.75, 0.25] and np.ma.getmaskarray(shown)[1].all()) or np.isnan(shown[1]).all()
    assert [text.get_text() for text in axes.texts] == ["75%\n3", "25%\n1"]
    assert labels(axes.get_yticklabels()) == ["ant  n=4", "bee  n=0"] and labels(axes.get_xticklabels()) == [
        "ant",
        "bee",
    ]
    assert axes.get_ylabel() == "true class" and made.get_suptitle() == "title"


def test_rows_add_up_to_one():
    assert row_shares(matrix(5)).sum(1) == pytest.approx(np.ones(5))


def test_up_to_forty_classes_have_their_names_and_more_are_joined():
    named = figure(matrix(NAMED), names(NAMED)).axes[0]
    assert labels(named.get_xticklabels()) == names(NAMED)
    joined = figure(matrix(100), names(100)).axes[0]
    assert labels(joined.get_xticklabels())[:2] == ["0-1", "2-4"] and len(joined.get_xticklabels()) == NAMED


@pytest.mark.parametrize("classes", [41, 100, 999])
def test_blocks_keep_every_count_in_its_place(classes):
    whole = matrix(classes)
    joined, ranges = blocks(whole, NAMED)
    edges = [int(name.split("-")[0]) for name in ranges] + [classes]
    assert joined.sum() == whole.sum() and len(ranges) == NAMED and edges[0] == 0
    for i, j in ((0, 0), (3, 17), (39, 39), (39, 0)):
        assert joined[i, j] == whole[edges[i] : edges[i + 1], edges[j] : edges[j + 1]].sum()
    assert max(np.diff(edges)) - min(np.diff(edges)) <= 1


def test_the_caption_counts_and_names_what_happens_most():
    text = caption(np.array([[8, 2, 0], [0, 9, 1], [5, 0, 5]]), ["ant", "bee", "cat"])
    assert "22 of 30 images right (73.3 %)" in text and "divided by its number of images" in text
    assert "Most often: cat taken for ant 5 times; ant taken for bee 2 times; bee taken for cat 1 times" in text
    assert "No mistakes" in caption(np.eye(2, dtype=np.int64), ["a", "b"])
    assert "diagonal holds mistakes inside a block" in caption(matrix(50), names(50))
    assert "1 classes have no image" in caption(np.array([[3, 0], [0, 0]]), ["a", "b"])


@pytest.mark.parametrize("classes", [2, 30, 200])
def test_any_number_of_classes_makes_a_png(tmp_path, classes):
    odd = ["$x_y$ " + "long " * 20, *names(classes)[1:]]
    draw(matrix(classes), odd, tmp_path / "pictures" / "confusion.png", "title")
    assert image.imread(tmp_path / "pictures" / "confusion.png").std() > 0.05
