"""Numbers on disk: JSON lines for the run's metrics and results, trackers beside them, and a small table for people."""

import json
import math
import os
import statistics
import subprocess
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

Row = dict[str, Any]
USUAL = {"pool": "mean", "layer": -1}  # of an evaluation's setting: not told in a table where nothing else is asked


class JsonLines:
    """A file of one JSON object per line, appended and flushed at once; a no-op on other processes than the main."""

    def __init__(self, path: Path, active: bool = True):
        self.path, self.active = path, active

    def write(self, record: Row) -> None:
        if self.active:
            self._end_line()
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain(record), ensure_ascii=False) + "\n")

    def _end_line(self) -> None:
        """A last line that a killed process had begun is cut off; a whole one that lacks its end gets it."""
        if not self.path.exists() or not (size := self.path.stat().st_size):
            return
        with self.path.open("rb+") as file:
            file.seek(size - 1)
            if file.read(1) == b"\n":
                return
            file.seek(0)
            text = file.read()
            begin = text.rfind(b"\n") + 1
            if _row(text[begin:]) is None:
                file.truncate(begin)
            else:
                file.write(b"\n")

    def write_new(self, records: Iterable[Row], ignoring: Collection[str] = ("seconds", "commit")) -> None:
        """As `write`, without those that stand there already, whatever they took: what a killed process had made up
        for is made up for again."""
        if not self.active:
            return

        def told(record: Row) -> str:
            return json.dumps({name: value for name, value in plain(record).items() if name not in ignoring})

        there = {told(row) for row in self.read()}
        for record in records:
            if told(record) not in there:
                self.write(record)

    def flush(self) -> None:
        """To the disk itself: lines up to a checkpoint's step must not be lost where the checkpoint is not."""
        if self.active and self.path.exists():
            with self.path.open("ab") as file:
                os.fsync(file.fileno())

    def read(self) -> list[Row]:
        """All whole lines, none if there is no file; a last one that a killed process had begun is not whole.

        ValueError where another line is no JSON object.
        """
        if not self.path.exists():
            return []
        lines = [line for line in self.path.read_bytes().splitlines() if line.strip()]
        rows = []
        for number, line in enumerate(lines, 1):
            row = _row(line)
            if row is not None:
                rows.append(row)
            elif number < len(lines):
                raise ValueError(f"{self.path}, line {number}: is no JSON object; mend or remove it")
        return rows


def _row(line: bytes) -> Row | None:
    """A line's object; None where it is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def plain(record: Row) -> Row:
    """JSON has no NaN and no infinity: they become null, which says as much and can be read everywhere."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }


@cache
def commit() -> str | None:
    """The git revision of this source tree, `+` when it has changes; null outside a checkout."""
    folder = Path(__file__).parent
    try:
        run = lambda *words: subprocess.run(  # noqa: E731
            ["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        return run("rev-parse", "--short=12", "HEAD") + ("+" if run("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def table(rows: Iterable[Sequence[str]], header: Sequence[str]) -> str:
    """Left-aligned first column, right-aligned others."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def comparison(results: Sequence[Row]) -> str:
    """Newest trained top-1 scores beside the untrained backbone's, one line for each evaluation and setting."""
    rows = [row for row in results if row["metric"] == "top1"]
    scores: dict[str, dict[str, Row]] = {}
    for row in rows:
        alike = [other["setting"] for other in rows if other["evaluation"] == row["evaluation"]]
        scores.setdefault(f"{row['dataset']}, {row['evaluation']}, {_told(row['setting'], alike)}", {})[
            row["backbone"]
        ] = row
    lines = []
    for name, pair in scores.items():
        before, after = pair.get("untrained"), pair.get("trained")
        lines.append([name, _percent(before), _percent(after), _gain(before, after)])
    return table(lines, ["top-1 accuracy, %", "untrained", "trained", "gain"])


def _told(setting: Row, alike: Sequence[Row]) -> str:
    """What tells this setting from the others: its first entry (shots, k), whatever differs among them, and what is
    not as usual."""
    first = next(iter(setting))
    differ = [
        key
        for key in setting
        if key == first
        or any(other.get(key) != setting[key] for other in alike)
        or (key in USUAL and setting[key] != USUAL[key])
    ]
    return ", ".join(f"{key} {setting[key]}" for key in differ)


def _gain(before: Row | None, after: Row | None) -> str:
    """Points, and the spread of what each seed gained."""
    if not before or not after:
        return "-"
    pairs = list(zip(before.get("values", ()), after.get("values", ()), strict=False))
    alike = len(pairs) == before.get("seeds") == after.get("seeds") and len(pairs) > 1
    spread = f" ±{100 * statistics.stdev(two - one for one, two in pairs):.1f}" if alike else ""
    return f"{100 * (after['value'] - before['value']):+.1f}{spread}"


def _percent(row: Row | None) -> str:
    if row is None:
        return "-"
    spread = f" ±{100 * row['spread']:.1f}" if row.get("spread") is not None else ""
    return f"{100 * row['value']:.1f}{spread}"
