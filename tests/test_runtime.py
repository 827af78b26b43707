"""The launcher and the recipe must agree; a stop is asked for once and forced the second time."""

import signal
from typing import ClassVar

import pytest

from mpp import runtime
from mpp.runtime import StopSignal, _check_launcher, _check_world, check_trackers


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp16", "train.precision: bf16"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "micro_batch_size"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "train.compile"),
    ],
)
def test_a_launcher_that_says_otherwise_than_the_recipe_is_refused(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        _check_launcher("bf16")


@pytest.mark.parametrize("said", ["no", "bf16", ""])
def test_a_launcher_that_says_nothing_or_the_same_yields_to_the_recipe(monkeypatch, said):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", said)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    _check_launcher("bf16")


class Believes:
    """An Accelerator that believes in a number of processes."""

    def __init__(self, processes, kind):
        from accelerate.utils import DistributedType

        self.num_processes, self.distributed_type = processes, DistributedType(kind)


def test_processes_that_each_believe_to_be_alone_are_an_error_with_the_cure(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2"):
        _check_world(Believes(1, "NO"))
    _check_world(Believes(2, "MULTI_CPU"))
    with pytest.raises(ValueError, match="FSDP"):
        _check_world(Believes(2, "FSDP"))


def test_a_tracker_that_is_not_installed_is_refused_by_name():
    with pytest.raises(ValueError, match="pip install clearml"):
        check_trackers(["clearml"])


class TestStop:
    launched: ClassVar[dict[str, str]] = {"ACCELERATE_MIXED_PRECISION": "no"}

    @pytest.fixture(autouse=True)
    def _no_real_exit(self, monkeypatch):
        self.exits: list[int] = []
        monkeypatch.setattr(runtime.os, "_exit", self.exits.append)
        monkeypatch.setattr(runtime, "_ask_for_term_when_the_parent_dies", lambda: None)
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
        monkeypatch.delenv("LOCAL_RANK", raising=False)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
    def test_one_signal_asks_and_the_second_leaves(self, number):
        signal.signal(number, signal.SIG_DFL)  # also where the tests are run under nohup
        stop = StopSignal()
        assert not stop.agreed()
        signal.raise_signal(number)
        assert stop.agreed() and self.exits == []
        signal.raise_signal(number)
        assert self.exits == [128 + number]

    def test_under_a_launcher_term_comes_several_times_for_one_wish(self, monkeypatch):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
        stop = StopSignal()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        assert stop.agreed() and self.exits == []
        signal.raise_signal(signal.SIGINT)
        assert self.exits == [130]

    def test_other_signals_may_be_named(self):
        stop = StopSignal(("USR2",))
        before = signal.getsignal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        assert stop.agreed() and signal.getsignal(signal.SIGUSR1) == before


def test_nohup_stays_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    StopSignal()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
