"""A run's folder: its recipe, what it ran on, its records; and whether the same command may go on with it."""

import hashlib
import json
import os
import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from mpp import checkpoint
from mpp.config import differences, dump_recipe, load_recipe
from mpp.durable import check_can_write, cut_back, replace_file
from mpp.lock import hold, is_held, let_go
from mpp.metrics import JsonLines, commit
from mpp.optim import Extend

Recipe = TypeVar("Recipe")
MANY_STARTS = 4  # from the same step, before somebody is told
RECORDS = ("metrics.jsonl", "results.jsonl", "trace.jsonl", "skipped.jsonl", "unusual_updates.jsonl")


def _has_ended(place: Path, steps: int) -> bool:
    """Whether a checkpoint is of a run's end: of its last step, or where it was ended before."""
    try:
        found = checkpoint.opened(place, sizes_only=True)
        return found.step >= steps or bool(found.document("state/trainer.json")["trainer"].get("ended"))
    except checkpoint.CheckpointError:  # `newest` passes over it, and says so
        return False


def extension(stretches: Collection[Extend]) -> str:
    """The option that says so on a command line."""
    told = [
        {
            name: value
            for name, value in asdict(one).items()
            if name == "steps" or value != getattr(Extend(steps=1), name)
        }
        for one in stretches
    ]
    return f"--train.extend '{json.dumps(told)}'"


class Run:
    """The folder of one run; the main process alone writes in it."""

    def __init__(self, path: Path, is_main: bool):
        self.path, self.is_main = path, is_main
        self.metrics = JsonLines(path / "metrics.jsonl", is_main)
        self.results = JsonLines(path / "results.jsonl", is_main)
        self.trace = JsonLines(path / "trace.jsonl", is_main)
        self.skipped = JsonLines(path / "skipped.jsonl", is_main)
        self.unusual = JsonLines(path / "unusual_updates.jsonl", is_main)
        self.starts = JsonLines(path / "starts.jsonl", is_main)
        self._is_mine = False

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    def begin(
        self, recipe: Any, facts: dict[str, Any], free: Collection[str], split_sensitive: bool
    ) -> tuple[Path | None, list[str]]:
        """The folder, new or gone on with: the checkpoint to begin from, and notes for the log. Main process only;
        until `leave` or the end of the process no other writes here.

        facts: what could change numbers besides the recipe, for environment.json. free: dotted fields that may differ
        from one start to the next. split_sensitive: whether the split of a batch changes results. ValueError if
        something else lies here, or a run that would learn something else.
        """
        found, notes = None, list[str]()
        if not is_held(self.path):
            self._is_mine = True
            if before := hold(self.path, take_over=recipe.train.take_over):
                notes.append(f"taken over from a run that ended without a word: {before}")
        if self._is_begun():
            notes += self._check_same(recipe, free, facts, split_sensitive)
            checkpoint.tidy(self.path)
            found, damaged = checkpoint.newest(self.path)
            notes += [f"skipped a damaged checkpoint: {path}: {reason}" for path, reason in damaged]
            self._check_extension(recipe, found.step if found else 0)
        for file in self._records():  # what lies beyond the checkpoint will be made again
            if found:
                cut_back(file, found.step)
            else:
                file.unlink()
        self._create(recipe, facts)
        if not (found and _has_ended(found.path, facts["steps"])):
            notes += self._note_start(found.step if found else 0)
        return found.path if found else None, notes

    def leave(self) -> None:
        """Another process may write here now."""
        if self._is_mine:
            let_go(self.path)

    def _note_start(self, step: int) -> list[str]:
        """Starts are counted: a run that is ended again and again before it has saved gets nowhere."""
        self.starts.write({"from_step": step, "process": os.getpid(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
        before = [row.get("from_step") for row in self.starts.read()]
        again = next((count for count, other in enumerate(reversed(before)) if other != step), len(before))
        if again < MANY_STARTS:
            return []
        return [
            f"this is start number {again} from step {step:,}, and none of them saved: what ends them? If it is a time "
            f"limit, try a smaller train.checkpoint_every"
        ]

    def _is_begun(self) -> bool:
        """Whether there is something to go on with. A run that never took a step begins anew. ValueError if foreign."""
        try:
            if self.recipe.is_file():
                return (self.path / "checkpoints").is_dir() or self._has_trained()
            if self.path.exists() and (not self.path.is_dir() or self._foreign()):
                raise ValueError(f"out: {self.path} is not a run (no recipe.yaml in it); name another with --out")
        except OSError as error:
            raise ValueError(f"out: {self.path} cannot be used: {error}; name another with --out") from None
        return False

    def check(self) -> None:
        """ValueError where no run can lie or go on; looks only."""
        self._is_begun()
        check_can_write(self.path, "out")

    def _has_trained(self) -> bool:
        """Whether a step was recorded: a run whose checkpoints are gone is not overwritten by another recipe."""
        return any(isinstance(row.get("step"), int) and row["step"] > 0 for row in self.metrics.read())

    def _records(self) -> list[Path]:
        """The files that grow while a run trains."""
        files = [self.path / name for name in RECORDS]
        return [file for file in files if file.exists()]

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
        changes, notes = differences(stored, recipe, free), list[str]()
        if before["data"]["fingerprint"] != facts["data"]["fingerprint"]:
            counts = f"{before['data']['images']:,} images before, {facts['data']['images']:,} now"
            if recipe.train.allow_changed_data:
                notes.append(f"data changed: {counts}; from here on epochs are of those that are there now")
            else:
                changes.append(f"data: {counts}; names or sizes differ (--train.allow_changed_data true goes on)")
        if recipe.train.extend[: len(stored.train.extend)] != stored.train.extend:
            changes.append(
                f"train.extend: the run was extended by {extension(stored.train.extend)}; repeat that, with anything "
                f"new added at its end"
            )
        if split_sensitive and not any(_has_ended(place, facts["steps"]) for place in checkpoint.places(self.path)):
            changes += [
                f"{what}: {before[what]} -> {facts[what]} (dropout, mixed images, or random patches from the batch "
                f"depend on how a batch is split)"
                for what in ("processes", "micro_batch_size")
                if before[what] != facts[what]
            ]
        if changes:
            listed = "\n  ".join(changes)
            raise ValueError(
                f"{self.path} holds a run of another recipe; these differ:\n  {listed}\n"
                f"Take the changes back, or begin another run with --out. Its weights to begin with: "
                f"--init {self.path}"
                + ("" if stored.train.extend else "; a finished run longer: --train.extend.steps N")
            )
        names = ("threads", "processes", "device", "versions")
        return notes + [
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
        file = self.path / "environment.json"
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{file}: expected what the run was begun on, and it cannot be read: {error}. It says which data the "
                f"run has learned from; put it back, or begin another run with --out"
            ) from None

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
        tensors: dict[str, dict[str, Tensor]],
        documents: dict[str, Any],
        keep_last: int,
        keep_every: int,
    ) -> None:
        """A checkpoint, whole or not at all; afterwards only those to keep are there. Main process only."""
        for records in (self.metrics, self.results, self.trace, self.skipped, self.unusual):
            records.flush()
        facts = {"recipe": hashlib.sha256(self.recipe.read_bytes()).hexdigest(), "commit": commit()}
        checkpoint.save(self.path, step, tensors=tensors, documents=documents, facts=facts)
        checkpoint.prune(self.path, keep_last, keep_every)
