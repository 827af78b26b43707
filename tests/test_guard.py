"""Updates that are left out: which, on whose word, and what is told of them."""

import copy

import pytest
import torch

from mpp.guard import LOOK_EVERY, LOUD, WARM, Guard, told

CPU = torch.device("cpu")


def judged(guard: Guard, step: int, norm: float, loss: float = 1.0, ids: tuple[int, ...] = (1, 2)) -> bool:
    guard.sound(torch.tensor(loss), torch.tensor(ids))
    return bool(guard.judge(step, torch.tensor(norm)))


def test_a_loss_that_is_not_finite_makes_a_gradient_that_is_not_though_it_could_be():
    weight = torch.ones(3, requires_grad=True)
    guard = Guard(CPU, None)
    for constant, finite in ((2.0, True), (float("inf"), False), (float("nan"), False)):
        weight.grad = None
        guard.sound(weight.sum() + constant, torch.tensor([0])).backward()
        assert weight.grad.isfinite().all() == finite
        assert not finite or torch.equal(weight.grad, torch.ones(3))


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_is_left_out_and_leaves_no_mark(norm):
    guard = Guard(CPU, None)
    assert not judged(guard, 1, 2.0)
    usual = guard.usual.item()
    assert judged(guard, 2, norm, loss=norm, ids=(7, 8)) and guard.usual.item() == usual == 2.0
    assert not judged(guard, 3, 4.0) and guard.usual.item() == 3.0  # the mean of 2 and 4
    found = guard.look()
    assert [(one.step, one.kind, one.own_loss_is_finite, one.ids) for one in found] == [
        (2, "not finite", False, [7, 8])
    ]
    assert guard.streak == [] and guard.counted() == {"skipped_updates": 1, "gradient_spikes": 0}
    assert guard.counted() == {"skipped_updates": 0, "gradient_spikes": 0} and guard.look() == []


def test_a_streak_is_counted_over_looks():
    guard = Guard(CPU, None)
    for step in (1, 2, 3):
        judged(guard, step, float("nan"))
        guard.look()
    assert guard.streak == [1, 2, 3]
    judged(guard, 4, 1.0)
    guard.look()
    assert guard.streak == []


@pytest.mark.parametrize("limit", [None, 5.0])
def test_a_norm_far_above_the_usual_is_told_and_left_out_where_a_limit_says_so(limit):
    guard = Guard(CPU, limit)
    early = judged(guard, 1, 1e6)  # nothing is usual yet
    guard = Guard(CPU, limit)
    assert not early and not any(judged(guard, step, 1.0) for step in range(WARM))
    factor = limit or LOUD
    assert not judged(guard, 100, 0.99 * factor)
    before = guard.usual.item()
    assert judged(guard, 101, 1e6) == (limit is not None)
    # A spike that is applied counts for no more than the highest norm that is none.
    assert guard.usual.item() == pytest.approx(before if limit else before + (factor * before - before) / (WARM + 2))
    (found,) = guard.look()
    assert (found.step, found.kind, found.norm) == (101, "spike", 1e6)
    assert guard.counted() == {"skipped_updates": int(limit is not None), "gradient_spikes": 1}
    (line,) = told([found.row(0), found.row(1)], limit)
    assert line.startswith("step 101: gradient norm 1e+06, usually") and ("left out" in line) == (limit is not None)


def test_it_goes_on_where_its_state_was_stored():
    norms = [1.0 + 0.1 * (step % 7) for step in range(40)] + [float("nan"), 90.0, 1.0]
    whole, first = Guard(CPU, 4.0), Guard(CPU, 4.0)
    verdicts = [judged(whole, step, norm) for step, norm in enumerate(norms)]
    cut = [judged(first, step, norm) for step, norm in enumerate(norms[:25])]
    whole.look(), first.look()
    second = Guard(CPU, 4.0)
    second.load_state(copy.deepcopy(first.state()))
    cut += [judged(second, step, norm) for step, norm in enumerate(norms[25:], 25)]
    second.look()
    assert cut == verdicts and second.state() == whole.state() and verdicts[-3:] == [True, True, False]


def test_an_accelerator_is_waited_for_every_now_and_then_only():
    guard = Guard(CPU, None)
    guard.is_cpu = False
    due = []
    for step in range(LOOK_EVERY):
        judged(guard, step, float("nan") if step == 3 else 1.0)
        due.append(guard.is_due)
    assert due == [False] * (LOOK_EVERY - 1) + [True]
    assert [one.step for one in guard.look()] == [3] and not guard.is_due


def test_the_processes_whose_own_loss_was_bad_are_told():
    guard = Guard(CPU, None)
    judged(guard, 9, float("nan"), loss=1.0)
    (found,) = guard.look()
    bad = found.row(1) | {"own_loss_is_finite": False}
    assert told([found.row(0), bad], None) == ["step 9: the loss of process 1 is not finite; left out"]
    assert told([found.row(0)], None) == ["step 9: the gradient is not finite; left out"]
