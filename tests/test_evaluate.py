"""Frozen-feature evaluation of weights on disk: the same rows as in the loop, beside the untrained twin."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mpp import evaluate as job
from mpp import pretrain as pretraining
from mpp.config import load_recipe
from mpp.evaluate import EvaluateConfig
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
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 6)):
        for number, name in enumerate("abc"):
            (folder / "data" / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 120, (34, 34, 3), dtype=np.uint8) + np.uint8(50 * number)
                Image.fromarray(pixels).save(folder / "data" / split / name / f"{index}.png")
    (folder / "recipe.yaml").write_text(RECIPE)
    words = ["--data.kind=class_folders", f"--data.path={folder / 'data'}", f"--out={folder / 'run'}"]
    assert pretraining.pretrain(load_recipe(PretrainConfig, [str(folder / "recipe.yaml"), *words])) == 0
    return folder / "run"


def asked(*words) -> EvaluateConfig:
    return load_recipe(EvaluateConfig, [ASKED, "--threads=1", *words])


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
    assert all(row["image_size"] == [48, 48] for row in rows_of(tmp_path / "results.jsonl"))


@pytest.mark.parametrize(
    ("weights", "words", "message"),
    [
        ("nowhere", (), "nowhere|data"),
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
