"""One writer per folder, and who may take over from whom."""

import os
import platform
import signal
import time

import pytest

from mpp import lock
from mpp.lock import FolderInUse, hold, is_held, let_go


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch):
    held = {}
    monkeypatch.setattr(lock, "_HELD", held)
    yield
    for file in held.values():
        file.close()


def owner(folder) -> str:
    return (folder / ".lock").read_text()


def test_who_holds_a_folder_is_written_in_it_with_the_batch_job(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert hold(tmp_path) == "" and is_held(tmp_path)
    assert owner(tmp_path) == f"process {os.getpid()} on {platform.node()}, job 4711\n"
    let_go(tmp_path)
    assert owner(tmp_path) == "" and not is_held(tmp_path)


def test_a_killed_owner_is_told_and_a_living_one_respected(tmp_path):
    pid = os.fork()
    if pid == 0:
        hold(tmp_path)
        time.sleep(60)
        os._exit(0)
    while not (tmp_path / ".lock").exists() or not owner(tmp_path):
        time.sleep(0.01)
    with pytest.raises(FolderInUse, match=f"in use by another run .process {pid} on"):
        hold(tmp_path, patience=0.1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert hold(tmp_path, patience=5).startswith(f"process {pid} on")


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("", False),
        (f"process {os.getppid()} on {platform.node()}\n", True),
        (f"process 99999999 on {platform.node()}\n", False),
        ("process 1 on elsewhere, job 7\n", True),
    ],
)
def test_without_locks_of_the_file_system_the_text_decides(tmp_path, monkeypatch, text, is_refused):
    monkeypatch.setattr(lock, "_lock", lambda file: None)
    (tmp_path / ".lock").write_text(text)
    if is_refused:
        with pytest.raises(FolderInUse, match="--train.take_over true"):
            hold(tmp_path)
        assert owner(tmp_path) == text
        assert hold(tmp_path, take_over=True) == text.strip()
    else:
        assert hold(tmp_path) == text.strip()
    assert owner(tmp_path).startswith(f"process {os.getpid()} on")
