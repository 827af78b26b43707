"""Killed, or without power, at any point of a save, there is a valid checkpoint; the next start clears up."""

import builtins
import itertools
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from mpp.checkpoint import Checkpoint, newest, prune, save, tidy
from mpp.durable import cut_back

# Every call through which the code changes the disk: a save may end before each of them.
DEADLY = [(os, name) for name in ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir")]
DEADLY += [(builtins, "open"), (safetensors.torch, "save_file")]


def write(run: Path, step: int, value: float) -> Path:
    tensors = {
        "model.safetensors": {"w": torch.full((3,), value)},
        "state/optimizer.safetensors": {"w.exp_avg": torch.full((3,), value)},
    }
    return save(run, step, tensors, {"config.json": value, "state/trainer.json": value}, facts={"value": value})


def state_of(checkpoint: Checkpoint | None) -> tuple[int, float]:
    """(step, value), the value being the same in all files."""
    assert checkpoint is not None
    values = {
        checkpoint.facts["value"],
        checkpoint.document("config.json"),
        checkpoint.document("state/trainer.json"),
    }
    for name in ("model.safetensors", "state/optimizer.safetensors"):
        values |= {v for tensor in checkpoint.tensors(name).values() for v in tensor.tolist()}
    assert len(values) == 1
    return checkpoint.step, values.pop()


def newest_state(run: Path) -> tuple[int, float]:
    checkpoint, skipped = newest(run)
    assert not skipped
    return state_of(checkpoint)


class Reaper:
    """Ends this process at one of its calls to the disk, and takes with it what was not flushed."""

    def __init__(self, folder: Path, at: int):
        self.folder, self.left = folder, at
        self.flushed = {stamp(os.stat(path)) for path in files(folder)}
        for module, name in DEADLY:
            setattr(module, name, self.watch(getattr(module, name), name))

    def watch(self, call: Callable, name: str) -> Callable:
        def watched(*args, **kwargs):
            self.left -= 1
            if self.left == 0:
                self.cut_power()
                os._exit(9)
            return self.flush(*args) if name == "fsync" else call(*args, **kwargs)

        return watched

    def flush(self, handle: int) -> None:
        self.flushed.add(stamp(os.fstat(handle)))  # noting it is enough, and faster

    def cut_power(self) -> None:
        for path in files(self.folder):
            if stamp(os.stat(path)) not in self.flushed:
                os.truncate(path, 0)


def stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def files(folder: Path) -> list[str]:
    return [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]


def survives(action: Callable[[], object], folder: Path, at: int) -> bool:
    """Run `action` in a process that dies before its call number `at`; whether it came to its end instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons advise against forks beside threads
        pid = os.fork()
    if pid == 0:
        try:
            reaper = Reaper(folder, at)
            action()
            reaper.cut_power()
            os._exit(0)
        finally:
            os._exit(77)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 9)
    return code == 0


def every_kill(base: Path, folder: Path, action: Callable[[Path], object]):
    """Yield (a copy of `base` after each possible death of `action` and after its survival, survived)."""
    for at in itertools.count(1):
        run = folder / str(at)
        shutil.copytree(base, run)
        survived = survives(lambda run=run: action(run), run, at)
        yield run, survived
        if survived:
            return


def hidden(run: Path) -> list[str]:
    return [name for name in os.listdir(run / "checkpoints") if name.startswith(".")]


@pytest.fixture
def no_flushing(monkeypatch):
    """For the sake of speed, where the disk is not what is tested."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.mark.usefixtures("no_flushing")
@pytest.mark.parametrize("step", [300, 200])
def test_a_kill_at_any_point_leaves_a_valid_checkpoint(tmp_path, step):
    """A new step (300) and one that is written again (200), each with the pruning that follows."""
    base = tmp_path / "base"
    for old in (100, 200):
        write(base, old, 1.0)
    stages = []
    for run, survived in every_kill(base, tmp_path, lambda run: (write(run, step, 2.0), prune(run, 1))):
        found = newest_state(run)
        stages.append((found, {name[:5] for name in hidden(run)}))
        tidy(run)  # the next start
        assert not hidden(run) and newest_state(run) == found
        assert not survived or os.listdir(run / "checkpoints") == [f"{step:08d}"]
        write(run, step, 3.0)
        prune(run, 1)
        assert os.listdir(run / "checkpoints") == [f"{step:08d}"] and newest_state(run) == (step, 3.0)
    order = [found for found, _ in stages]
    assert len(order) > 30 and order == sorted(order) and set(order) == {(200, 1.0), (step, 2.0)}
    left = [names for _, names in stages]
    assert {".tmp-"} in left and set() in left and ({".tmp-", ".old-"} in left) == (step == 200)


@pytest.mark.usefixtures("no_flushing")
def test_a_kill_while_clearing_up_after_a_kill_loses_nothing(tmp_path):
    base = tmp_path / "base"
    write(base, 100, 1.0)
    aside = f".old-00000100-{'0' * 32}"
    os.rename(base / "checkpoints/00000100", base / "checkpoints" / aside)
    shutil.copytree(base / "checkpoints" / aside, base / "checkpoints/.tmp-half")
    assert newest(base)[0].path.name == aside
    for run, _ in every_kill(base, tmp_path, lambda run: prune(run, 1)):
        assert newest_state(run) == (100, 1.0)
        prune(run, 1)
        assert os.listdir(run / "checkpoints") == ["00000100"] and newest_state(run) == (100, 1.0)


@pytest.mark.parametrize("place", ["whole", "broken", "absent"])
@pytest.mark.parametrize("aside", [["1"], ["2"], ["1", "2"], []])
def test_of_folders_that_stood_aside_a_whole_one_returns(tmp_path, place, aside):
    """Two folders stand aside, those in `aside` whole; the step comes from wherever it is whole."""
    home = tmp_path / "checkpoints"
    write(tmp_path, 100, 1.0)
    for number in ("1", "2"):
        shutil.copytree(home / "00000100", old := home / f".old-00000100-{number * 32}")
        if number not in aside:
            (old / "config.json").unlink()
    if place == "broken":
        (home / "00000100/config.json").unlink()
    elif place == "absent":
        shutil.rmtree(home / "00000100")
    tidy(tmp_path)
    assert os.listdir(home) == ["00000100"]
    if place == "whole" or aside:
        assert newest_state(tmp_path) == (100, 1.0)


@pytest.mark.usefixtures("no_flushing")
def test_the_first_save_of_a_run_may_be_killed_too(tmp_path):
    (tmp_path / "base").mkdir()
    for run, survived in every_kill(tmp_path / "base", tmp_path, lambda run: write(run / "new", 1, 2.0)):
        found, skipped = newest(run / "new")
        assert not skipped and (not survived or found is not None)
        assert found is None or state_of(found) == (1, 2.0)
        tidy(run / "new")
        write(run / "new", 1, 3.0)
        assert os.listdir(run / "new/checkpoints") == ["00000001"]


def test_names_are_flushed_before_and_after_the_rename(tmp_path, monkeypatch):
    """A power cut may take names, too, until the folder they stand in is flushed."""
    events = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(handle):
        events.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def noted_rename(old, new):
        events.append(("rename", str(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    final = write(tmp_path / "a" / "b", 1, 1.0)
    at = events.index(("rename", str(final)))
    ahead = [Path(path).name for kind, path in events[:at]]
    assert events[at + 1] == ("fsync", str(final.parent))
    assert ahead.index("manifest.json") > max(
        ahead.index(p.name) for p in final.rglob("*") if p.name != "manifest.json"
    )
    assert ahead[-1].startswith(".tmp-") and ahead[-2] == "manifest.json" and ahead[-3].startswith((".tmp-", "state"))
    for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b"):
        assert ("fsync", str(folder)) in events[:at]


def test_a_log_is_cut_whole_or_not_at_all(tmp_path):
    (tmp_path / "base").mkdir()
    old = b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st'
    (tmp_path / "base/metrics.jsonl").write_bytes(old)
    for run, survived in every_kill(tmp_path / "base", tmp_path, lambda run: cut_back(run / "metrics.jsonl", 2)):
        text = (run / "metrics.jsonl").read_bytes()
        assert text == b'{"step": 1}\n{"step": 2}\n' or (text == old and not survived)
        cut_back(run / "metrics.jsonl", 2)
        assert (run / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n'
