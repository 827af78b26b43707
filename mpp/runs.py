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
RECORDS = ("metrics.jsonl", "results.jsonl", "trace.jsonl", "skipped.jsonl")


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

    def begin(
        self, recipe: Any, facts: dict[str, Any], free: Collection[str], split_sensitive: bool
    ) -> tuple[Path | None, list[str]]:
        """The folder, new or gone on with: the checkpoint to begin from, and notes for the log. Main process only.

        facts: what could change numbers besides the recipe, for environment.json. free: dotted fields that may differ
        from one start to the next. split_sensitive: whether the split of a batch changes results. ValueError if
        something else lies here, or a run that would learn something else.
        """
        found, notes = None, list[str]()
        if self._is_begun():
            notes = self._check_same(recipe, free, facts, split_sensitive)
            checkpoint.tidy(self.path)
            found, damaged = checkpoint.newest(self.path)
            notes += [f"skipped a damaged checkpoint: {path}: {reason}" for path, reason in damaged]
            self._check_extension(recipe, found.step if found else 0)
        for name in RECORDS:  # what lies beyond the checkpoint will be made again
            if (self.path / name).exists():
                cut_back(self.path / name, found.step if found else -1)
        self._create(recipe, facts)
        return found.path if found else None, notes

    def _is_begun(self) -> bool:
        """Whether there is something to go on with. A run that never saved begins anew. ValueError if foreign."""
        try:
            if self.recipe.is_file():
                return (self.path / "checkpoints").is_dir()
            if self.path.exists() and (not self.path.is_dir() or self._foreign()):
                raise ValueError(f"out: {self.path} is not a run (no recipe.yaml in it); name another with --out")
        except OSError as error:
            raise ValueError(f"out: {self.path} cannot be used: {error}; name another with --out") from None
        return False

    def _foreign(self) -> list[str]:
        """What lies in the folder and was not left there by a start that was killed before its recipe was written."""
        return sorted(
            {entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")} - {"environment.json"}
        )

    def stored(self, like: Recipe) -> Recipe:
        """The recipe that the run was begun with, or last went on with."""
        return load_recipe(type(like), [str(self.recipe)])

    def _check_same(
        self, recipe: Any, free: Collection[str], facts: dict[str, Any], split_sensitive: bool
    ) -> list[str]:
        """The same command on the same folder goes on; ValueError for a recipe or data that would learn something else.

        Returns notes on what differs and changes rounding only.
        """
        stored, before = self.stored(recipe), self._environment()
        changes = differences(stored, recipe, free)
        if before["data"]["fingerprint"] != facts["data"]["fingerprint"]:
            counts = f"{before['data']['images']:,} images before, {facts['data']['images']:,} now"
            changes.append(f"data: {counts}; names or sizes differ")
        if recipe.train.extend[: len(stored.train.extend)] != stored.train.extend:
            changes.append("train.extend: the run was extended; stretches can be added, not changed or taken away")
        if split_sensitive:
            changes += [
                f"{what}: {before[what]} -> {facts[what]} (with corruption.pool: batch or dropout this changes results)"
                for what in ("processes", "micro_batch_size")
                if before[what] != facts[what]
            ]
        if changes:
            listed = "\n  ".join(changes)
            raise ValueError(
                f"{self.path} holds a run of another recipe; these differ:\n  {listed}\n"
                f"Take the changes back, or begin another run with --out. Its weights to begin with: "
                f"--init {self.path}; a finished run longer: --train.extend.steps N"
            )
        names = ("threads", "processes", "device", "versions")
        return [
            f"{what} before: {before[what]}, now: {facts[what]}; results differ in rounding"
            for what in names
            if before[what] != facts[what]
        ]

    def _check_extension(self, recipe: Any, step: int) -> None:
        """Only a finished run is extended."""
        planned = self._environment()["steps"]
        if len(recipe.train.extend) > len(self.stored(recipe).train.extend) and step < planned:
            raise ValueError(
                f"train.extend: {self.path} is at step {step:,} of {planned:,}, and a finished run is extended. "
                f"Take train.extend away, let it finish, then extend it"
            )

    def _environment(self) -> dict[str, Any]:
        """What the run was begun on, or last went on on."""
        return json.loads((self.path / "environment.json").read_text(encoding="utf-8"))

    def _create(self, recipe: Any, environment: dict[str, Any]) -> None:
        """Folder, environment and recipe with every value; rewritten at each start."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # The recipe is what makes a folder a run, so it comes last: a kill in between leaves nothing half begun.
            described = json.dumps(environment, indent=1, ensure_ascii=False)
            replace_file(self.path / "environment.json", [described.encode()])
            replace_file(self.recipe, [dump_recipe(recipe).encode()])
        except OSError as error:
            raise ValueError(f"out: {self.path} cannot be written: {error}; name another with --out") from None

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
        for records in (self.metrics, self.results, self.trace, self.skipped):
            records.flush()
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
