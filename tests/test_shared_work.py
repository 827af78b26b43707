"""Tasks shared by processes: each done once, signals heeded between them."""

import os
import signal
import subprocess
import sys

from mpp import shared_work
from mpp.lock import FolderInUse
from mpp.runtime import StopSignal
from mpp.shared_work import SharedWork, Task


def test_a_signal_stays_where_the_next_job_brings_its_own():
    work, first, second = SharedWork(), StopSignal(), StopSignal()
    work.heed(first)
    first.requested = True
    work.heed(second)
    assert second.requested and work.is_stopped


def test_a_folder_that_another_process_holds_is_waited_for(tmp_path, monkeypatch):
    code = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    command = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        done = []
        task = Task(tmp_path, lambda: done.append(1) or 0)
        monkeypatch.setattr(shared_work.time, "sleep", lambda seconds: other.communicate(b"\n"))
        assert SharedWork().run([task]) == 0
        assert done == [1] and other.poll() == 0


def test_what_is_done_is_not_begun_again_and_an_exit_code_ends_the_work(tmp_path, capsys):
    done = []
    tasks = [
        Task(
            tmp_path / name, lambda name=name: done.append(name) or (3 if name == "c" else 0), f"task {name}", skip, 10
        )
        for name, skip in (("a", lambda: True), ("b", lambda: False), ("c", lambda: False), ("d", lambda: False))
    ]
    assert SharedWork().run(tasks) == 3
    assert done == ["b", "c"]
    told = capsys.readouterr().out
    assert f"[2 of 4] task b: {tmp_path / 'b'}" in told and "task a" not in told
    assert told.count("left for one process") == 1  # after b; c ended it


def test_what_another_process_has_done_meanwhile_is_left(tmp_path, monkeypatch):
    answers = iter([False, True])  # looked at before, and again once the folder is ours
    task = Task(tmp_path, lambda: 1, is_done=lambda: next(answers))
    assert SharedWork().run([task]) == 0


def test_a_signal_while_all_that_is_left_is_done_by_others_asks_to_go_on_later(tmp_path, monkeypatch):
    def refuse(folder, patience):
        raise FolderInUse(str(folder))

    monkeypatch.setattr(shared_work, "hold", refuse)
    monkeypatch.setattr(shared_work.time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    assert SharedWork().run([Task(tmp_path, lambda: 0)]) == 75
