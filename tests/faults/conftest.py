"""Pictures, a recipe, and real processes with faults put into them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mpp.checkpoint import newest, verify

ROOT = Path(__file__).parent.parent.parent
RECIPE = """
augment: {crop: {kind: shifted_crop, padding: 2}}
backbone: {kind: vit, patch_size: 8, image_size: 32, embed_dim: 32, depth: 2, num_heads: 2}
optim: {lr: 3.0e-3, warmup_steps: 5, weight_decay: 0.05}
train: {steps: 20, batch_size: 24, log_every: 1, eval_every: 10, checkpoint_every: 5, threads: 1, trace: true}
heldout: {images: 30, train_images: 30, pictures: 0}
data: {kind: class_folders, heldout: 0.3}
"""
TIMINGS = ("images_per_second", "data_wait", "seconds", "run")


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.faults)


@dataclass
class Ended:
    """A command that has ended: exit code, what it printed, and how long it took."""

    code: int
    out: str
    errors: str
    seconds: float

    @property
    def text(self) -> str:
        return self.out + self.errors


class Kit:
    """Runs in one folder, with or without faults."""

    def __init__(self, folder: Path):
        self.folder = folder

    def command(self, out: str, *words: str, processes: int = 1, faults: Any = ()) -> list[str]:
        tool = [str(ROOT / "tools" / "pretrain_mpp.py"), str(self.folder / "tiny.yaml")]
        tool += [f"--data.path={self.folder / 'pictures'}", f"--out={self.folder / out}", *words]
        if faults:
            tool = [str(Path(__file__).parent / "inject.py"), json.dumps(list(faults)), *tool]
        if processes == 1:
            return [sys.executable, *tool]
        launch = ["--multi_gpu", f"--num_processes={processes}", "--num_machines=1", "--mixed_precision=no"]
        launch += ["--dynamo_backend=no", "--main_process_port=0"]
        return [sys.executable, "-m", "accelerate.commands.launch", *launch, *tool]

    def start(
        self, out: str, *words: str, processes: int = 1, faults: Any = (), within: Sequence[str] = (), **options: Any
    ) -> subprocess.Popen:
        """within: a command that the command is an argument of."""
        environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = self.command(out, *words, processes=processes, faults=faults)
        return subprocess.Popen([*within, *command], env=environment, **(pipes | options))

    def run(self, out: str, *words: str, timeout: float = 200, **options: Any) -> Ended:
        began = time.monotonic()
        process = self.start(out, *words, **options)
        try:
            told, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return Ended(process.returncode, told, errors, time.monotonic() - began)

    def finish(self, out: str, *words: str, **options: Any) -> Path:
        """A run to its end, which must be a good one."""
        ended = self.run(out, *words, **options)
        assert ended.code == 0, ended.text[-4000:]
        return self.folder / out

    def trained(self, out: str) -> int:
        """The step that a run's records have got to; 0 before there are any."""
        try:
            text = (self.folder / out / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return 0
        rows = [json.loads(line) for line in text.split("\n")[:-1]]  # what follows the last one is not written yet
        return max((row["step"] for row in rows if "loss" in row), default=0)

    @staticmethod
    def kill(process: subprocess.Popen) -> None:
        """kill -9 of a command and of all that it started, directly or not, those it started last first."""
        found = [process.pid]
        for place in found:
            try:
                for thread in os.listdir(f"/proc/{place}/task"):
                    found += [int(child) for child in Path(f"/proc/{place}/task/{thread}/children").read_text().split()]
            except OSError:  # it has ended meanwhile
                continue
        for pid in reversed(found):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.communicate()

    def lines(self, out: str, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.folder / out / name).read_text().splitlines()]

    def assert_twins(self, one: str, other: str) -> None:
        """Two runs with the same weights, optimiser, learning rates, metrics and sample trace, to the bit."""
        first, second = (newest(self.folder / out)[0] for out in (one, other))
        assert first is not None and second is not None and first.step == second.step
        assert first.files.keys() == second.files.keys()
        for name in first.files:
            if name.endswith(".safetensors"):
                ours, theirs = first.tensors(name), second.tensors(name)
                assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours), name
        for name in ("metrics.jsonl", "trace.jsonl"):
            ours, theirs = (
                [{key: value for key, value in row.items() if key not in TIMINGS} for row in self.lines(out, name)]
                for out in (one, other)
            )
            assert ours == theirs, name

    def saved(self, out: str) -> list[int]:
        """Steps of the checkpoints, each of them whole; nothing else may lie beside them."""
        places = sorted((self.folder / out / "checkpoints").iterdir())
        for place in places:
            verify(place)
        return [int(place.name) for place in places]


def furnish(folder: Path) -> Path:
    """A recipe and 120 pictures in two classes; 36 of them are held out, and 84 are 3.5 batches."""
    rng = np.random.default_rng(0)
    for number in range(120):
        corners = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)
        place = folder / "pictures" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(corners).resize((36, 34), Image.Resampling.BICUBIC).save(place / f"{number:03}.png")
    (folder / "tiny.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="session")
def kit(tmp_path_factory) -> Kit:
    return Kit(furnish(tmp_path_factory.mktemp("faults")))


@pytest.fixture(scope="session")
def twin(kit) -> str:
    """The run of one process that nothing happens to."""
    kit.finish("twin")
    return "twin"


@pytest.fixture(scope="session")
def pair(kit) -> str:
    """The same on two processes."""
    kit.finish("pair", processes=2)
    return "pair"
