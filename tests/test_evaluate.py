"""Frozen-feature evaluation of weights on disk: the same rows as in the loop, beside the untrained twin."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from mpp import evaluate as job
from mpp import pretrain as pretraining
from mpp.config import load_recipe
from mpp.evaluate import EvaluateConfig
from mpp.evaluation.fewshot import FewShot
from mpp.pretrain_recipe import PretrainConfig

RECIPE = """
backbone: {kind: vit, patch_size: 8, image_size: 32, embed_dim: 32, depth: 2, num_heads: 2}
optim: {lr: 1.0e-3, warmup_steps: 1}
train: {steps: 4, batch_size: 8, threads: 1, seed: 5}
heldout: {images: 10, train_images: 20, pictures: 0, min_information: 0}
evaluations: [{kind: knn, k: [3]}, {kind: fewshot, shots: [2], seeds: 2}]
"""
ASKED = "--evaluations=[{kind: knn, k: [3]}, {kind: fewshot, shots: [2], seeds: 2}]"


@pytest.fixture(scope="module")
def run(tmp_path_factory, write_classes) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    write_classes(folder / "data", train=12, test=6)
    (folder / "recipe.yaml").write_text(RECIPE)
    words = ["--data.kind=class_folders", f"--data.path={folder / 'data'}", f"--out={folder / 'run'}"]
    assert pretraining.pretrain(load_recipe(PretrainConfig, [str(folder / "recipe.yaml"), *words])) == 0
    return folder / "run"


def asked(*words, evaluations=ASKED) -> EvaluateConfig:
    return load_recipe(EvaluateConfig, [evaluations, "--threads=1", *words])


def scores(rows) -> dict:
    return {
        (row["backbone"], row["evaluation"], row["metric"]): (row["value"], row["spread"], row["images"])
        for row in rows
    }


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_rows_are_those_of_the_loop_also_for_the_untrained_twin(run, tmp_path):
    config = asked("--baseline=random", f"--out={tmp_path}")
    assert job.begin(str(run), config).go() == 0
    found = rows_of(tmp_path / "results.jsonl")
    assert scores(found) == scores(rows_of(run / "results.jsonl"))
    assert {row["step"] for row in found} == {4} and len({row["backbone"] for row in found}) == 2


def test_rows_are_added_to_the_run_s_own_and_lost_by_no_restart(run):
    before = rows_of(run / "results.jsonl")
    assert job.begin(str(run / "checkpoints" / "00000004"), asked()).go() == 0
    after = rows_of(run / "results.jsonl")
    assert after[: len(before)] == before and len(after) > len(before)
    words = [str(run / "recipe.yaml")]
    assert pretraining.pretrain(load_recipe(PretrainConfig, words)) == 0
    assert rows_of(run / "results.jsonl") == after


def test_another_resolution_says_so(run, tmp_path):
    assert job.begin(str(run), asked("--image_size=48", f"--out={tmp_path}")).go() == 0
    assert all(row["setting"]["image_size"] == [48, 48] for row in rows_of(tmp_path / "results.jsonl"))


def test_all_layers_and_both_poolings_equal_their_parts(run, tmp_path):
    words = "--evaluations=[{kind: knn, k: [3], layers: %s, pool: %s}]"
    everything, some = words % ("all", "[both, mean]"), words % ("[1, 0]", "[mean]")
    assert job.begin(str(run), asked(f"--out={tmp_path / 'all'}", evaluations=everything)).go() == 0
    assert job.begin(str(run), asked(f"--out={tmp_path / 'two'}", evaluations=some)).go() == 0
    every = {(r["setting"]["pool"], r["setting"]["layer"]): r["value"] for r in rows_of(tmp_path / "all/results.jsonl")}
    two = {(r["setting"]["pool"], r["setting"]["layer"]): r["value"] for r in rows_of(tmp_path / "two/results.jsonl")}
    assert every.keys() == {("both", 0), ("both", 1), ("mean", 0), ("mean", 1)}
    assert {at: every[at] for at in two} == two
    backbone = job.load_backbone(str(run))
    found = backbone.eval().features(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), ("mean", "cls", "both"))
    assert torch.equal(found["both", -1], torch.cat([found["cls", -1], found["mean", -1]], 1))
    assert found["both", -1].shape[1] == backbone.width("both") == 64


def test_one_evaluation_without_an_answer_costs_no_other_its_rows(run, tmp_path, monkeypatch, capsys):
    calls = []

    def fails(self, features):
        calls.append(1)
        raise ValueError("all features are equal")

    monkeypatch.setattr(FewShot, "__call__", fails)
    assert job.begin(str(run), asked("--baseline=random", f"--out={tmp_path}")).go() == 1
    assert len(calls) == 2 and "fewshot gave no score for the trained backbone: all features" in capsys.readouterr().out
    assert {row["evaluation"] for row in rows_of(tmp_path / "results.jsonl")} == {"knn"}


def test_shots_that_a_picture_is_missing_for_cost_the_others_nothing(run, tmp_path, write_classes, capsys):
    write_classes(tmp_path / "data", train=4, test=4)
    next((tmp_path / "data" / "train").glob("*/*")).write_bytes(b"no picture")
    words = ["--data.kind=class_folders", f"--data.path={tmp_path / 'data'}", f"--out={tmp_path / 'out'}"]
    three = [f"{{kind: {kind}, shots: [4, 2, all], layers: all}}" for kind in ("fewshot", "knn", "linear")]
    kinds = f"--evaluations=[{', '.join(three)}]"
    assert job.begin(str(run), asked(*words, evaluations=kinds)).go() == 1
    told = capsys.readouterr().out
    assert told.count("gave no other score for the trained backbone") == 3 and "has 3 that can be read" in told
    found = [row for row in rows_of(tmp_path / "out" / "results.jsonl") if row["metric"] == "top1"]
    assert {row["evaluation"] for row in found} == {"fewshot", "knn", "linear"}
    shots = [(row["evaluation"], row["setting"]["shots"], row["setting"]["layer"]) for row in found]
    assert all(
        shots.count((kind, few, layer))
        for kind in ("fewshot", "knn", "linear")
        for few in (2, "all")
        for layer in (0, 1)
    )
    assert not any(few == 4 for _, few, _ in shots)


def test_a_signal_is_heeded_after_each_evaluation_and_what_was_measured_is_kept(run, tmp_path):
    evaluating = job.begin(str(run), asked(f"--out={tmp_path}"))
    evaluating.runtime.stop.requested = True
    assert evaluating.go() == 75
    assert {row["evaluation"] for row in rows_of(tmp_path / "results.jsonl")} == {"knn"}


def test_a_signal_in_the_last_evaluation_leaves_nothing_to_stop(run, tmp_path, monkeypatch, capsys):
    evaluating = job.begin(str(run), asked(f"--out={tmp_path}"))
    last = type(evaluating.config.evaluations[-1])
    measure = last.__call__

    def signalled(self, features):
        yield from measure(self, features)
        evaluating.runtime.stop.requested = True

    monkeypatch.setattr(last, "__call__", signalled)
    assert evaluating.go() == 0 and "top-1 accuracy, %" in capsys.readouterr().out


def test_what_is_measured_again_stands_there_once(run, tmp_path):
    for _ in range(2):
        assert job.begin(str(run), asked(f"--out={tmp_path}")).go() == 0
    found = rows_of(tmp_path / "results.jsonl")
    assert len(found) == len({json.dumps([row["evaluation"], row["metric"], row["setting"]]) for row in found})


def test_a_bare_file_is_evaluated_with_the_architecture_of_the_recipe(run, tmp_path):
    file = tmp_path / "weights.safetensors"
    shutil.copy(run / "checkpoints" / "00000004" / "model.safetensors", file)
    statistics = yaml.safe_load((run / "recipe.yaml").read_text())["backbone"]
    described = [f"--backbone={yaml.safe_dump(statistics, default_flow_style=True)}"]
    data = ["--data.kind=class_folders", f"--data.path={run.parent / 'data'}"]
    with pytest.raises(ValueError, match="names no architecture"):
        job.begin(str(file), asked(*data))
    assert job.begin(str(file), asked(*described, *data, "--baseline=random", f"--out={tmp_path / 'out'}")).go() == 0
    found = {
        key: score for key, score in scores(rows_of(tmp_path / "out" / "results.jsonl")).items() if "trained" in key
    }
    assert found.items() <= scores(rows_of(run / "results.jsonl")).items()
    with pytest.raises(ValueError, match="brings its own architecture"):
        job.begin(str(run), asked(*described))


def test_a_folder_below_a_run_is_no_checkpoint_of_it(run):
    (run / "exports" / "timm").mkdir(parents=True)
    assert (
        job.run_of(str(run / "exports" / "timm")) is None and job.run_of(str(run / "checkpoints" / "00000004")) == run
    )


@pytest.mark.parametrize(
    ("weights", "words", "message"),
    [
        ("nowhere", (), "nowhere: no such file or folder"),
        ("RUN", ("--data.kind=folder", "--data.path=DATA"), "labels"),
        ("RUN", ("--data.kind=demo", "--data.channels=1"), "channels"),
        ("RUN", ("--evaluations=[{kind: fewshot, shots: [50]}]",), "50 shots"),
        ("RUN", ("--evaluations=[{kind: knn, layers: [-9]}]",), "-9"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_by_name(run, weights, words, message):
    words = [word.replace("DATA", str(run.parent / "data")) for word in words]
    config = load_recipe(EvaluateConfig, ["--threads=1", *words])
    with pytest.raises(ValueError, match=message):
        job.begin(weights.replace("RUN", str(run)), config)
