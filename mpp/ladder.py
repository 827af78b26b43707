"""The job: what was pretraining worth? One run and some labels -> the table against training from scratch.

Every fine-tuning is a run of its own below `out`, so the ladder goes on where it was stopped, row by row.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, MinLen

from mpp import classify, evaluate
from mpp.architectures import ImageSize
from mpp.classify_recipe import SCRATCH, ClassifyConfig
from mpp.config import dump_recipe
from mpp.data.budget import All, PerClass
from mpp.data.sources import Source, open_splits
from mpp.durable import replace_file
from mpp.evaluate import EvaluateConfig, recipe_of, run_of
from mpp.evaluation.fewshot import FewShot
from mpp.evaluation.kinds import Evaluation
from mpp.evaluation.knn import KNN
from mpp.evaluation.linear import LinearProbe
from mpp.evaluation.scores import summary
from mpp.inspection import ladder as picture
from mpp.job import EXIT_STOPPED
from mpp.metrics import JsonLines, table
from mpp.patches import pair
from mpp.pretrain_recipe import PretrainConfig
from mpp.weights import checkpoint_at

Budget = Annotated[int, Ge(1)] | Literal["all"]
MPP, LONGER, SUPERVISED = "mpp", "scratch, total compute", "supervised"


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
    learning_rates: tuple[Annotated[float, Gt(0)], ...] = ()
    """swept alike for every start, on seed 0 of the first budget, chosen on a slice of its labels; none = optim.lr"""
    choose_on: Annotated[float, Gt(0)] = 0.2
    """share of the first budget's labels that the sweep is judged on"""
    total_compute: bool = True
    """one more row from scratch, given the images that pretraining saw as further steps"""
    supervised: str | None = None
    """weights of a supervised pretraining, for a row of their own"""

    def faults(self) -> Iterator[tuple[str, str]]:
        """What the ladder sets by itself, and what its rows could not be compared with."""
        unset = ClassifyConfig()
        for name in ("out", "init", "data", "labels", "backbone", "early_stopping", "real", "predict", "predictions"):
            if getattr(self.finetune, name) != getattr(unset, name):
                yield f"finetune.{name}", "is the ladder's own in each of its runs; leave it out"
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


def begin(weights: str, config: LadderConfig) -> "Ladder":
    """ValueError for whatever in run, recipe or data cannot work."""
    return Ladder(weights, config)


