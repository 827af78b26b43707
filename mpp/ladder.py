"""The job: what was pretraining worth? One run and some labels -> the table against training from scratch.

Every fine-tuning is a run of its own below `out`, so the ladder goes on where it was stopped, row by row; and several
processes, on devices of their own, can work on one ladder: each takes the rows that no other is at.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpp import classify, evaluate, ladder_table
from mpp.backbones import build_backbone
from mpp.classify_recipe import FREE, SCRATCH, ClassifyConfig
from mpp.config import differences, dump_recipe, load_recipe
from mpp.data.sources import open_splits, require_labels, require_test_images
from mpp.durable import check_can_write, make_folder, replace_file
from mpp.evaluate import EvaluateConfig, recipe_of, run_of
from mpp.evaluation.features import name_of
from mpp.evaluation.scores import at_edge, summary
from mpp.exit_codes import EXIT_FAILED, EXIT_STOPPED
from mpp.job import share_of
from mpp.ladder_recipe import Budget, LadderConfig
from mpp.ladder_rows import DIVERGED, LONGER, MPP, SUPERVISED, Rows, Start, is_done, judged, labels_of, slug, tested
from mpp.pinned import fingerprint, keep_weights
from mpp.pretrain_recipe import PretrainConfig
from mpp.shared_work import SharedWork, Task, held
from mpp.tasks import frozen_modules
from mpp.weight_files import check_exists
from mpp.weights import checkpoint_at, load_into


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
        require_labels(splits, "a ladder")
        require_test_images(splits)
        self.train, self.heldout = splits.train, splits.heldout
        for budget in config.budgets:  # too few images of a class are told now
            try:
                labels_of(budget, 0).split(self.train)
            except ValueError as error:
                raise ValueError(f"budgets: {budget}: {error}") from None
        self.prints = self._check_weights(weights)
        self._check_rows()
        self.rates: dict[str, float] = {}
        self.known = _sorted({budget: config.steps_of(budget) for budget in config.budgets})
        self.work = SharedWork()

    def go(self) -> int:
        """0 when the table is complete; 75 when a signal ended it before: the same command goes on."""
        self._pin()
        later = sum(self.rows.steps(*place) for place in self._places()) * self.config.seeds
        code = self.work.run([self._frozen_task(), *self._trials()], later)
        if not code:
            self._choose_rates()
            code = self.work.run(self._entries())
        if code == EXIT_STOPPED:
            print(
                f"\nstopped; the same command goes on. So far: {self.out / 'ladder.txt'}" if self.rates else "\nstopped"
            )
        elif not code:
            print(f"\n{self._write()}\n\n{self.out / 'ladder.txt'}, ladder.jsonl, ladder.png")
        return code

    def _places(self) -> Iterator[tuple[Start, Budget]]:
        """The cells of fine-tuned runs that are asked for."""
        for start in self.rows.starts:
            for budget in self.config.budgets:
                yield start, budget

    def _check_weights(self, weights: str) -> dict[str, str]:
        """A hash of each start's weights in this backbone, and of the data. ValueError for weights that do not fit it:
        now, not after the rows before them."""
        found, asked = {}, self.config.finetune
        for name, spec in ((MPP, weights), (SUPERVISED, self.config.supervised)):
            if spec is not None:
                backbone = build_backbone(self.rows.backbone, self.rows.data.channels, seed=0)
                try:
                    load_into(backbone, spec, asked.resampling)
                except ValueError as error:
                    raise ValueError(f"{name}: {error} (the backbone is that of {self.run}, for every row)") from None
                backbone.check_readout((asked.pool,), (-1,))
                frozen_modules(backbone, asked.frozen_blocks)
                found[name] = fingerprint(backbone)
        return found | {"data": f"{self.train.dataset.fingerprint()}-{self.heldout.dataset.fingerprint()}"}

    def _check_rows(self) -> None:
        """ValueError for what a row would refuse, or for rows that stand there and were made otherwise."""
        rate = self.config.finetune.optim.lr
        for start, budget in self._places():
            for seed in range(self.config.seeds):
                self._check_row(self.rows.row(start, budget, seed, rate))
        for start in self.rows.starts:
            for trial in (self.rows.trial(start, rate) for rate in self.rows.rates(start)):
                try:
                    trial.labels.split(self.train)
                except ValueError as error:
                    raise ValueError(f"choose_on: {self.config.choose_on:g} of the first budget: {error}") from None
                self._check_row(trial)

    def _check_row(self, asked: ClassifyConfig) -> None:
        for name, message in asked.faults():
            raise ValueError(f"finetune.{name}: {message}")
        share = share_of(asked.train, 0, 1)
        if asked.mix and share.micro_batch_size < 2:
            raise ValueError("finetune.mix: takes a second image from the micro-batch, and it has one")
        assert asked.out is not None
        if (recipe := asked.out / "recipe.yaml").exists():
            stored = load_recipe(ClassifyConfig, [str(recipe)])
            free = FREE | {"init", "optim.lr"}  # pinned by hash; chosen by the sweep
            if changes := differences(stored, asked, free):
                raise ValueError(
                    f"{self.out} has rows of another recipe ({asked.out.name}): {'; '.join(changes)}. Take the changes "
                    f"back, or begin another ladder with --out"
                )

    def _pin(self) -> None:
        """A copy of the weights, so that all rows are of the same ones whatever becomes of the run.

        ValueError if the run has been trained further, or anew, since the ladder was begun, or its data are others.
        """
        make_folder(self.out)
        file, now = self.out / "ladder.json", {"run": str(self.run), "step": self.checkpoint.step} | self.prints
        with held(self.out):
            before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            for name, stamp in self.prints.items():
                if before.get(name, stamp) != stamp:
                    what = "data" if name == "data" else f"weights for {name}"
                    copy = f"Go on with the ladder's own copy: tools/ladder.py {self.rows.weights} ... --out {self.out}"
                    raise ValueError(
                        f"{self.out} was begun with other {what} (the run: {before['run']}, step {before['step']:,}); "
                        f"{self.run} is at step {self.checkpoint.step:,}. "
                        f"{copy if name == MPP else 'Take the change back'}, or name another folder with --out"
                    )
            self.known = _sorted(_budgets_of(before) | self.known)  # the table keeps what was asked for before
            text = json.dumps((before | self.prints if before else now) | {"steps": self.known})
            replace_file(file, [text.encode()])
            keep_weights(self.checkpoint, self.run / "recipe.yaml", self.rows.weights)

    def _frozen_task(self) -> Task:
        """Few-shot at every budget, and the other frozen scores, trained beside untrained; once."""
        folder = self.out / "frozen"
        evaluations = self.config.evaluations(tuple(self.known))
        threads, data = self.config.finetune.train.threads, self.rows.data
        asked = EvaluateConfig(out=folder, data=data, baseline="random", evaluations=evaluations, threads=threads)
        done, text = folder / "done.yaml", dump_recipe(replace(asked, out=None))  # a ladder can be moved

        def do() -> int:
            (folder / "results.jsonl").unlink(missing_ok=True)
            job = evaluate.begin(str(self.rows.weights), asked)
            self.work.heed(job.runtime.stop)
            code = job.go()
            if code not in (0, EXIT_FAILED):
                return code
            replace_file(done, [text.encode()])
            return 0  # a score without an answer is told, stays empty, and costs no fine-tuning

        return Task(folder, do, "frozen features", lambda: done.exists() and done.read_text(encoding="utf-8") == text)

    def _trials(self) -> Iterator[Task]:
        """A run for every learning rate and start; one that diverges is out, and told."""
        for start in self.rows.starts:
            for rate in self.rows.rates(start):
                yield self._task(self.rows.trial(start, rate), f"{start.title}, learning rate {rate:g}", trial=True)

    def _choose_rates(self) -> None:
        """The learning rate of each start."""
        for start in self.rows.starts:
            found = {rate: judged(self.rows.trial(start, rate).out) for rate in self.rows.rates(start)}
            self.rates[start.name] = self._chosen(start, found)

    def _chosen(self, start: Start, found: dict[float, float | None]) -> float:
        """The rate with the highest accuracy, of equal ones the lowest; written down beside the others.

        ValueError where all of them diverged.
        """
        if not found:
            return self.rates[SCRATCH] if start.more_steps else self.config.finetune.optim.lr
        good = {rate: value for rate, value in found.items() if value is not None}
        if not good:
            raise ValueError(f"learning_rates: {start.name} diverged with each of {list(found)}; try lower ones")
        best = max(good, key=good.__getitem__)
        edge = at_edge(list(found).index(best), len(found))
        if edge:
            print(f"note       {start.title}: {best:g} is at the edge of learning_rates; a wider sweep may find better")
        record = {"start": start.name, "chosen": best, "at_edge": edge, "validation_accuracy": found}
        with held(self.out):
            replace_file(self.out / f"sweep_{slug(start.name)}.json", [json.dumps(record, indent=1).encode()])
        return best

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
        assert asked.out is not None
        out = asked.out

        def do() -> int:
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
                print(f"test accuracy {100 * (tested(out) or 0.0):.2f} %")
                self._write()
            return code or (EXIT_STOPPED if job.runtime.stop.requested else 0)

        assert asked.train.steps is not None
        return Task(out, do, title, lambda: is_done(asked), asked.train.steps)

    def _results(self, start: Start, budget: Budget) -> dict[int, float]:
        """seed -> test accuracy of the fine-tuned runs that are done."""
        found = {seed: tested(self.rows.folder(start, budget, seed)) for seed in range(self.config.seeds)}
        return {seed: value for seed, value in found.items() if value is not None}

    def _tuned_cells(self) -> Iterator[ladder_table.Cell]:
        """Fine-tuned from every start, at every budget of which a seed is done."""
        for start in self.rows.starts:
            for budget, steps in self.known.items():
                if values := self._results(start, budget):
                    made = {"wanted_seeds": self.config.seeds, "values": values, "init": start.init}
                    made |= {"learning_rate": self.rates[start.name], "steps": steps + start.more_steps}
                    yield ladder_table.Cell(start.title, budget, summary(list(values.values())) | made)

    def _gains(self) -> Iterator[ladder_table.Cell]:
        """Points of accuracy over each other start, paired by seed."""
        by_name = {start.name: start for start in self.rows.starts}
        for name in (SCRATCH, LONGER, SUPERVISED):
            for budget in self.known if name in by_name else ():
                ours, theirs = (self._results(by_name[one], budget) for one in (MPP, name))
                if seeds := sorted(ours.keys() & theirs.keys()):
                    values = {seed: ours[seed] - theirs[seed] for seed in seeds}
                    row = summary(list(values.values())) | {"wanted_seeds": self.config.seeds, "values": values}
                    yield ladder_table.Cell(f"gain over {name}", budget, row, "top1_gain")

    def _write(self) -> str:
        """The table as it is now, to its files and as text."""
        about = {"run": str(self.run), "step": self.checkpoint.step, "dataset": name_of(self.rows.data)}
        with held(self.out):
            cells = [*ladder_table.frozen_cells(self.out / "frozen" / "results.jsonl"), *self._tuned_cells()]
            return ladder_table.write(self.out, about, list(self.known), [*cells, *self._gains()], self._images)

    def _images(self, budget: Budget) -> int:
        """Labelled images of a budget, for the picture's axis."""
        return len(self.train) if budget == "all" else budget * len(self.train.classes or ())


def _budgets_of(pinned: dict[str, Any]) -> dict[Budget, int]:
    """Budgets, and their steps, that a ladder has been asked for so far."""
    return {budget if budget == "all" else int(budget): steps for budget, steps in pinned.get("steps", {}).items()}


def _sorted(budgets: dict[Budget, int]) -> dict[Budget, int]:
    """Fewest labels first."""
    return dict(sorted(budgets.items(), key=lambda one: float("inf") if one[0] == "all" else one[0]))


def _told(budget: Budget) -> str:
    return "all labels" if budget == "all" else f"{budget} labels per class"
