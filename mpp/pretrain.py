"""The job: masked patch pretraining, from a recipe to a run folder."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from mpp.backbones import build_backbone, choose_attention
from mpp.checkpoint import Checkpoint
from mpp.data.loader import FixedViews, TrainingViews
from mpp.data.order import Order
from mpp.data.sources import open_splits
from mpp.evaluation.features import Features, check
from mpp.header import pretraining_header
from mpp.heldout import HeldOutLoss
from mpp.job import Job
from mpp.metrics import commit, comparison
from mpp.optim import LearningRate
from mpp.pretrain_recipe import FREE, PretrainConfig
from mpp.progress import heldout_line
from mpp.runtime import Runtime, start
from mpp.tasks import MaskedPatchPrediction
from mpp.weights import (
    Initial,
    load_task,
    objective_config,
    objective_tensors,
    timm_config,
)


def pretrain(config: PretrainConfig) -> int:
    """Runs, or goes on with, the run in `config.out`. Returns the exit code: 0 done, 75 stopped by a signal.

    ValueError for whatever in recipe, data or folder cannot work, before the first step.
    """
    return begin(config).go()


def begin(config: PretrainConfig) -> "Pretraining":
    """Everything that can be refused, done; nothing is trained or written yet but the run folder's recipe."""
    train = config.train
    runtime = start(train.precision, train.threads, train.trackers, config.out, train.signals)
    return Pretraining(config, runtime)


