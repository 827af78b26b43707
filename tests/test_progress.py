"""What a person sees: durations, yardsticks, plain lines where there is no terminal."""

import pytest

from mpp.progress import duration, heldout_line


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (95, "1:35"), (4000, "1:06:40")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def record(**more):
    kinds = {f"heldout_loss_{kind}": 1.0 for kind in ("masked", "random", "kept")}
    yardsticks = {"baseline_entropy": 4.2, "baseline_neighbour_loss": 3.2, "baseline_neighbour_accuracy": 0.25}
    return {"step": 1000, "heldout_loss": 1.9, "heldout_accuracy": 0.4} | kinds | yardsticks | more


def test_the_held_out_loss_stands_beside_its_yardsticks():
    assert heldout_line(record()) == (
        "step 1,000: held-out loss 1.9000 (masked 1.000, random 1.000, kept 1.000), accuracy 0.400; best constant "
        "4.200, nearest visible patch 3.200 (copying it: accuracy 0.250)"
    )


def test_empty_kinds_and_regressions_leave_out_what_they_do_not_have():
    line = heldout_line(record(heldout_loss_kept=None, heldout_accuracy=None, baseline_neighbour_accuracy=None))
    assert "kept" not in line and "accuracy" not in line and "best constant 4.2000" in line
