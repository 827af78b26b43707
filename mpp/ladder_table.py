"""The ladder's table: its cells from the files of the runs, and the text, JSON lines and picture made of them."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mpp.durable import replace_file
from mpp.inspection import ladder as picture
from mpp.ladder_recipe import Budget, in_order
from mpp.metrics import JsonLines, commit, table

NAMES = {"fewshot": "few-shot", "knn": "kNN", "linear": "linear probe", "linear_augmented": "augmented linear probe"}


@dataclass(frozen=True)
class Cell:
    """One entry of the table: accuracies of the seeds that are done, and how they came about."""

    method: str
    budget: Budget
    row: dict[str, Any]
    """value, spread, interval and seeds, as `summary` tells them, and whatever else is known"""
    metric: Literal["top1", "top1_gain"] = "top1"

    @property
    def text(self) -> str:
        """As in the table, 52.2 ±0.4, and how many seeds are done where some are not."""
        done, wanted = self.row["seeds"], self.row.get("wanted_seeds")
        missing = f" ({done} of {wanted})" if wanted and done < wanted else ""
        return percent(self.row["value"], self.row["spread"], signed=self.metric == "top1_gain") + missing


def frozen_cells(file: Path, dataset: str) -> Iterator[Cell]:
    """Frozen features, trained and untrained, as evaluate wrote them.

    A method's name says whatever tells it from others of its kind: k, penalty, layer, data. Frozen scores draw images
    of their own, not those of the fine-tuning. Measured again, with more seeds, the last counts. dataset: the
    ladder's, which is not said.
    """
    latest = {}
    for row in JsonLines(file).read():
        what = (row[name] for name in ("evaluation", "dataset", "backbone", "metric"))
        latest[(*what, json.dumps(row["setting"]))] = row
    rows = [row for row in latest.values() if row["metric"] == "top1"]
    for row in rows:
        alike = [other for other in rows if other["evaluation"] == row["evaluation"]]
        differ = [f"{key} {value}" for key, value in row["setting"].items() if key != "shots" and _differs(key, alike)]
        if row["dataset"] != dataset:
            differ.append(f"on {row['dataset']}")
        kind = str(row["evaluation"])
        name = NAMES.get(kind, kind) + (f" ({', '.join(differ)})" if differ else "")
        budget = row["setting"].get("shots", "all")
        yield Cell(f"{name}, {row['backbone']} features", budget, row)


def _differs(key: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(row["setting"].get(key) != rows[0]["setting"].get(key) for row in rows)


def write(
    out: Path,
    known: Mapping[str, Any],
    budgets: Sequence[Budget],
    cells: Sequence[Cell],
    images: Callable[[Budget], int],
    conditions: Iterable[str] = (),
) -> str:
    """ladder.txt, ladder.jsonl and ladder.png; the table as text.

    known: what every line of ladder.jsonl says. images: labelled images of a budget, for the picture's axis.
    conditions: lines below the table.
    """
    budgets = in_order([*budgets, *(cell.budget for cell in cells)])
    texts = {(cell.method, cell.budget): cell.text for cell in cells}
    names = dict.fromkeys(cell.method for cell in cells)
    body = [[name, *(texts.get((name, budget), "-") for budget in budgets)] for name in names]
    heads = [f"{budget} per class" if budget != "all" else "all" for budget in budgets]
    text = "\n".join([table(body, ["test accuracy, %", *heads]), *conditions])
    if answers := [answer(cell) for cell in cells if cell.metric == "top1_gain"]:
        text += "\n\nDid pretraining help? Points of accuracy, over seeds that differ in labels and training\n"
        text += "\n".join(f"  {line}" for line in answers)
    records = [
        {**known, "method": cell.method, "budget": cell.budget, "metric": cell.metric}
        | {name: value for name, value in cell.row.items() if name not in ("run", "step", "metric")}
        | {"commit": commit()}
        for cell in cells
    ]
    replace_file(out / "ladder.jsonl", ["".join(json.dumps(record) + "\n" for record in records).encode()])
    replace_file(out / "ladder.txt", [(text + "\n").encode()])
    points = [
        (cell.method, images(cell.budget), cell.row["value"], cell.row["spread"])
        for cell in cells
        if cell.metric == "top1" and cell.row.get("dataset", known["dataset"]) == known["dataset"]
    ]
    picture.draw(points, out / "ladder.png", str(known["run"]))
    return text


def answer(cell: Cell) -> str:
    """A gain in a sentence: with its interval where there are seeds for one, and whether that leaves out zero."""
    row, where = cell.row, "all labels" if cell.budget == "all" else f"{cell.budget} per class"
    text = f"{cell.method}, {where}: {percent(row['value'], None, signed=True)}"
    if row["interval"] is None:
        return f"{text} with one seed; more seeds would say how far that is chance"
    low, high = row["interval"]
    verdict = "it helped" if low > 0 else "it harmed" if high < 0 else "cannot be told from chance"
    return f"{text}, 95 % interval {100 * low:+.1f} to {100 * high:+.1f} ({row['seeds']} seeds): {verdict}"


def percent(value: float, spread: float | None, signed: bool = False) -> str:
    return f"{100 * value:{'+' if signed else ''}.1f}" + ("" if spread is None else f" ±{100 * spread:.1f}")
