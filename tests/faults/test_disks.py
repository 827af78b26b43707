"""F4, F11, F12: full and read-only disks, and two runs that want one folder."""

import json
import os
import subprocess
import time

import pytest


@pytest.fixture
def disk(tmp_path):
    """disk("3m") -> a small disk of its own, full after so much; disk("3m", "ro"): read-only."""
    made = []

    def mount(size: str, *options: str):
        place = tmp_path / f"disk{len(made)}"
        place.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs", str(place)]
        if os.geteuid() or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("needs the right to mount a file system")
        made.append(place)
        return place

    yield mount
    for place in made:
        subprocess.run(["umount", str(place)], check=True)


def test_f4_a_disk_that_is_too_small_is_refused_before_the_first_step(kit, disk):
    place = disk("1m")
    ended = kit.run(str(place / "run"))
    assert ended.code == 2 and "MB free, and the run's checkpoints need about" in ended.errors
    assert "step 1" not in ended.out


def test_f4_a_disk_that_fills_up_keeps_the_last_checkpoint_and_is_tried_again(kit, twin, disk):
    place = disk("8m")
    faults = [
        {"place": "update", "step": 7, "action": "fill", "path": str(place)},
        {"place": "update", "step": 12, "action": "drain", "path": str(place)},
    ]
    ended = kit.run(str(place / "run"), "--train.keep_last=9", faults=faults)
    assert ended.code == 0 and "no checkpoint of step 10" in ended.out and "No space left" in ended.out, ended.text
    assert kit.saved(str(place / "run")) == [5, 15, 20]
    kit.assert_twins(str(place / "run"), twin)


@pytest.mark.parametrize("words", [("--train.save_errors=stop",), ("--train.steps=10", "--optim.schedule=constant")])
def test_f4_a_run_that_stops_or_ends_on_a_full_disk_fails(kit, disk, words):
    place = disk("4m")
    faults = [{"place": "update", "step": 7, "action": "fill", "path": str(place)}]
    ended = kit.run(str(place / "run"), *words, faults=faults)
    assert ended.code == 1 and "no checkpoint of step 10" in ended.errors and "make room" in ended.errors
    assert kit.saved(str(place / "run")) == [5]


def test_f11_a_folder_that_cannot_be_written_is_one_line_and_exit_code_2(kit, disk, tmp_path):
    place = disk("4m", "ro")
    (tmp_path / "file").write_text("")
    for out in (place / "run", tmp_path / "file", tmp_path / "file" / "run"):
        ended = kit.run(str(out))
        assert ended.code == 2 and ended.errors.strip().count("\n") == 0 and "--out" in ended.errors, ended.text
        assert "data" not in ended.out


def test_f12_a_second_run_in_the_folder_is_refused_and_the_first_unharmed(kit, twin):
    first = kit.start("shared", faults=[{"place": "update", "step": 9, "action": "stop"}])
    until = time.monotonic() + 60
    while kit.trained("shared") < 8:
        assert first.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    ended = kit.run("shared")
    assert ended.code == 2 and f"in use by another run (process {first.pid} on" in ended.errors
    first.send_signal(18)  # SIGCONT
    first.communicate(timeout=60)
    assert first.returncode == 0
    kit.assert_twins("shared", twin)


def test_f12_the_lock_of_a_killed_run_is_taken_over_with_a_note(kit, twin):
    kit.run("left", faults=[{"place": "update", "step": 8, "action": "kill"}])
    ended = kit.run("left")
    assert ended.code == 0 and "taken over from a run that ended without a word: process" in ended.out
    kit.assert_twins("left", twin)
    assert json.loads((kit.folder / "left" / "starts.jsonl").read_text().splitlines()[1])["from_step"] == 5