class Ladder:
    """The table of one pretraining run."""

    def __init__(self, weights: str, config: LadderConfig):
        run = run_of(weights)
        recipe = None if run is None else recipe_of(run)
        if run is None or not isinstance(recipe, PretrainConfig):
            raise ValueError(f"{weights} is no pretraining run (no recipe.yaml of one in it); name the run folder")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("a ladder is run by one process; start it with python, without a launcher of several")
        self.run, self.recipe, self.config, self.weights = run, recipe, config, weights
        self.checkpoint = checkpoint_at(Path(weights))
        self.out = config.out or Path("runs") / f"ladder_{run.name}"
        self.data = config.data or recipe.data
        size = config.image_size or recipe.backbone.image_size
        self.backbone = replace(recipe.backbone, image_size=size)
        self.starts = list(self._starts())
        self.train = open_splits(self.data).train
        for budget in config.budgets:  # too few images of a class are told now
            labels_of(budget, 0).split(self.train)

    def go(self) -> int:
        """0 when the table is complete; 75 when a signal ended it before: the same command goes on."""
        self._pin()
        code = self._frozen() or self._sweep() or self._rungs()
        if not code:
            self._tell()
        return code

    def _starts(self) -> Iterator[Start]:
        yield Start(MPP, self.weights)
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

    def _pin(self) -> None:
        """All rows of a table are of the same weights. ValueError if the run has been trained further since."""
        file, now = self.out / "ladder.json", {"weights": self.weights, "step": self.checkpoint.step}
        if file.exists() and (before := json.loads(file.read_text())) != now:
            raise ValueError(f"{self.out} is the ladder of {before}, and this is {now}; name another folder with --out")
        self.out.mkdir(parents=True, exist_ok=True)
        replace_file(file, [json.dumps(now).encode()])

    def _frozen(self) -> int:
        """Few-shot at every budget, and the other frozen scores, trained beside untrained; once."""
        folder = self.out / "frozen"
        shots = tuple(self.config.budgets)
        evaluations = (FewShot(shots=shots, seeds=self.config.seeds), *self.config.frozen)
        asked = EvaluateConfig(out=folder, data=self.data, baseline="random", evaluations=evaluations)
        done, text = folder / "done.yaml", dump_recipe(asked)
        if done.exists() and done.read_text(encoding="utf-8") == text:
            return 0
        (folder / "results.jsonl").unlink(missing_ok=True)
        code = evaluate.begin(self.weights, asked).go()
        if not code:
            replace_file(done, [text.encode()])
        return code

    def _sweep(self) -> int:
        """The learning rate of each start; more steps from scratch take that of scratch."""
        self.rates: dict[str, float] = {}
        for start in self.starts:
            found = {}
            for rate in () if start.more_steps else self.config.learning_rates:
                config = self._config(start, self.config.budgets[0], 0, rate, self.config.choose_on)
                if code := run_one(config):
                    return code
                found[rate] = last(config.out, "validation_accuracy")
            self.rates[start.name] = self._chosen(start, found)
        return 0

    def _chosen(self, start: Start, found: dict[float, float]) -> float:
        """The rate with the highest accuracy, of equal ones the lowest; written down beside the others."""
        if not found:
            return self.rates[SCRATCH] if start.more_steps else self.config.finetune.optim.lr
        best = max(sorted(found), key=found.__getitem__)
        record = {"start": start.name, "chosen": best, "validation_accuracy": found}
        replace_file(self.out / f"sweep_{slug(start.name)}.json", [json.dumps(record, indent=1).encode()])
        return best

    def _rungs(self) -> int:
        """Every start at every budget with every seed; the table grows with each."""
        for budget in self.config.budgets:
            for seed in range(self.config.seeds):
                for start in self.starts:
                    config = self._config(start, budget, seed, self.rates[start.name])
                    if code := run_one(config):
                        return code
                    self._write()
        return 0

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

    def _results(self) -> dict[tuple[str, Budget], list[float]]:
        """(start, budget) -> test accuracy of each seed that is done."""
        found: dict[tuple[str, Budget], list[float]] = {}
        for start in self.starts:
            for budget in self.config.budgets:
                for seed in range(self.config.seeds):
                    run = self._config(start, budget, seed, 1.0).out
                    if (value := tested(run)) is not None:
                        found.setdefault((start.name, budget), []).append(value)
        return found

    def _frozen_scores(self) -> Iterator[tuple[str, Budget, float, float | None]]:
        """(which backbone, budget, mean, spread) of the frozen features."""
        for row in rows(self.out / "frozen" / "results.jsonl"):
            if row["metric"] == "top1":
                name = "few-shot" if row["evaluation"] == "fewshot" else row["evaluation"]
                budget = row["setting"].get("shots", "all")  # kNN looks at every labelled image
                yield f"{name}, {row['backbone']} features", budget, row["value"], row["spread"]

    def _write(self) -> str:
        """ladder.jsonl, ladder.png, and the table as text."""
        lines = list(self._frozen_scores())
        for (name, budget), values in self._results().items():
            scores = summary(values)
            lines.append((f"fine-tuned, {name}", budget, scores["value"], scores["spread"]))
        budgets = dict.fromkeys((*self.config.budgets, *(budget for _, budget, *_ in lines)))
        columns = {budget: f"{budget} per class" if budget != "all" else "all" for budget in budgets}
        names = list(dict.fromkeys(name for name, *_ in lines))
        cells = {(name, budget): percent(value, spread) for name, budget, value, spread in lines}
        body = [[name, *(cells.get((name, budget), "-") for budget in columns)] for name in names]
        records = [
            {"run": str(self.run), "method": name, "budget": budget, "metric": "top1", "value": value, "spread": spread}
            for name, budget, value, spread in lines
        ]
        text = table(body, ["test accuracy, %", *columns.values()])
        replace_file(self.out / "ladder.jsonl", ["".join(json.dumps(r) + "\n" for r in records).encode()])
        replace_file(self.out / "ladder.txt", [(text + "\n").encode()])
        points = [(name, self._images(budget), value, spread) for name, budget, value, spread in lines]
        picture.draw(points, self.out / "ladder.png", f"{self.run}: {self.config.seeds} seeds")
        return text

    def _images(self, budget: Budget) -> int:
        """Labelled images of a budget, for the picture's axis."""
        return len(self.train) if budget == "all" else budget * len(self.train.classes or ())

    def _tell(self) -> None:
        print(f"\n{self._write()}\n\n{self.out / 'ladder.txt'}, ladder.jsonl, ladder.png")
        gains = self._results()
        for budget in self.config.budgets:
            mpp, scratch = gains.get((MPP, budget)), gains.get((SCRATCH, budget))
            if mpp and scratch and len(mpp) == len(scratch):
                pairs = summary([100 * (one - other) for one, other in zip(mpp, scratch, strict=True)])
                spread = "" if pairs["spread"] is None else f" ±{pairs['spread']:.1f}"
                where = budget if budget == "all" else f"{budget} per class"
                print(f"gain over scratch, {where}: {pairs['value']:+.1f}{spread} points (paired, {len(mpp)} seeds)")


def labels_of(budget: Budget, seed: int) -> All | PerClass:
    return All(seed=seed) if budget == "all" else PerClass(count=budget, seed=seed)


def run_one(config: ClassifyConfig) -> int:
    """One fine-tuning; its exit code, and that of a stop also where the signal came with its last save."""
    job = classify.begin(config)
    return job.go() or (EXIT_STOPPED if job.runtime.stop.requested else 0)


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


def percent(value: float, spread: float | None) -> str:
    return f"{100 * value:.1f}" + ("" if spread is None else f" ±{100 * spread:.1f}")
