"""The job: what was pretraining worth? One run and some labels -> the table against training from scratch.

Every fine-tuning is a run of its own below `out`, so the ladder goes on where it was stopped, row by row; and several
processes, on devices of their own, can work on one ladder: each takes the rows that no other is at.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt, MinLen

from mpp import classify, evaluate
from mpp.architectures import ImageSize
from mpp.backbones import build_backbone
from mpp.checkpoint import Checkpoint, folder_name
from mpp.classify_recipe import SCRATCH, ClassifyConfig
from mpp.config import dump_recipe
from mpp.data.budget import All, PerClass
from mpp.data.sources import Source, open_splits
from mpp.durable import make_folder, replace_file, temporary
from mpp.evaluate import EvaluateConfig, recipe_of, run_of
from mpp.evaluation.features import name_of
from mpp.evaluation.fewshot import FewShot
from mpp.evaluation.kinds import Evaluation
from mpp.evaluation.knn import KNN
from mpp.evaluation.linear import LinearProbe
from mpp.evaluation.scores import at_edge, summary
from mpp.exit_codes import EXIT_STOPPED
from mpp.inspection import ladder as picture
from mpp.metrics import JsonLines, commit, table
from mpp.patches import pair
from mpp.pretrain_recipe import PretrainConfig
from mpp.run_folder import FolderInUse, hold, let_go
from mpp.runtime import StopSignal
from mpp.weight_files import check_exists
from mpp.weights import checkpoint_at, load_into

Budget = Annotated[int, Ge(1)] | Literal["all"]
MPP, LONGER, SUPERVISED = "mpp", "scratch, total compute", "supervised"
NAMES = {"fewshot": "few-shot", "knn": "kNN", "linear": "linear probe", "linear_augmented": "augmented linear probe"}
OWN = {  # where the ladder has a field of its own for what a fine-tuning names otherwise
    "out": "set out",
    "init": "set supervised for a start of other weights",
    "data": "set data",
    "labels": "set budgets, seeds and choose_on",
    "backbone": "set image_size, drop_path and dropout",
}


@dataclass(frozen=True, kw_only=True)
class LadderConfig:
    """The ladder after pretraining: frozen features and fine-tuning at several label budgets."""

    out: Path | None = None
    """folder of the fine-tuned runs, the table and the picture; null = runs/ladder_<run>"""
    data: Source | None = None
    """labelled images; null = those of the pretraining run"""
    budgets: Annotated[tuple[Budget, ...], MinLen(1)] = (10, 50, 500, "all")
    """labelled training images per class"""
    seeds: Annotated[int, Gt(0)] = 3
    """draws of the labels, and seeds of the fine-tuning, for each budget"""
    image_size: ImageSize | None = None
    """pixels of the fine-tuning; null = those of the pretraining"""
    frozen: tuple[Evaluation, ...] = field(default_factory=lambda: (KNN(k=(20,)), LinearProbe()))
    """frozen-feature scores on all labels; few-shot at every budget comes by itself"""
    finetune: ClassifyConfig = field(default_factory=ClassifyConfig)
    """the fine-tuning, the same for every start; data, labels, backbone, init, out and seed are the ladder's"""
    drop_path: Annotated[float, Ge(0), Lt(1)] | None = None
    """stochastic depth of the fine-tuned backbone, for every start; null = that of the pretraining"""
    dropout: Annotated[float, Ge(0), Lt(1)] | None = None
    """dropout of the fine-tuned backbone, for every start; null = that of the pretraining"""
    learning_rates: tuple[Annotated[float, Gt(0)], ...] = ()
    """swept alike for every start, on seed 0 of the first budget, chosen on a slice of its labels; none = optim.lr"""
    choose_on: Annotated[float, Gt(0)] = 0.2
    """share of the first budget's labels that the sweep is judged on"""
    total_compute: bool = True
    """one more row from scratch, given the images that pretraining saw as further steps, at the rate of scratch"""
    supervised: str | None = None
    """weights of a supervised pretraining, for a row of their own"""

    def faults(self) -> Iterator[tuple[str, str]]:
        """What the ladder sets by itself, and what its rows could not be compared with."""
        unset = ClassifyConfig()
        for name in ("out", "init", "data", "labels", "backbone", "early_stopping", "real", "predict", "predictions"):
            if getattr(self.finetune, name) != getattr(unset, name):
                yield f"finetune.{name}", f"is the ladder's own in each of its runs; {OWN.get(name, 'leave it out')}"
        if self.finetune.train.seed != unset.train.seed:
            yield "finetune.train.seed", "is the ladder's own in each of its runs; set seeds"
        if self.finetune.train.steps is None:
            yield "finetune.train.steps", "is null, and rows of equal length need a number of steps"
        if not 0 < self.choose_on < 1:
            yield "choose_on", f"{self.choose_on:g} is no share between 0 and 1"


