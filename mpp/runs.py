"""A run's folder: its recipe, what it ran on, its records; and whether the same command may go on with it."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from mpp.checkpoint import Checkpoint, newest, tidy
from mpp.config import differences, dump_recipe, load_recipe
from mpp.durable import cut_back, replace_file
from mpp.metrics import JsonLines

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
            raise ValueError(f"out: {self.path} exists and is not a run (no recipe.yaml in it); name another with --out")
        return False

    def _foreign(self) -> list[str]:
        """What lies in the folder and was not left there by a start that was killed before its recipe was written."""
        return sorted({entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")} - {"environment.json"})

    def stored(self, like: Recipe) -> Recipe:
        """The recipe that the run was begun with, or last went on with."""
        return load_recipe(type(like), [str(self.recipe)])

    def changes(self, recipe: Any, free: Collection[str]) -> list[str]:
        """Fields of the stored recipe that differ from `recipe` and are not free to change."""
        return differences(self.stored(recipe), recipe, free)

    def create(self, recipe: Any, environment: dict[str, Any]) -> None:
        """Folder, recipe with every value, environment; also rewrites them when a run goes on."""
        if self.is_main:
            self.path.mkdir(parents=True, exist_ok=True)
            # The recipe is what makes a folder a run, so it comes last: a kill in between leaves nothing half begun.
            replace_file(self.path / "environment.json", [json.dumps(environment, indent=1, ensure_ascii=False).encode()])
            replace_file(self.recipe, [dump_recipe(recipe).encode()])

    def environment(self) -> dict[str, Any]:
        return json.loads((self.path / "environment.json").read_text(encoding="utf-8"))

    def newest(self) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
        """The newest valid checkpoint, and the damaged ones with reasons; None if none was ever written."""
        if self.is_main and (self.path / "checkpoints").is_dir():
            tidy(self.path)
        return newest(self.path)

    def cut_back(self, step: int) -> None:
        """Records beyond a step are forgotten: the steps will be made again."""
        if self.is_main:
            for name in RECORDS:
                if (self.path / name).exists():
                    cut_back(self.path / name, step)
