"""F1, F2, F13, F31: killed with -9 at random and within saves; another number of processes goes on."""

import json
import random
import signal
import time

import pytest

ACCUMULATED = "--train.micro_batch_size=6"  # of 24 images: two micro-batches on each of two processes


@pytest.fixture(scope="module")
def accumulated(kit) -> str:
    kit.finish("accumulated", ACCUMULATED, processes=2)
    return "accumulated"


def test_f1_all_processes_killed_three_times_at_random_end_as_the_run_that_was_not(kit, accumulated):
    chance = random.Random(0)
    kills = 0
    while kills < 3:
        wanted, until = kit.trained("killed") + chance.randint(1, 5), time.monotonic() + 120
        process = kit.start("killed", ACCUMULATED, processes=2)
        while kit.trained("killed") < min(wanted, 19):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.001)
        time.sleep(chance.random() * 0.05)
        kit.kill(process)
        kills += 1
    kit.finish("killed", ACCUMULATED, processes=2)
    kit.assert_twins("killed", accumulated)
    steps = [row["step"] for row in kit.lines("killed", "metrics.jsonl") if "loss" in row]
    assert steps == list(range(1, 21))  # F26: one line for each step


@pytest.mark.parametrize("place", ["manifest", "renamed"])
def test_f2_killed_within_a_save(kit, twin, place):
    out = f"killed_{place}"
    ended = kit.run(out, faults=[{"place": place, "step": 10, "action": "kill"}])
    assert ended.code == -signal.SIGKILL
    kit.finish(out)
    kit.assert_twins(out, twin)
    assert not list((kit.folder / out / "checkpoints").glob(".*"))


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_f13_another_number_of_processes_goes_on_with_the_same_order(kit, twin, first, second):
    out = f"from{first}to{second}"
    kit.run(out, processes=first, faults=[{"place": "update", "step": 8, "action": "kill"}])
    kit.finish(out, processes=second)
    assert kit.lines(out, "trace.jsonl") == kit.lines(twin, "trace.jsonl")
    ours, theirs = ([row["loss"] for row in kit.lines(run, "metrics.jsonl") if "loss" in row] for run in (out, twin))
    assert ours == pytest.approx(theirs, abs=1e-4)
    log = (kit.folder / out / "train.log").read_text()
    assert f"processes before: {first}, now: {second}; results differ in rounding" in log


def test_f13_another_global_batch_is_refused_by_name(kit):
    kit.run("batch", faults=[{"place": "update", "step": 8, "action": "kill"}])
    ended = kit.run("batch", "--train.batch_size=12")
    assert ended.code == 2 and "train.batch_size: 24 -> 12" in ended.errors
    ended = kit.run("batch", "--train.batch_size=26", processes=3)
    assert ended.code == 1 and "26 does not divide over 3 processes" in ended.errors


def test_f26_damaged_records_are_cut_back(kit, twin):
    kit.run("torn", faults=[{"place": "update", "step": 8, "action": "kill"}])
    metrics = kit.folder / "torn" / "metrics.jsonl"
    text = metrics.read_text()
    with metrics.open("a") as file:
        file.write(json.dumps({"step": 400, "loss": 0.0}) + '\n{"step": 401, "lo')
    kit.finish("torn")
    kit.assert_twins("torn", twin)
    assert text.count("\n") >= 8
