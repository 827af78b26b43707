"""The job: what was pretraining worth? One run and some labels -> the table against training from scratch.

Every fine-tuning is a run of its own below `out`, so the ladder goes on where it was stopped, row by row; and several
processes, on devices of their own, can work on one ladder: each takes the rows that no other is at.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpp import classify, evaluate, ladder_table
from mpp.classify_recipe import SCRATCH, ClassifyConfig
from mpp.config import dump_recipe, load_recipe
from mpp.data.sources import open_splits
from mpp.durable import check_can_write, make_folder, replace_file
from mpp.evaluate import EvaluateConfig, recipe_of, run_of
from mpp.evaluation.classifier import StoredClassifier
from mpp.evaluation.features import name_of
from mpp.evaluation.kinds import Evaluation
from mpp.evaluation.scores import at_edge, summary
from mpp.exit_codes import EXIT_FAILED, EXIT_STOPPED
from mpp.ladder_checks import check_labels, check_rates, check_rows, check_weights
from mpp.ladder_recipe import Budget, LadderConfig
from mpp.ladder_rows import (
    DIVERGED,
    LONGER,
    MPP,
    SUPERVISED,
    Asked,
    Judged,
    Rows,
    Start,
    is_done,
    judged,
    rate_of,
    slug,
    tested,
)
from mpp.pinned import fingerprint, keep_weights
from mpp.pretrain_recipe import PretrainConfig
from mpp.shared_work import SharedWork, Task, held
from mpp.weight_files import check_exists
from mpp.weights import checkpoint_at
from mpp.words import plural

FEW = 100  # images to choose a learning rate on: one of them is a point of accuracy


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
        self.run, self.config = run, config
        self.checkpoint = checkpoint_at(Path(weights))
        self.out = config.out or Path("runs") / f"ladder_{run.name}"
        check_can_write(self.out, "out")
        self.rows = Rows(recipe, config, self.out, self.checkpoint)
        splits = open_splits(self.rows.data)
        self.train, self.heldout = splits.train, splits.heldout
        check_labels(self.rows, splits)
        self.prints = {name: check_weights(self.rows, name, spec, splits) for name, spec in self._weights()}
        self.prints["data"] = f"{splits.train.dataset.fingerprint()}-{splits.heldout.dataset.fingerprint()}"
        check_rows(self.rows, self.train)
        self.rates: dict[str, float] = {}
        self.asked = self.rows.asked
        self.code = 0
        self.work = SharedWork()

    def go(self) -> int:
        """0 when the table is complete; 75 when a signal ended it before: the same command goes on."""
        self.work.listen()
        self._pin()
        later = sum(self.rows.steps(*place) for place in self.rows.places()) * self.config.seeds
        code = self.work.run([self._frozen_task(), *self._trials()], later)
        if not code:
            self._choose_rates()
            check_rates(self.rows, self.rates)
            code = self.work.run(self._entries())
        if code == EXIT_STOPPED:
            table = self.out / "ladder.txt"
            print("\nstopped; the same command goes on" + (f". So far: {table}" if table.exists() else ""))
        elif not code:
            print(f"\n{self._write()}\n\n{self.out / 'ladder.txt'}, ladder.jsonl, ladder.png")
        return code or self.code

    def _weights(self) -> Iterator[tuple[str, str]]:
        """The starts that have weights of their own, and these."""
        yield MPP, str(self.checkpoint.path)
        if self.config.supervised:
            yield SUPERVISED, self.config.supervised

    def _pin(self) -> None:
        """A copy of the weights, so that all rows are of the same ones whatever becomes of the run.

        ValueError if the run has been trained further, or anew, since the ladder was begun, or its data are others.
        """
        make_folder(self.out)
        file, now = self.out / "ladder.json", {"run": str(self.run), "step": self.checkpoint.step} | self.prints
        with held(self.out):
            before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            for name in (name for name, stamp in self.prints.items() if before.get(name, stamp) != stamp):
                raise ValueError(f"{self.out} was begun with {self._told_other(name, before)}")
            self.asked = Asked.of(before).joined(self.asked)
            document = (before | self.prints if before else now) | self.asked.document()
            replace_file(file, [json.dumps(document, indent=1).encode()])
            keep_weights(self.checkpoint, self.run / "recipe.yaml", self.rows.weights)

    def _told_other(self, name: str, before: dict[str, Any]) -> str:
        """What differs from the ladder's beginning, and what to do."""
        advice = "Take the change back"
        if name == MPP:
            now = f"{self.run} is at step {self.checkpoint.step:,}"
            name = f"other weights, of {before['run']} at step {before['step']:,}, and {now}"
            advice = f"Go on with the ladder's own copy: tools/ladder.py {self.rows.weights} ... --out {self.out}"
        elif name == SUPERVISED:
            name = f"other weights in {self.config.supervised}"
        return f"{'other data' if name == 'data' else name}. {advice}, or name another folder with --out"

    def _recall(self) -> Asked:
        """What has been asked for by now, also by processes that share this ladder."""
        pinned = json.loads((self.out / "ladder.json").read_text(encoding="utf-8"))
        self.asked = Asked.of(pinned).joined(self.rows.asked)
        return self.asked

    def _frozen_task(self) -> Task:
        """Few-shot at every budget, and the other frozen scores, trained beside untrained; each once.

        What has been measured is remembered, and so stays in the table whatever a later command asks for.
        """
        folder = self.out / "frozen"
        done = folder / "done.yaml"

        def measured() -> list[Evaluation]:
            found = load_recipe(EvaluateConfig, [str(done)]).evaluations if done.exists() else ()
            return [one for one in found if not isinstance(one, StoredClassifier)]

        def wanted() -> tuple[Evaluation, ...]:
            known = self._recall()
            return self.config.evaluations(tuple(known.steps), known.seeds, measured())

        def missing() -> tuple[Evaluation, ...]:
            return tuple(one for one in wanted() if one not in measured())

        def do() -> int:
            config = EvaluateConfig(data=self.rows.data, baseline="random", evaluations=wanted())
            mine = replace(config, evaluations=missing(), out=folder, threads=self.config.finetune.train.threads)
            job = evaluate.begin(str(self.rows.weights), mine)
            self.work.heed(job.runtime.stop)
            code = job.go()
            if code == EXIT_FAILED:  # a score without an answer is told, and costs no fine-tuning
                self.code = EXIT_FAILED
                return 0
            if not code:
                replace_file(done, [dump_recipe(config).encode()])
            return code

        return Task(folder, do, "frozen features", lambda: not missing())

    def _trials(self) -> Iterator[Task]:
        """A run for every learning rate and start; one that diverges is out, and told."""
        for start in self.rows.starts:
            for rate in self.rows.rates(start):
                yield self._task(self.rows.trial(start, rate), f"{start.title}, learning rate {rate:g}", trial=True)

    def _choose_rates(self) -> None:
        """The learning rate of each start."""
        for start in self.rows.starts:
            trials = {rate: self.rows.trial(start, rate) for rate in self.rows.rates(start)}
            self.rates[start.name] = self._chosen(start, {rate: judged(trial.out) for rate, trial in trials.items()})

    def _chosen(self, start: Start, found: dict[float, Judged | None]) -> float:
        """The rate with the highest accuracy, of equal ones that with the lowest loss; written down beside the others.

        ValueError where all of them diverged.
        """
        if not found:
            return self.rates[SCRATCH] if start.more_steps else self.rows.plain_rate
        good = {rate: value for rate, value in found.items() if value is not None}
        if not good:
            raise ValueError(f"learning_rates: {start.name} diverged with each of {list(found)}; try lower ones")
        best = max(good, key=good.__getitem__)
        edge = at_edge(list(found).index(best), len(found))
        if edge:
            print(f"note       {start.title}: {best:g} is at the edge of learning_rates; a wider sweep may find better")
        images = self._images_to_choose_on(start)
        scores = ", ".join(f"{rate:g} {100 * value.accuracy:.1f} %" for rate, value in good.items())
        print(f"chosen     {start.title}: learning rate {best:g} (on {images:,} images: {scores})")
        if images < FEW:
            print(f"note       {images:,} images decide that: it may be chance; try a larger choose_on, or more labels")
        record = {"start": start.name, "chosen": best, "at_edge": edge, "images": images}
        for name, sign in (("accuracy", 1), ("minus_loss", -1)):
            values = {rate: None if value is None else sign * getattr(value, name) for rate, value in found.items()}
            record[f"validation_{name.removeprefix('minus_')}"] = values
        with held(self.out):
            replace_file(self.out / f"sweep_{slug(start.name)}.json", [json.dumps(record, indent=1).encode()])
        return best

    def _images_to_choose_on(self, start: Start) -> int:
        """Images that a learning rate is judged on."""
        _, kept = self.rows.trial(start, self.rows.plain_rate).labels.split(self.train)
        return 0 if kept is None else len(kept)

    def _entries(self) -> Iterator[Task]:
        """Every start at every budget with every seed, long ones last; the table grows with each."""
        for more in sorted({start.more_steps for start in self.rows.starts}):
            for seed in range(self.config.seeds):
                for budget in self.config.budgets:
                    for start in (one for one in self.rows.starts if one.more_steps == more):
                        asked = self.rows.row(start, budget, seed, self.rates[start.name])
                        yield self._task(asked, f"{start.title}, {_told(budget)}, seed {seed}")

    def _task(self, asked: ClassifyConfig, title: str, trial: bool = False) -> Task:
        """One fine-tuning. Its exit code is that of a stop also where the signal came with its last save."""
        out, steps = asked.out, asked.train.steps
        assert out is not None and steps is not None

        def do() -> int:
            if asked.init == self.config.supervised and fingerprint(asked.init) != self.prints[SUPERVISED]:
                raise ValueError(f"{asked.init} has other weights than when the ladder was begun; put them back")
            job = classify.begin(asked, is_part=True)
            self.work.heed(job.runtime.stop)
            try:
                code = job.go()
            except FloatingPointError as error:
                if not trial:
                    raise FloatingPointError(f"{out}: {error}") from None
                print(f"note       {title} diverged: {error}")
                replace_file(out / DIVERGED, [str(error).encode()])
                return 0
            if not code and not trial:
                accuracy = tested(out, steps)
                assert accuracy is not None, f"{out} is finished, and was not tested"
                print(f"test accuracy {100 * accuracy:.2f} %")
                self._write()
            return code or (EXIT_STOPPED if job.runtime.stop.requested else 0)

        return Task(out, do, title, lambda: is_done(asked), steps)

    def _results(self, start: Start, budget: Budget) -> dict[int, float]:
        """seed -> test accuracy of the fine-tuned runs that are done."""
        steps = self.asked.steps[budget] + start.more_steps
        found = {seed: tested(self.rows.folder(start, budget, seed), steps) for seed in range(self.asked.seeds)}
        return {seed: value for seed, value in found.items() if value is not None}

    def _tuned_cells(self) -> Iterator[ladder_table.Cell]:
        """Fine-tuned from every start, at every budget of which a seed is done."""
        for start in self.asked.starts.values():
            for budget, steps in self.asked.steps.items():
                if values := self._results(start, budget):
                    rate = rate_of(self.rows.folder(start, budget, min(values)))  # of all: others are refused
                    made = {"wanted_seeds": self.asked.seeds, "values": values, "init": start.init}
                    made |= {"learning_rate": rate, "steps": steps + start.more_steps}
                    yield ladder_table.Cell(start.title, budget, summary(list(values.values())) | made)

    def _gains(self) -> Iterator[ladder_table.Cell]:
        """Points of accuracy over each other start, paired by seed."""
        starts = self.asked.starts
        for name in (SCRATCH, LONGER, SUPERVISED):
            for budget in self.asked.steps if name in starts else ():
                ours, theirs = (self._results(starts[one], budget) for one in (MPP, name))
                if seeds := sorted(ours.keys() & theirs.keys()):
                    values = {seed: ours[seed] - theirs[seed] for seed in seeds}
                    row = summary(list(values.values())) | {"wanted_seeds": self.asked.seeds, "values": values}
                    yield ladder_table.Cell(f"gain over {name}", budget, row, "top1_gain")

    def _write(self) -> str:
        """The table as it is now, to its files and as text."""
        about = {"run": str(self.run), "step": self.checkpoint.step, "dataset": name_of(self.rows.data)}
        with held(self.out):
            self._recall()
            scores = self.out / "frozen" / "results.jsonl"
            tuned = list(self._tuned_cells())
            cells = [*ladder_table.frozen_cells(scores, about["dataset"]), *tuned, *self._gains()]
            conditions = self._conditions(tuned)
            return ladder_table.write(self.out, about, list(self.asked.steps), cells, self._images, conditions)

    def _conditions(self, tuned: Sequence[ladder_table.Cell]) -> Iterator[str]:
        """What the table holds for, in words."""
        tested = plural(len(self.heldout), "test image")
        yield f"{name_of(self.rows.data)}, {tested}; ± is one standard deviation over seeds"
        steps = {f"{count:,}": [] for count in self.asked.steps.values()}
        for budget, count in self.asked.steps.items():
            steps[f"{count:,}"].append(str(budget))
        told = [count + (f" at {' and '.join(budgets)}" if len(steps) > 1 else "") for count, budgets in steps.items()]
        yield f"steps of the fine-tuning: {', '.join(told)}"
        rates: dict[str, list[str]] = {}
        for cell in tuned:
            rates.setdefault(cell.method, []).append(f"{cell.row['learning_rate']:g}")
        yield "learning rate: " + ", ".join(f"{name} {' / '.join(dict.fromkeys(own))}" for name, own in rates.items())

    def _images(self, budget: Budget) -> int:
        """Labelled images of a budget, for the picture's axis."""
        return len(self.train) if budget == "all" else budget * len(self.train.classes or ())


def _told(budget: Budget) -> str:
    return "all labels" if budget == "all" else f"{budget} labels per class"
