"""Records on disk, and the small table at a run's end."""

import json

import pytest

from mpp.metrics import JsonLines, comparison, table


def test_what_json_cannot_say_becomes_null(tmp_path):
    file = JsonLines(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "loss": float("nan"), "norm": float("inf"), "lr": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": None, "norm": None, "lr": 0.5}
    JsonLines(tmp_path / "other.jsonl", active=False).write({"step": 1})
    assert not (tmp_path / "other.jsonl").exists() and JsonLines(tmp_path / "other.jsonl").read() == []


def row(backbone, step, value, evaluation="fewshot", metric="top1", spread=None, **setting):
    return {"dataset": "demo", "evaluation": evaluation, "metric": metric, "backbone": backbone, "step": step,
            "value": value, "spread": spread, "setting": setting | {"pool": "mean"}}  # fmt: skip


def test_the_newest_trained_score_stands_beside_the_untrained_one():
    text = comparison([
        row("untrained", 0, 0.3, shots=10, spread=0.011), row("untrained", 0, 0.5, "knn", k=20),
        row("untrained", 0, 0.9, "knn", metric="top5", k=20),
        row("trained", 5, 0.35, shots=10, spread=0.01), row("trained", 9, 0.425, shots=10, spread=0.02),
        row("trained", 9, 0.4, shots=25),
    ])  # fmt: skip
    assert text.splitlines() == [
        "top-1 accuracy, %        untrained    trained   gain",
        "demo, fewshot, shots 10  30.0 ±1.1  42.5 ±2.0  +12.5",
        "demo, knn, k 20               50.0          -      -",
        "demo, fewshot, shots 25          -       40.0      -",
    ]


def test_a_gain_has_the_spread_of_what_each_seed_gained():
    pair = [row("untrained", 0, 0.3, shots=10), row("trained", 5, 0.45, shots=10)]
    for one, values in zip(pair, ([0.2, 0.4], [0.3, 0.6]), strict=True):
        one |= {"values": values, "seeds": 2, "spread": 0.1, "setting": {"shots": 10, "pool": "both", "layer": -1}}
    assert comparison(pair).splitlines()[1].split("  ")[0] == "demo, fewshot, shots 10, pool both"
    assert comparison(pair).split()[-2:] == ["+15.0", "±7.1"]


def test_columns_line_up():
    lines = table([["a", "1.0"], ["bcd", "10.0"]], ["name", "value"]).splitlines()
    assert lines == ["name  value", "a       1.0", "bcd    10.0"]


def test_a_measurement_that_is_made_up_for_twice_stands_there_once(tmp_path):
    file = JsonLines(tmp_path / "results.jsonl")
    row = {"step": 4, "value": 0.5, "setting": {"size": (2, 3)}, "bad": float("nan"), "seconds": 1.0, "commit": "a"}
    file.write_new([row])
    file.write_new([row | {"seconds": 2.0, "commit": "b"}, row | {"step": 8}])
    assert [(found["step"], found["seconds"]) for found in file.read()] == [(4, 1.0), (8, 1.0)]
    JsonLines(tmp_path / "other.jsonl", active=False).write_new([row])
    assert not (tmp_path / "other.jsonl").exists()


def test_a_line_that_a_killed_process_had_begun_is_not_read_and_the_next_one_takes_its_place(tmp_path):
    file = JsonLines(tmp_path / "results.jsonl")
    for text in (b'{"step": 1}\n{"st', b'{"step": 1}\n{"step": 2}\n'.rstrip() + b" 3", b'{"step": 1}\n\xc3'):
        file.path.write_bytes(text)
        assert file.read() == [{"step": 1}]
        file.write({"step": 4})
        assert file.path.read_bytes() == b'{"step": 1}\n{"step": 4}\n'
    file.path.write_bytes(b'{"step": 1}')  # whole but for its end
    file.write({"step": 2})
    assert file.read() == [{"step": 1}, {"step": 2}]
    file.path.write_bytes(b'{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"results.jsonl, line 1"):
        file.read()
