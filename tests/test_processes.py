"""Real processes: two of them compute what one does, and a run killed with -9 ends as if it had not been."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mpp.checkpoint import Checkpoint

ROOT = Path(__file__).parent.parent
TOOL = str(ROOT / "tools" / "pretrain_mpp.py")
RECIPE = """
augment: {crop: {kind: shifted_crop, padding: 2}}
backbone: {kind: vit, patch_size: 8, image_size: 32, embed_dim: 32, depth: 2, num_heads: 2}
optim: {lr: 3.0e-3, warmup_steps: 5, weight_decay: 0.05}
train: {steps: 100, batch_size: 24, log_every: 1, eval_every: 50, checkpoint_every: 10, threads: 1, trace: true}
heldout: {images: 97, train_images: 97, pictures: 0}
evaluations: [{kind: knn, k: [5]}, {kind: fewshot, shots: [5, all]}]
data: {kind: class_folders, heldout: 0.3}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A recipe and 324 pictures in two classes: 97 of them are held out."""
    folder = tmp_path_factory.mktemp("processes")
    rng = np.random.default_rng(0)
    for number in range(324):
        corners = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)
        place = folder / "pictures" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(corners).resize((36, 34), Image.Resampling.BICUBIC).save(place / f"{number:03}.png")
    (folder / "tiny.yaml").write_text(RECIPE)
    return folder


def command(folder: Path, out: str, *overrides: str, processes: int = 1) -> tuple[list[str], dict[str, str]]:
    """What a person types, and the environment (DESIGN: two processes on a CPU)."""
    tool = [TOOL, str(folder / "tiny.yaml"), f"--data.path={folder / 'pictures'}", f"--out={folder / out}", *overrides]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    if processes == 1:
        return [sys.executable, *tool], environment
    launch = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", f"--num_processes={processes}",
        "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0",
    ]  # fmt: skip
    return [*launch, *tool], environment


def run(folder: Path, out: str, *overrides: str, processes: int = 1) -> Path:
    words, environment = command(folder, out, *overrides, processes=processes)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder / out


def lines(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def without_timings(rows: list[dict]) -> list[dict]:
    return [
        {k: v for k, v in row.items() if k not in ("images_per_second", "data_wait", "seconds", "run")} for row in rows
    ]


@pytest.fixture(scope="module")
def single(folder) -> Path:
    return run(folder, "single")


@pytest.mark.parametrize(
    ("out", "processes", "overrides"),
    [
        ("two", 2, ["--train.workers=2"]),
        ("accumulated", 1, ["--train.micro_batch_size=6", "--train.workers=2"]),
    ],
)
def test_processes_workers_and_accumulation_change_rounding_at_most(folder, single, out, processes, overrides):
    """100 steps of 24 images over 227: ten epochs; losses to 1e-5, sample ids, views and masks identical."""
    other = run(folder, out, *overrides, processes=processes)
    assert lines(other, "trace.jsonl") == lines(single, "trace.jsonl")
    ours, theirs = ([row for row in lines(r, "metrics.jsonl") if "loss" in row] for r in (other, single))
    assert len(ours) == 100
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], abs=1e-5)
    held_out = [
        [row["heldout_loss"] for row in lines(r, "metrics.jsonl") if "heldout_loss" in row] for r in (other, single)
    ]
    assert held_out[0] == pytest.approx(held_out[1], abs=1e-5) and held_out[0][0] == held_out[1][0]
    scores, expected = (without_timings(lines(r, "results.jsonl")) for r in (other, single))
    assert scores[:3] == expected[:3]  # untrained: the same weights, so the same digits for any number of processes
    assert [row["images"] for row in scores] == [97] * len(scores)


def test_workers_alone_change_no_bit(folder, single):
    other = run(folder, "workers", "--train.workers=2")
    assert without_timings(lines(other, "metrics.jsonl")) == without_timings(lines(single, "metrics.jsonl"))


def test_killed_with_9_in_the_second_epoch_and_started_again_equals_the_run_that_was_not(folder, single):
    words, environment = command(folder, "killed")
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = folder / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count('"loss"') >= 13):  # step 10 begins the second epoch
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 13 <= metrics.read_text().count('"loss"') < 100, "the kill came too late to show anything"
    resumed = run(folder, "killed")
    assert without_timings(lines(resumed, "metrics.jsonl")) == without_timings(lines(single, "metrics.jsonl"))
    assert without_timings(lines(resumed, "results.jsonl")) == without_timings(lines(single, "results.jsonl"))
    assert lines(resumed, "trace.jsonl") == lines(single, "trace.jsonl")
    for name in ("model.safetensors", "objective.safetensors", "state/optimizer.safetensors"):
        ours, theirs = (Checkpoint(r / "checkpoints" / "00000100").tensors(name) for r in (resumed, single))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_ctrl_c_saves_and_leaves_with_its_own_exit_code(folder):
    words, environment = command(folder, "stopped", "--train.steps=100000")
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 12/"):
            process.send_signal(signal.SIGINT)
            break
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 75 and "the same command goes on" in rest, rest + errors
    saved = max(path.name for path in (folder / "stopped" / "checkpoints").iterdir())
    assert int(saved) == lines(folder / "stopped", "metrics.jsonl")[-1]["step"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--train.stepz=3"], "train.steps"),
        (["--train.batch_size=10", "--train.micro_batch_size=4"], "micro_batch_size"),
        (["--data.path=/nonexistent"], "/nonexistent"),
    ],
)
def test_a_mistake_is_one_message_without_a_traceback_and_exit_code_2(folder, overrides, message):
    words, environment = command(folder, "refused")
    words = [word for word in words if word.split("=")[0] not in {o.split("=")[0] for o in overrides}] + overrides
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not (folder / "refused").exists()


FINETUNE = """
augment: {crop: {kind: shifted_crop, padding: 2}}
view: {crop: 1.0}
backbone: {kind: vit, patch_size: 8, image_size: 32, embed_dim: 32, depth: 2, num_heads: 2}
data: {kind: class_folders, heldout: 0.3}
labels: {kind: all, validation: 31}
frozen_blocks: 1
averaging: {decay: 0.9}
optim: {kind: sgd, lr: 0.05, warmup_steps: 5, layer_decay: 0.7}
train: {steps: 20, batch_size: 24, log_every: 1, eval_every: 10, threads: 1, trace: true}
"""


def test_fine_tuning_on_two_processes_is_that_on_one(folder):
    """Frozen blocks, an average, layer decay; every test image counted once."""
    (folder / "finetune.yaml").write_text(FINETUNE)
    runs = []
    for processes in (1, 2):
        words, environment = command(folder, f"finetuned{processes}", processes=processes)
        tool = words.index(TOOL)
        words[tool : tool + 2] = [str(ROOT / "tools" / "finetune.py"), str(folder / "finetune.yaml")]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        runs.append(folder / f"finetuned{processes}")
    one, two = (lines(r, "metrics.jsonl") for r in runs)
    assert lines(runs[0], "trace.jsonl") == lines(runs[1], "trace.jsonl")
    for name in ("loss", "validation_loss", "validation_accuracy"):
        values = [[row[name] for row in rows if name in row] for rows in (one, two)]
        assert values[0] == pytest.approx(values[1], abs=1e-5) and values[0]
    scores = [[(row["metric"], row["value"], row["images"]) for row in lines(r, "results.jsonl")] for r in runs]
    assert scores[0] == scores[1] and scores[0][0][2] == 97
