"""F3, F3b, F30: signals at any place, to one process, the launcher or all of them."""

import os
import signal
import time

import pytest

# Where a signal comes, in which step, and the step that is saved then.
PLACES = [("update", 7, 7), ("save", 10, 10), ("evaluate", 10, 10), ("evaluate", 20, 20), ("manifest", 15, 15)]


@pytest.mark.parametrize(("place", "step", "saved"), PLACES)
def test_f3_a_signal_finishes_what_is_done_saves_and_the_same_command_goes_on(kit, twin, place, step, saved):
    out = f"{place}_{step}"
    ended = kit.run(out, faults=[{"place": place, "step": step, "action": "term"}])
    assert ended.code == 75 and "the same command goes on" in ended.out, ended.text[-2000:]
    assert kit.saved(out)[-1] == saved
    kit.finish(out)
    kit.assert_twins(out, twin)


@pytest.mark.parametrize("action", ["int", "usr1"])
def test_f3_the_other_signals_do_the_same(kit, action):
    ended = kit.run(action, faults=[{"place": "update", "step": 7, "action": action}])
    assert ended.code == 75 and kit.saved(action)[-1] == 7


def test_f3b_a_second_signal_leaves_at_once_and_the_last_checkpoint_stands(kit, twin):
    ended = kit.run("twice", faults=[{"place": "manifest", "step": 10, "action": "twice"}])
    assert ended.code == 128 + signal.SIGINT and "second signal" in ended.errors
    assert max(place.name for place in (kit.folder / "twice" / "checkpoints").glob("0*")) == "00000005"
    kit.finish("twice")
    kit.assert_twins("twice", twin)
    assert not list((kit.folder / "twice" / "checkpoints").glob(".*"))  # nothing is left of the half one


@pytest.mark.parametrize("rank", [0, 1])
def test_f3_a_signal_to_one_of_two_processes_stops_both_at_the_same_step(kit, pair, rank):
    out = f"rank{rank}"
    ended = kit.run(out, processes=2, faults=[{"rank": rank, "place": "update", "step": 7, "action": "usr1"}])
    assert ended.code == 1 and ended.errors.count("exitcode  : 75") == 2, ended.text[-3000:]
    assert kit.saved(out) == [5, 7]
    kit.finish(out, processes=2)
    kit.assert_twins(out, pair)


@pytest.mark.parametrize("whom", ["launcher", "group"])
def test_f3_a_signal_to_the_launcher_or_the_group_saves_and_leaves_no_process(kit, pair, whom):
    process = kit.start(whom, "--train.workers=1", processes=2, start_new_session=True)
    until = time.monotonic() + 120
    while kit.trained(whom) < 3:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    group = os.getpgid(process.pid)
    if whom == "launcher":
        process.send_signal(signal.SIGTERM)
    else:
        os.killpg(group, signal.SIGINT)
    process.communicate(timeout=90)
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
    last = kit.lines(whom, "metrics.jsonl")[-1]["step"]
    assert process.returncode != 0 and kit.saved(whom)[-1] == last < 20
    kit.finish(whom, "--train.workers=1", processes=2)
    kit.assert_twins(whom, pair)


def test_f3_a_signal_while_starting_ends_before_anything_is_trained(kit, twin):
    process = kit.start("early")
    while not (kit.folder / "early" / "recipe.yaml").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
    kit.finish("early")
    kit.assert_twins("early", twin)


def test_f30_a_finished_run_started_again_does_nothing(kit, twin):
    names = ("metrics.jsonl", "trace.jsonl", "recipe.yaml")
    before = [(kit.folder / twin / name).read_bytes() for name in names]
    manifest = kit.folder / twin / "checkpoints" / "00000020" / "manifest.json"
    stamp = manifest.stat().st_mtime_ns
    kit.finish(twin)
    assert [(kit.folder / twin / name).read_bytes() for name in names] == before
    assert manifest.stat().st_mtime_ns == stamp