class Pretraining(Job):
    """One run of masked patch pretraining."""

    free = FREE
    task: MaskedPatchPrediction

    def __init__(self, config: PretrainConfig, runtime: Runtime):
        super().__init__(config, runtime)
        train = config.train
        with runtime.accelerator.main_process_first():  # downloads and caches are made once
            self.opened = {repr(source): open_splits(source) for source in self._sources()}
        self.data = self.opened[repr(config.data)]
        self.data_parts, self.data_description = (
            (self.data.train.dataset, self.data.heldout.dataset),
            self.data.description,
        )
        self.backbone = build_backbone(config.backbone, config.data.channels, train.seed)
        choose_attention(self.backbone, runtime.device, train.precision)
        self.task = config.objective.build(self.backbone, config.masking, config.corruption, config.target, train.seed)
        self.learning_rate = LearningRate(config.optim, self._planned_steps(len(self.data.train)), train.extend)
        self.evaluations = self._possible_evaluations()
        self.initial = self._read_initial()
        self.optimizer, self.names = config.optim.build(self.task)
        size, order = self.backbone.image_size, Order(len(self.data.train), train.seed)
        self.train_views = TrainingViews(self._pictures(self.data.train), order, config.augment, size)
        # The recipe of a run is written once nothing is left that could be refused, so that a mistake can be mended.
        train_views, heldout_views = (
            FixedViews(self._pictures(part), size) for part in (self.data.train, self.data.heldout)
        )
        self.heldout = HeldOutLoss(config.heldout, self.task, train_views, heldout_views, runtime)
        self._open()
        self.skips.add("heldout", self.heldout.skipped)

    def _header(self) -> Iterator[tuple[str, str]]:
        return pretraining_header(self.config, self.data, self.task, self.share, self.runtime, self.total_steps)

    def _read_initial(self) -> Initial | None:
        """The weights to begin with, found fitting."""
        if self.config.init is None or self._has_saved():
            return None
        return Initial(self.task, self.config.init, self.config.resampling)

    def _sources(self) -> list[Any]:
        return [self.config.data, *(e.data for e in self.config.evaluations if e.data is not None)]

    def _is_split_sensitive(self) -> bool:
        return self.config.corruption.pool == "batch" or super()._is_split_sensitive()

    def _possible_evaluations(self) -> list[Any]:
        """Those with labels. The pretraining data may have none; data named for an evaluation must."""
        kept = []
        for evaluation in self.config.evaluations:
            source = evaluation.data or self.config.data
            splits = self.opened[repr(source)]
            if evaluation.data is None and splits.train.classes is None:
                self.runtime.log(
                    f"{evaluation.kind} is left out: {source.kind} has no labels; name labelled images in its data"
                )
                continue
            check(evaluation, splits, self.backbone)
            kept.append(evaluation)
        return kept

    def _before_the_first_step(self) -> bool:
        """Scores of untrained features, and with `init` of the weights to begin with; False if a signal came."""
        self._score("untrained", 0)
        if self.initial:
            self.runtime.log(f"init       {self.initial.put(self.task)}")
            self._score("trained", 0)
        self._measure(0)
        return not self.runtime.stop.agreed()

    def _plan(self, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        plan = self.task.plan(batch["epoch"], batch["id"])
        return plan.permutation, plan.partner

    def _contents(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """A timm folder, and head and mask token beside it."""
        tensors = {
            "model.safetensors": self.backbone.model.state_dict(),
            "objective.safetensors": objective_tensors(self.task),
        }
        return tensors, {"config.json": timm_config(self.backbone), "objective.json": objective_config(self.task)}

    def _restore(self, found: Checkpoint) -> None:
        load_task(self.task, found)

    def _evaluate(self, step: int) -> None:
        """Is my loss normal, and does it help?"""
        self._measure(step)
        self._score("trained", step)

    def _measure(self, step: int) -> None:
        record = {"step": step} | self.heldout()
        self.files.metrics.write_new([record])
        self._track(record)
        self.runtime.log(heldout_line(record))
        if self.runtime.is_main and self.config.heldout.pictures:
            self.heldout.draw(self.files.path / "pictures" / f"reconstruction_{step:08}.png", f"step {step:,}")

    def _score(self, which: str, step: int) -> None:
        """Rows of results.jsonl for the backbone as it is now."""
        features = Features(self.backbone, self.runtime, self.evaluations, self.config.data, self.opened, which)
        head = {"run": str(self.files.path), "step": step, "backbone": which}
        for evaluation in self.evaluations:
            for row in self._rows(evaluation, features):
                self.files.results.write_new([head | row | {"commit": commit()}])
                setting = ",".join(f"{key}={value}" for key, value in row["setting"].items())
                self._track({"step": step, f"{which}/{row['evaluation']}_{row['metric']}/{setting}": row["value"]})
        for where, skip in features.skipped:
            self.skips.add(where, [skip])
        self.skips.flush()

    def _rows(self, evaluation: Any, features: Features) -> Iterator[dict[str, Any]]:
        """An evaluation's rows, and a line that says why where features are such that it has no answer, or not all.

        What could be refused was refused at the start. Now training must not be lost over it.
        """
        count = 0
        try:
            for count, row in enumerate(evaluation(features), 1):  # noqa: B007
                yield row
        except ValueError as error:
            self.runtime.log(f"{evaluation.kind} gave no {'other ' if count else ''}score: {error}")

    def _tell_the_end(self) -> None:
        """The small table, and what to try next."""
        run, log = self.files.path, self.runtime.log
        log(f"\nfinished: {self.total_steps:,} steps in {run}; pictures in {run / 'pictures'}")
        if len(self.skips):
            log(f"{len(self.skips):,} pictures could not be used: {self.skips.file.path}")
        if results := self.files.results.read():
            log(f"\n{comparison(results)}")
        folder = run / "checkpoints" / f"{self.total_steps:08}"
        log("\nnext:")
        log(f"  open the backbone in timm:   timm.create_model('local-dir:{folder}', pretrained=True)")
        if self.config.data.kind == "demo":
            log(
                "  your own images, no labels:  accelerate launch tools/pretrain_mpp.py "
                "--data.kind folder --data.path DIR --out runs/mine"
            )
        log(f"  train this run longer:       the same command with {self._longer()}")