@dataclass(frozen=True)
class Start:
    """One way to begin a fine-tuning: its name in the table, its weights, steps more than the recipe's."""

    name: str
    init: str
    more_steps: int = 0


@dataclass(frozen=True)
class Task:
    """A part of the ladder with a folder of its own; `do` returns an exit code."""

    folder: Path
    do: Callable[[], int]


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


def begin(weights: str, config: LadderConfig) -> "Ladder":
    """ValueError for whatever in run, recipe or data cannot work."""
    return Ladder(weights, config)


class Ladder:
    """The table of one pretraining run."""

    def __init__(self, weights: str, config: LadderConfig):
        check_exists(weights)
        run = run_of(weights)
        recipe = None if run is None else recipe_of(run)
        if run is None or not isinstance(recipe, PretrainConfig):
            raise ValueError(f"{weights} is no pretraining run (no recipe.yaml of one in it); name the run folder")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("a ladder is run by one process; start it with python, without a launcher of several")
        self.run, self.recipe, self.config = run, recipe, config
        self.checkpoint = checkpoint_at(Path(weights))
        self.out = config.out or Path("runs") / f"ladder_{run.name}"
        self.weights = self.out / "weights"
        self.data = config.data or recipe.data
        self.backbone = replace(recipe.backbone, **self._backbone_fields())
        self.starts = list(self._starts())
        self.train = open_splits(self.data).train
        for budget in config.budgets:  # too few images of a class are told now
            try:
                labels_of(budget, 0).split(self.train)
            except ValueError as error:
                raise ValueError(f"budgets: {budget}: {error}") from None
        self._check_weights(weights)
        self.rates: dict[str, float] = {}
        self.stop: StopSignal | None = None  # of the last run of this process
        self.is_waiting = False

    def go(self) -> int:
        """0 when the table is complete; 75 when a signal ended it before: the same command goes on."""
        self._pin()
        code = self._work([self._frozen_task(), *self._sweep_tasks()])
        if not code:
            self._choose_rates()
            code = self._work(self._rung_tasks())
        if not code:
            print(f"\n{self._write()}\n\n{self.out / 'ladder.txt'}, ladder.jsonl, ladder.png")
        return code

    def _backbone_fields(self) -> dict[str, Any]:
        """What the fine-tuning's backbone has of its own. ValueError for a kind of backbone without such a field."""
        config, found = self.config, {}
        for name in ("image_size", "drop_path", "dropout"):
            if (value := getattr(config, name)) is not None:
                if not hasattr(self.recipe.backbone, name):
                    raise ValueError(f"{name}: a backbone of kind {self.recipe.backbone.kind} has none; leave it out")
                found[name] = value
        return found

    def _starts(self) -> Iterator[Start]:
        yield Start(MPP, str(self.weights))
        yield Start(SCRATCH, SCRATCH)
        if self.config.total_compute:
            yield Start(LONGER, SCRATCH, self._pretraining_steps())
        if self.config.supervised:
            yield Start(SUPERVISED, self.config.supervised)

    def _pretraining_steps(self) -> int:
        """Fine-tuning steps that cost what pretraining did: images seen, by tokens per image."""
        seen = self.checkpoint.step * self.recipe.train.batch_size
        before = self.checkpoint.document("config.json")["pretrained_cfg"]["input_size"][-2:]
        now = before if self.backbone.image_size is None else pair(self.backbone.image_size)
        share = before[0] * before[1] / (now[0] * now[1])
        assert self.config.finetune.train.steps is not None, "the recipe's faults ask for steps"
        return round(seen * share / self.config.finetune.train.batch_size)

    def _check_weights(self, weights: str) -> None:
        """ValueError for weights that do not fit this backbone: now, not after the rows before them."""
        for spec in (weights, *([self.config.supervised] if self.config.supervised else [])):
            backbone = build_backbone(self.backbone, self.data.channels, seed=0)
            load_into(backbone, spec, self.config.finetune.resampling)

    def _pin(self) -> None:
        """A copy of the weights, so that all rows are of the same ones whatever becomes of the run.

        ValueError if the run has been trained further, or anew, since the ladder was begun.
        """
        stamp = self.checkpoint.files["model.safetensors"]["sha256"]
        hold(self.out)
        file, now = self.out / "ladder.json", {"run": str(self.run), "step": self.checkpoint.step, "sha256": stamp}
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else now
        if before.get("sha256") != stamp:
            raise ValueError(
                f"{self.out} is the ladder of step {before['step']:,} of {before.get('run')}, and {self.run} is now "
                f"other weights, of step {self.checkpoint.step:,}; go on with the ladder's own copy, tools/ladder.py "
                f"{self.weights} ... --out {self.out}, or name another folder with --out"
            )
        self.out.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            replace_file(file, [json.dumps(now).encode()])
        keep_weights(self.checkpoint, self.run / "recipe.yaml", self.weights)
        let_go(self.out)

    def _work(self, tasks: Iterable[Task]) -> int:
        """Does what no other process is at, then waits for the others; the exit code."""
        left = list(tasks)
        while left:
            busy = []
            for task in left:
                try:
                    hold(task.folder, patience=0)
                except FolderInUse:
                    busy.append(task)
                    continue
                try:
                    if code := task.do():
                        return code
                finally:
                    let_go(task.folder)
            if len(busy) == len(left) and (code := self._wait(len(busy))):
                return code
            left = busy
        return 0

    def _wait(self, count: int, seconds: float = 5.0) -> int:
        """A moment, while other processes do the rest; 75 where a signal came."""
        if not self.is_waiting:
            print(f"waiting    {count} of its runs are made by other processes")
        self.is_waiting = True
        try:
            time.sleep(seconds)
        except KeyboardInterrupt:  # before the first run of this process installed its own handler
            return EXIT_STOPPED
        return EXIT_STOPPED if self.stop is not None and self.stop.requested else 0

    def _frozen_task(self) -> Task:
        return Task(self.out / "frozen", self._frozen)

    def _frozen(self) -> int:
        """Few-shot at every budget, and the other frozen scores, trained beside untrained; once."""
        folder = self.out / "frozen"
        shots = tuple(self.config.budgets)
        evaluations = (FewShot(shots=shots, seeds=self.config.seeds), *self.config.frozen)
        threads = self.config.finetune.train.threads
        asked = EvaluateConfig(out=folder, data=self.data, baseline="random", evaluations=evaluations, threads=threads)
        done, text = folder / "done.yaml", dump_recipe(asked)
        if done.exists() and done.read_text(encoding="utf-8") == text:
            return 0
        (folder / "results.jsonl").unlink(missing_ok=True)
        job = evaluate.begin(str(self.weights), asked)
        self.stop = job.runtime.stop
        code = job.go()
        if not code:
            replace_file(done, [text.encode()])
        return code

    def _sweep_tasks(self) -> Iterator[Task]:
        """A run for every learning rate and start; more steps from scratch take the rate of scratch."""
        for start in self.starts:
            for rate in () if start.more_steps else self.config.learning_rates:
                yield self._task(self._sweep_config(start, rate))

    def _sweep_config(self, start: Start, rate: float) -> ClassifyConfig:
        return self._config(start, self.config.budgets[0], 0, rate, self.config.choose_on)

    def _choose_rates(self) -> None:
        """The learning rate of each start."""
        for start in self.starts:
            rates = () if start.more_steps else self.config.learning_rates
            found = {rate: last(self._sweep_config(start, rate).out, "validation_accuracy") for rate in rates}
            self.rates[start.name] = self._chosen(start, found)

    def _chosen(self, start: Start, found: dict[float, float]) -> float:
        """The rate with the highest accuracy, of equal ones the lowest; written down beside the others."""
        if not found:
            return self.rates[SCRATCH] if start.more_steps else self.config.finetune.optim.lr
        rates = sorted(found)
        best = max(rates, key=found.__getitem__)
        edge = at_edge(rates.index(best), len(rates))
        if edge:
            print(f"note       {start.name}: {best:g} is at the edge of learning_rates; a wider sweep may find better")
        record = {"start": start.name, "chosen": best, "at_edge": edge, "validation_accuracy": found}
        replace_file(self.out / f"sweep_{slug(start.name)}.json", [json.dumps(record, indent=1).encode()])
        return best

    def _rung_tasks(self) -> Iterator[Task]:
        """Every start at every budget with every seed, long ones last; the table grows with each."""
        for more in sorted({start.more_steps for start in self.starts}):
            for seed in range(self.config.seeds):
                for budget in self.config.budgets:
                    for start in (one for one in self.starts if one.more_steps == more):
                        yield self._task(self._config(start, budget, seed, self.rates[start.name]), self._write)

    def _task(self, config: ClassifyConfig, after: Callable[[], Any] = lambda: None) -> Task:
        """One fine-tuning. Its exit code is that of a stop also where the signal came with its last save."""
        assert config.out is not None

        def do() -> int:
            job = classify.begin(config)
            self.stop = job.runtime.stop
            code = job.go() or (EXIT_STOPPED if self.stop.requested else 0)
            if not code:
                after()
            return code

        return Task(config.out, do)

    def _config(self, start: Start, budget: Budget, seed: int, rate: float, validation: float = 0.0) -> ClassifyConfig:
        """The recipe of one fine-tuned run."""
        base = self.config.finetune
        labels = labels_of(budget, seed)
        train = replace(base.train, seed=seed)
        if start.more_steps:
            assert train.steps is not None
            train = replace(train, steps=train.steps + start.more_steps)
        name = f"{slug(start.name)}_{budget}_seed{seed}" + (f"_choose_lr{rate:g}" if validation else "")
        return replace(
            base,
            out=self.out / "runs" / name,
            init=start.init,
            data=self.data,
            labels=replace(labels, validation=validation) if validation else labels,
            backbone=self.backbone,
            optim=replace(base.optim, lr=rate),
            train=train,
        )

    def _results(self, start: Start, budget: Budget) -> dict[int, float]:
        """seed -> test accuracy of the fine-tuned runs that are done."""
        seeds = range(self.config.seeds)
        found = {seed: tested(self._config(start, budget, seed, self.rates[start.name]).out) for seed in seeds}
        return {seed: value for seed, value in found.items() if value is not None}

    def _frozen_cells(self) -> Iterator[Cell]:
        """Frozen features, trained and untrained. Few-shot draws images of its own, not those of the fine-tuning."""
        for row in rows(self.out / "frozen" / "results.jsonl"):
            if row["metric"] == "top1":
                name = NAMES.get(row["evaluation"], row["evaluation"])
                budget = row["setting"].get("shots", "all")  # kNN looks at every labelled image
                yield Cell(f"{name}, {row['backbone']} features", budget, row)

    def _tuned_cells(self) -> Iterator[Cell]:
        """Fine-tuned from every start, at every budget of which a seed is done."""
        for start in self.starts:
            for budget in self.config.budgets:
                if values := self._results(start, budget):
                    rate, steps = self.rates[start.name], self.config.finetune.train.steps
                    assert steps is not None
                    made = {"wanted_seeds": self.config.seeds, "values": values, "learning_rate": rate}
                    made |= {"steps": steps + start.more_steps, "init": start.init}
                    yield Cell(f"fine-tuned, {start.name}", budget, summary(list(values.values())) | made)

    def _gains(self) -> Iterator[Cell]:
        """Points of accuracy over each other start, paired by seed."""
        by_name = {start.name: start for start in self.starts}
        for name in (SCRATCH, LONGER, SUPERVISED):
            for budget in self.config.budgets if name in by_name else ():
                ours, theirs = (self._results(by_name[one], budget) for one in (MPP, name))
                if seeds := sorted(ours.keys() & theirs.keys()):
                    values = {seed: ours[seed] - theirs[seed] for seed in seeds}
                    made = {"wanted_seeds": self.config.seeds, "values": values}
                    yield Cell(f"gain over {name}", budget, summary(list(values.values())) | made, "top1_gain")

    def _write(self) -> str:
        """ladder.jsonl, ladder.png, and the table as text."""
        hold(self.out)
        scores, gains = [*self._frozen_cells(), *self._tuned_cells()], list(self._gains())
        budgets = dict.fromkeys((*self.config.budgets, *(cell.budget for cell in scores)))
        columns = {budget: f"{budget} per class" if budget != "all" else "all" for budget in budgets}
        cells = {(cell.method, cell.budget): cell.text for cell in (*scores, *gains)}
        names = dict.fromkeys(name for name, _ in cells)
        body = [[name, *(cells.get((name, budget), "-") for budget in columns)] for name in names]
        text = table(body, ["test accuracy, %", *columns.values()])
        known = {"run": str(self.run), "step": self.checkpoint.step, "dataset": name_of(self.data)}
        records = [
            known
            | {"method": cell.method, "budget": cell.budget, "metric": cell.metric}
            | {name: value for name, value in cell.row.items() if name not in ("run", "step", "dataset", "metric")}
            | {"commit": commit()}
            for cell in (*scores, *gains)
        ]
        replace_file(self.out / "ladder.jsonl", ["".join(json.dumps(r) + "\n" for r in records).encode()])
        replace_file(self.out / "ladder.txt", [(text + "\n").encode()])
        points = [(cell.method, self._images(cell.budget), cell.row["value"], cell.row["spread"]) for cell in scores]
        picture.draw(points, self.out / "ladder.png", f"{self.run}: {self.config.seeds} seeds")
        let_go(self.out)
        return text

    def _images(self, budget: Budget) -> int:
        """Labelled images of a budget, for the picture's axis."""
        return len(self.train) if budget == "all" else budget * len(self.train.classes or ())


