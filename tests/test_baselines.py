"""Baselines against slow, plain computations; the nearest visible patch; kinds of corruption."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from mpp.baselines import class_baselines, entropy, nearest_visible, pixel_baselines
from mpp.masking import Corruption, RandomMasking, make_plan


def test_entropy_is_that_of_the_empirical_distribution():
    assert entropy(np.array([[0], [1], [2], [3]])) == pytest.approx(math.log(4))
    assert entropy(np.zeros((9, 1), dtype=int)) == 0
    assert entropy(np.array([[0, 5], [1, 5]])) == pytest.approx(math.log(2) / 2)


@pytest.mark.parametrize("grid", [(3, 3), (4, 7), (14, 14)])
def test_the_nearest_visible_patch_ties_to_the_lowest_index(grid):
    ids = torch.arange(5)
    plan = make_plan(RandomMasking(), Corruption(), grid, 0, torch.zeros_like(ids), ids)
    found = nearest_visible(plan, grid)
    for b in range(5):
        visible = sorted(plan.visible[b].tolist())
        for k, patch in enumerate(plan.corrupted[b].tolist()):
            place = lambda p: divmod(p, grid[1])  # noqa: E731
            expected = min(visible, key=lambda v: (math.dist(place(v), place(patch)), v))
            assert found[b, k] == expected


@pytest.mark.parametrize("cells", [1, 4])
def test_class_baselines_equal_counting_by_hand(cells):
    rng = np.random.default_rng(0)
    y, hy = rng.integers(0, 6, (300, cells)), rng.integers(0, 8, (100, cells))  # classes 6 and 7 are new
    x, hx = (y + rng.integers(0, 2, y.shape)) % 8, (hy + rng.integers(0, 2, hy.shape)) % 8
    losses = []
    for cell in range(cells):
        n_y, n_x, n_xy = (
            Counter(y[:, cell]),
            Counter(x[:, cell]),
            Counter(zip(x[:, cell], y[:, cell], strict=True)),
        )
        for a, b in zip(hx[:, cell], hy[:, cell], strict=True):
            p_y = (n_y[b] + 1 / 8) / 301
            losses.append(-math.log((n_xy[a, b] + p_y) / (n_x[a] + 1)))
    found = class_baselines(x, y, hx, hy, 8)
    assert found["baseline_neighbour_loss"] == pytest.approx(np.mean(losses))
    assert found["baseline_neighbour_accuracy"] == pytest.approx((hx == hy).mean())
    assert found["baseline_entropy"] == pytest.approx(entropy(hy)) and found["label_information"] == pytest.approx(
        entropy(y)
    )
    assert found["heldout_classes"] == 8


def test_pixel_baselines_equal_counting_by_hand():
    rng = np.random.default_rng(0)
    x, hx = rng.integers(0, 5, (200, 1)), rng.integers(0, 7, (60, 1))  # 5 and 6 are new
    y, hy = x / 5 + rng.normal(0, 0.1, (200, 3)), hx / 5 + rng.normal(0, 0.1, (60, 3))
    rows = defaultdict(list)
    for a, b in zip(x[:, 0], y, strict=True):
        rows[a].append(b)
    predictions = [(np.sum(rows[a], axis=0) + y.mean(0)) / (len(rows[a]) + 1) for a in hx[:, 0]]
    found = pixel_baselines([(x[:70], y[:70]), (x[70:], y[70:])], iter([(hx[:9], hy[:9]), (hx[9:], hy[9:])]))
    assert found["baseline_neighbour_loss"] == pytest.approx(np.square(hy - np.array(predictions)).mean())
    assert found["baseline_entropy"] == pytest.approx(np.square(hy - hy.mean(0)).mean())
    assert found["baseline_neighbour_accuracy"] is None
