"""Storage with bad moments, machines with little room, and the picture that a lost worker was at."""

import errno
import os
import resource
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mpp.data import workers
from mpp.data.loader import Pictures, Skipped
from mpp.data.sources import Subset
from mpp.data.workers import Attempts, Whereabouts, check_machine

GOOD = np.zeros((4, 4, 3), np.uint8)


def eio() -> OSError:
    return OSError(errno.EIO, "Input/output error")


def answers(*found):
    """read() that gives these in turn, and counts."""
    left = list(found)
    read = lambda: left.pop(0)  # noqa: E731
    read.left = left
    return read


def test_a_bad_moment_is_waited_for_and_a_bad_file_is_not():
    attempts = Attempts(waits=(0, 0, 0))
    read = answers(eio(), "pixels", "never")
    assert attempts.again(eio(), read) == "pixels" and read.left == ["never"]
    assert attempts.again("at once", answers()) == "at once"
    missing = FileNotFoundError(errno.ENOENT, "No such file")
    assert attempts.again(missing, answers()) is missing
    unnumbered = OSError("expected a regular file")
    assert attempts.again(unnumbered, answers()) is unnumbered


def test_a_disk_that_is_gone_is_not_waited_for_with_every_picture(monkeypatch):
    slept = []
    monkeypatch.setattr(workers.time, "sleep", slept.append)
    attempts = Attempts()
    for _ in range(6):
        assert isinstance(attempts.again(eio(), eio), OSError)
    assert slept == [0.1, 0.5, 2.0] * 3
    assert attempts.again("back", answers()) == "back"
    attempts.again(eio(), eio)
    assert len(slept) == 12  # waited for again


class Flaky:
    """A dataset of eight pictures: some cannot be read at first, and one never; or all at once cannot."""

    classes, description = None, "flaky"

    def __init__(self, at_once: bool):
        self.at_once, self.reads = at_once, [0] * 8

    def __len__(self):
        return 8

    def read(self, ids):
        if self.at_once and len(ids) > 1:
            raise eio()
        for id in ids:
            self.reads[id] += 1
        return [eio() if id == 5 or (id == 2 and self.reads[id] < 3) else GOOD for id in ids]

    def name(self, id):
        return f"picture {id}"


@pytest.mark.parametrize("at_once", [False, True])
def test_what_can_be_read_the_third_time_is_no_bad_picture(at_once):
    flaky = Flaky(at_once)
    pictures = Pictures(Subset(flaky), 3, None)
    pictures.attempts = Attempts(waits=(0, 0, 0))
    made = pictures.views(range(8), lambda row, picture: picture)
    assert [row for row, view in enumerate(made) if isinstance(view, Skipped)] == [5]
    assert made[5].name == "picture 5" and "Input/output error" in made[5].reason
    assert flaky.reads == [1, 1, 3, 1, 1, 4, 1, 1]


def test_a_lost_worker_s_picture_is_found_by_its_process_number(monkeypatch):
    where = Whereabouts(2)
    where.note(3)  # in the main process: nobody's
    assert where.of("whatever") == []
    for worker, pid, id in ((0, 41, 7), (1, 42, 9)):
        monkeypatch.setattr(workers, "get_worker_info", lambda worker=worker: SimpleNamespace(id=worker))
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        where.note(id)
    assert where.of("DataLoader worker (pid 42) is killed by signal: Killed") == [9]
    assert where.of("DataLoader timed out after 600 seconds") == [7, 9]
    where.note(-1)
    assert where.of("timed out") == [7]


def test_batches_that_do_not_fit_into_shared_memory_are_refused_with_what_would(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64_000_000))
    assert check_machine(0, 10**9) == []
    with pytest.raises(ValueError, match=r"8 workers with 4 batches each need 320 MB .* 64 MB are free; .*workers 1,"):
        check_machine(8, 10_000_000)


@pytest.mark.parametrize(("soft", "hard"), [(64, 10**6), (64, 64), (10**6, 10**6), (64, resource.RLIM_INFINITY)])
def test_few_open_files_are_made_more_or_done_without(monkeypatch, soft, hard):
    limits, strategies = [], []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: limits.append(both))
    monkeypatch.setattr(torch.multiprocessing, "set_sharing_strategy", strategies.append)
    notes = check_machine(2, 1000)
    if soft > 64:
        assert (notes, limits, strategies) == ([], [], [])
    elif hard == 64:
        assert strategies == ["file_system"] and not limits and "ulimit -n" in notes[0]
    else:
        assert limits == [(384, hard)] and not strategies and "from 64 to 384" in notes[0]