def keep_weights(checkpoint: Checkpoint, recipe: Path, folder: Path) -> None:
    """A run of its own with one checkpoint and its recipe; whole or not there. Files are linked where the disk can."""
    place = folder / "checkpoints" / folder_name(checkpoint.step)
    if place.exists():
        return
    make_folder(place.parent)
    replace_file(folder / "recipe.yaml", [recipe.read_bytes()])
    fresh = temporary(place)
    try:
        shutil.copytree(checkpoint.path, fresh, copy_function=linked)
        os.rename(fresh, place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def linked(source: str, target: str) -> None:
    """No file of a checkpoint is ever written again, so two folders can share it."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def labels_of(budget: Budget, seed: int) -> All | PerClass:
    return All(seed=seed) if budget == "all" else PerClass(count=budget, seed=seed)


def rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a JSON lines file; none if it is not there."""
    return JsonLines(file).read()


def tested(run: Path | None) -> float | None:
    """Test accuracy of a finished classification run, None before."""
    assert run is not None
    found = [
        row["value"]
        for row in rows(run / "results.jsonl")  # evaluate adds rows of its own kinds to the same file
        if row["evaluation"] == "classification" and row["metric"] == "top1"
    ]
    return found[-1] if found else None


def last(run: Path | None, name: str) -> float:
    """The last value of a metric."""
    assert run is not None
    return [row[name] for row in rows(run / "metrics.jsonl") if row.get(name) is not None][-1]


def slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


def percent(value: float, spread: float | None, signed: bool = False) -> str:
    return f"{100 * value:{'+' if signed else ''}.1f}" + ("" if spread is None else f" ±{100 * spread:.1f}")
