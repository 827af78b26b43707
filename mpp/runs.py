"""A run's folder: its recipe, what it ran on, its records; and whether the same command may go on with it."""

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from torch.optim import Optimizer

from mpp import checkpoint
from mpp.checkpoint import Checkpoint
from mpp.config import differences, dump_recipe, load_recipe
from mpp.durable import cut_back, replace_file
from mpp.metrics import JsonLines, commit
from mpp.optimizer_state import load_optimizer_state, optimizer_state
from mpp.weights import load_task, objective_config, objective_tensors, timm_config

Recipe = TypeVar("Recipe")
RECORDS = ("metrics.jsonl", "results.jsonl", "trace.jsonl")


class Run:
    """The folder of one run; the main process alone writes in it."""

    def __init__(self, path: Path, is_main: bool):
        self.path, self.is_main = path, is_main
        self.metrics = JsonLines(path / "metrics.jsonl", is_main)
        self.results = JsonLines(path / "results.jsonl", is_main)
        self.trace = JsonLines(path / "trace.jsonl", is_main)
        self.skipped = JsonLines(path / "skipped.jsonl", is_main)

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    def exists(self) -> bool:
        """Whether a run was begun here. ValueError if something else is."""
        if self.recipe.is_file():
            return True
        if self.path.exists() and (not self.path.is_dir() or self._foreign()):
            raise ValueError(
                f"out: {self.path} exists and is not a run (no recipe.yaml in it); name another with --out"
            )
        return False

    def _foreign(self) -> list[str]:
        """What lies in the folder and was not left there by a start that was killed before its recipe was written."""
        return sorted(
            {entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")} - {"environment.json"}
        )

    def stored(self, like: Recipe) -> Recipe:
        """The recipe that the run was begun with, or last went on with."""
        return load_recipe(type(like), [str(self.recipe)])

    def check_same(self, recipe: Any, free: Collection[str], facts: dict[str, Any]) -> list[str]:
        """The same command on the same folder goes on; ValueError for a recipe or data that would learn something else.

        free: dotted fields that may differ. Returns notes on what differs and changes rounding only.
        """
        stored, before = (
            self.stored(recipe),
            json.loads((self.path / "environment.json").read_text(encoding="utf-8")),
        )
        changes = differences(stored, recipe, free)
        if before["data"]["fingerprint"] != facts["data"]["fingerprint"]:
            counts = f"{before['data']['images']:,} images before, {facts['data']['images']:,} now"
            changes.append(f"data: {counts}; names or sizes differ")
        if recipe.train.extend[: len(stored.train.extend)] != stored.train.extend:
            changes.append("train.extend: the run was extended; stretches can be added, not changed or taken away")
        if changes:
            listed = "\n  ".join(changes)
            raise ValueError(
                f"{self.path} holds a run of another recipe; these differ:\n  {listed}\n"
                f"Take the changes back, or begin another run with --out. Its weights to begin with: "
                f"--init {self.path}; a finished run longer: --train.extend.steps N"
            )
        return [
            f"{before[what]} {what} before, {facts[what]} now: results differ in rounding"
            for what in ("threads", "processes")
            if before[what] != facts[what]
        ]

    def create(self, recipe: Any, environment: dict[str, Any]) -> None:
        """Folder, recipe with every value, environment; also rewrites them when a run goes on."""
        if self.is_main:
            self.path.mkdir(parents=True, exist_ok=True)
            # The recipe is what makes a folder a run, so it comes last: a kill in between leaves nothing half begun.
            replace_file(
                self.path / "environment.json",
                [json.dumps(environment, indent=1, ensure_ascii=False).encode()],
            )
            replace_file(self.recipe, [dump_recipe(recipe).encode()])

    def newest(self) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
        """The newest valid checkpoint, and the damaged ones with reasons; None if none was ever written."""
        if self.is_main and (self.path / "checkpoints").is_dir():
            checkpoint.tidy(self.path)
        return checkpoint.newest(self.path)

    def cut_back(self, step: int) -> None:
        """Records beyond a step are forgotten: the steps will be made again."""
        if self.is_main:
            for name in RECORDS:
                if (self.path / name).exists():
                    cut_back(self.path / name, step)

    def save(
        self,
        step: int,
        task: Any,
        optimizer: Optimizer,
        names: list[str],
        trainer: dict[str, Any],
        keep_last: int,
    ) -> None:
        """A checkpoint, whole or not at all: a timm folder, head and mask token beside it, state/ for going on."""
        if not self.is_main:
            return
        tensors, state = optimizer_state(optimizer, names)
        checkpoint.save(
            self.path,
            step,
            tensors={
                "model.safetensors": task.backbone.model.state_dict(),
                "objective.safetensors": objective_tensors(task),
                "state/optimizer.safetensors": tensors,
            },
            documents={
                "config.json": timm_config(task.backbone),
                "objective.json": objective_config(task),
                "state/trainer.json": {"trainer": trainer, "optimizer": state},
            },
            facts={"recipe": hashlib.sha256(self.recipe.read_bytes()).hexdigest(), "commit": commit()},
        )
        checkpoint.prune(self.path, keep_last)

    def load(self, found: Checkpoint, task: Any, optimizer: Optimizer, names: list[str]) -> dict[str, Any]:
        """Weights and optimiser as they were; the trainer's state."""
        load_task(task, found)
        state = found.document("state/trainer.json")
        load_optimizer_state(optimizer, names, found.tensors("state/optimizer.safetensors"), state["optimizer"])
        return state["trainer"]
