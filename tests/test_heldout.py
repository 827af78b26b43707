"""Held-out metrics by kind of corruption: sums over sums, null where there is nothing."""

import pytest

from mpp.heldout import by_kind


def test_totals_weigh_patches_and_not_kinds():
    found = by_kind({"masked": [60.0, 10.0, 30], "random": [8.0, 1.0, 4], "kept": [2.0, 4.0, 6]}, has_accuracy=True)
    assert found["heldout_loss"] == pytest.approx(70 / 40) and found["heldout_accuracy"] == pytest.approx(15 / 40)
    assert (found["heldout_loss_masked"], found["heldout_loss_random"]) == (2.0, 2.0)
    assert found["heldout_accuracy_kept"] == pytest.approx(4 / 6)


def test_a_kind_without_patches_and_a_regression_without_accuracy_report_null():
    found = by_kind({"masked": [60.0, 0.0, 30], "random": [0.0, 0.0, 0], "kept": [0.0, 0.0, 0]}, has_accuracy=False)
    assert found["heldout_loss_random"] is None and found["heldout_loss_kept"] is None
    assert found["heldout_loss"] == 2.0 and found["heldout_accuracy"] is None
