"""F9, F14, F15, F16: of two processes one dies, hangs, disagrees or makes NaN."""

import pytest

DEATHS = [
    {"step": 7, "place": "update", "action": "kill"},
    {"step": 10, "place": "evaluate", "action": "kill"},
    {"step": 10, "place": "save", "action": "kill"},
]


@pytest.mark.parametrize("fault", DEATHS, ids=lambda fault: fault["place"])
def test_f14_one_process_dies_and_all_end_and_the_same_command_goes_on(kit, pair, fault):
    out = f"dies_{fault['place']}"
    ended = kit.run(out, processes=2, faults=[fault | {"rank": 1}])
    assert ended.code == 1 and "exitcode  : -9" in ended.errors.split("Root Cause")[1]
    assert "process 0 lost another process" in ended.errors
    assert kit.saved(out)[-1] == 5
    kit.finish(out, processes=2)
    kit.assert_twins(out, pair)


def test_f15_a_process_that_hangs_ends_all_after_the_timeout_and_says_where_the_other_waited(kit, pair):
    out = "hangs"
    fault = {"rank": 1, "step": 7, "place": "update", "action": "stop"}
    ended = kit.run(out, "--train.timeout=5", processes=2, faults=[fault])
    assert ended.code == 1 and ended.seconds < 5 + 30 + 60  # the timeout, the launcher's patience, starting up
    assert "did not answer within train.timeout" in ended.errors.split("Root Cause")[1]
    assert "in _update" in ended.errors or "in agreed" in ended.errors
    assert kit.saved(out) == [5]
    kit.finish(out, processes=2)
    kit.assert_twins(out, pair)


def test_f15_a_process_that_sleeps_says_itself_where(kit):
    fault = {"rank": 1, "step": 7, "place": "update", "action": "hang"}
    ended = kit.run("sleeps", "--train.timeout=5", processes=2, faults=[fault])
    assert ended.code == 1 and "most recent call first" in ended.errors and "in act" in ended.errors


@pytest.mark.parametrize(
    ("word", "field"),
    [("--optim.lr=0.5", "recipe.optim.lr: 0.003 -> 0.5"), ("--train.seed=1", "recipe.train.seed: 0 -> 1")],
)
def test_f16_processes_that_disagree_are_refused_by_the_field(kit, word, field):
    ended = kit.run("disagree", processes=2, faults=[{"rank": 1, "place": "argument", "action": word}])
    assert ended.code == 1 and field in ended.errors.split("Root Cause")[1]
    assert not (kit.folder / "disagree").exists()


def test_a_mistake_of_one_process_alone_is_told_too(kit):
    fault = {"rank": 1, "place": "argument", "action": "--optim.lrr=0.5"}
    ended = kit.run("alone", processes=2, faults=[fault])
    assert ended.code == 1 and "pretrain_mpp, process 1" in ended.errors and "lrr" in ended.errors
    assert not (kit.folder / "alone").exists()


def test_f9_a_gradient_of_one_process_that_is_not_finite_is_left_out_by_both(kit, pair):
    fault = {"rank": 1, "step": 7, "last": 7, "place": "gradient", "action": "nan"}
    out = str(kit.finish("nan", "--train.checkpoint_every=1", "--train.keep_last=30", processes=2, faults=[fault]).name)
    from mpp.checkpoint import Checkpoint

    places = [Checkpoint(kit.folder / out / "checkpoints" / f"{step:08}") for step in (6, 7, 8)]
    six, seven, eight = ({k: v.tolist() for k, v in place.tensors("model.safetensors").items()} for place in places)
    assert six == seven != eight
    states = [place.tensors("state/optimizer.safetensors") for place in places]
    assert all(states[0][name].equal(states[1][name]) for name in states[0])
    rows, trace = kit.lines(out, "unusual_updates.jsonl"), kit.lines(out, "trace.jsonl")
    assert [(row["step"], row["process"]) for row in rows] == [(7, 0), (7, 1)]
    assert rows[0]["ids"] + rows[1]["ids"] == trace[6]["ids"]
    losses, twins = ([row["loss"] for row in kit.lines(run, "metrics.jsonl") if "loss" in row] for run in (out, pair))
    assert losses[:7] == twins[:7] and losses[8] != twins[8]


def test_f9_a_run_of_nothing_but_nan_stops_and_names_the_process(kit):
    fault = {"rank": 1, "step": 4, "last": 40, "place": "gradient", "action": "nan"}
    ended = kit.run("lost", "--train.max_nonfinite=3", processes=2, faults=[fault])
    last = ended.errors.split("Root Cause")[1]
    assert ended.code == 1 and "3 updates in a row, steps 4 to 6" in last and "process 1: loss" in last
    assert kit.lines("lost", "metrics.jsonl")[-1]["step"] == 5 and kit.saved("lost") == [5]


def test_f9b_a_spike_of_one_process_is_left_out_by_both(kit):
    fault = {"rank": 1, "step": 27, "last": 27, "place": "gradient", "action": "spike"}
    kit.finish("spike", "--optim.skip_above=10", "--train.steps=30", processes=2, faults=[fault])
    rows = kit.lines("spike", "unusual_updates.jsonl")
    assert [(row["step"], row["kind"], row["process"]) for row in rows] == [(27, "spike", 0), (27, "spike", 1)]
    records = [row for row in kit.lines("spike", "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in records if row["skipped_updates"]] == [27]
    assert all(row["loss"] is not None for row in records)
