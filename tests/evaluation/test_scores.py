"""Shared scoring: intervals as scipy's, hits with ties, slices of train that leave every class, plateaus."""

import math

import numpy as np
import pytest
import torch

from mpp.evaluation.scores import at_edge, check_learned, choose, hits, hold_back, places_ahead, summary, t_quantile


def test_t_quantiles_are_scipys():
    stats = pytest.importorskip("scipy.stats", reason="compares with scipy, of the test extra")
    for freedom in [*range(1, 60), 100, 1000, 10**6]:
        assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-4)


def test_the_interval_is_scipys():
    stats = pytest.importorskip("scipy.stats", reason="compares with scipy, of the test extra")
    values = [0.41, 0.44, 0.40, 0.47]
    found = summary(values)
    expected = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert found["interval"] == pytest.approx(expected, abs=1e-6)
    assert (found["value"], found["spread"]) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    assert summary([0.5]) == {"value": 0.5, "spread": None, "interval": None, "seeds": 1, "values": [0.5]}


def test_equal_scores_go_to_the_lowest_class_and_no_number_is_never_right():
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0]]).repeat(4, 1)
    assert places_ahead(scores, torch.arange(4)).tolist() == [2, 0, 1, 3]
    assert hits(scores, torch.arange(4), (1, 2, 4)).tolist() == [1, 2, 4]
    assert hits(torch.full((4, 4), float("nan")), torch.arange(4), (1, 3)).tolist() == [0, 0]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.9, 0.999])
def test_a_slice_leaves_every_class_in_train_and_takes_of_each_that_can_spare_one(share):
    labels = torch.tensor([0] * 1 + [1] * 2 + [2] * 10 + [3] * 101)[torch.randperm(114)]
    ids = torch.arange(114) * 3 + 5
    held = hold_back(labels, ids, share, 0)
    wanted = [0, 1, *(min(max(1, round(share * n)), n - 1) for n in (10, 101))]
    assert torch.bincount(labels[held], minlength=4).tolist() == wanted
    again = torch.randperm(114)  # the same images in another order
    assert set(ids[again][hold_back(labels[again], ids[again], share, 0)].tolist()) == set(ids[held].tolist())


def test_slices_differ_between_seeds_and_are_fair():
    labels, ids = torch.arange(60) % 2, torch.arange(60)
    times = sum(hold_back(labels, ids, 0.2, seed).long() for seed in range(500))
    assert int(times.min()) > 60 and int(times.max()) < 145  # 100 expected


def test_the_middle_of_a_plateau_is_chosen():
    assert [choose(s) for s in ([0.1, 0.3, 0.2], [0.5, 0.5, 0.5, 0.1], [0.5, 0.5], [0.1], [0.2, 0.2, 0.9])] == [
        1, 1, 0, 0, 2,
    ]  # fmt: skip
    assert [at_edge(i, 3) for i in range(3)] == [True, False, True] and not at_edge(0, 1)


@pytest.mark.parametrize("loss", [math.log(3), 2.0, float("nan"), float("inf")])
def test_a_probe_that_learned_nothing_is_refused(loss):
    with pytest.raises(ValueError, match="here: the probe's training loss is .*, not below ln\\(3\\) = 1.0986"):
        check_learned(loss, 3, "here")
    check_learned(1.09, 3, "here")
