"""The job: masked patch pretraining, from a recipe to a run folder."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from mpp.backbones import BackboneSpec, ViT, build_backbone, choose_attention, compile_in_place
from mpp.checkpoint import Checkpoint
from mpp.config import dump_recipe
from mpp.data.loader import FixedViews, Pictures, TrainingViews, training_batches
from mpp.data.order import Order, Share
from mpp.data.skipped import SkipList
from mpp.data.sources import Demo, Source, Splits, open_splits, require_labels
from mpp.data.transforms import Augment
from mpp.evaluation.features import Features, Split, evaluate
from mpp.evaluation.fewshot import FewShot
from mpp.evaluation.knn import KNN
from mpp.header import header
from mpp.heldout import HeldOut, HeldOutLoss
from mpp.masking import Corruption, Masking, RandomMasking
from mpp.metrics import commit, comparison
from mpp.optim import AdamW, LearningRate, Optim
from mpp.patches import pair
from mpp.progress import Progress, heldout_line
from mpp.runs import Run
from mpp.runtime import Runtime, environment, start
from mpp.targets import MeanColor, Target
from mpp.tasks import MaskedPatches, Objective
from mpp.trace import Trace
from mpp.trainer import Event, Train, Trainer
from mpp.weights import initialize

Evaluation = Annotated[KNN | FewShot, Field(discriminator="kind")]

EXIT_STOPPED = 75  # a signal ended the run before its end: the same command goes on (EX_TEMPFAIL of sysexits)

# What may change between a run and its continuation: nothing here changes what is learned. Data may move, since its
# fingerprint is compared; train.extend may grow, which is checked by itself.
FREE = {
    "out",
    "data.path",
    "data.root",
    "train.workers",
    "train.log_every",
    "train.eval_every",
    "train.checkpoint_every",
    "train.keep_last",
    "train.trackers",
    "train.trace",
    "train.extend",
    "train.micro_batch_size",
    "heldout.pictures",
    "evaluations",
}


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Masked patch pretraining."""

    out: Path | None = None
    """run folder; null = runs/<recipe name>"""
    init: str | None = None
    """a run, or one of its checkpoints, whose weights to begin with; optimiser and schedule begin afresh"""
    data: Source = field(default_factory=Demo)
    """unlabelled images"""
    augment: Augment = field(default_factory=Augment)
    """training views"""
    backbone: BackboneSpec = field(default_factory=ViT)
    """the network"""
    objective: Objective = field(default_factory=MaskedPatches)
    """what is learned"""
    masking: Masking = field(default_factory=RandomMasking)
    """which patches are corrupted"""
    corruption: Corruption = field(default_factory=Corruption)
    """what stands in their place"""
    target: Target = field(default_factory=MeanColor)
    """what is predicted for them"""
    optim: Optim = field(default_factory=AdamW)
    """optimiser and learning rate"""
    train: Train = field(default_factory=Train)
    """how long, how much at a time"""
    heldout: HeldOut = field(default_factory=HeldOut)
    """is my loss normal?"""
    evaluations: tuple[Evaluation, ...] = ()
    """does it help? on labelled images, trained beside untrained features"""

    def faults(self) -> Iterator[tuple[str, str]]:
        """What no section can see alone; before any data is read."""
        steps = self.train.steps
        if steps is not None and self.optim.warmup_steps >= steps:
            yield "optim.warmup_steps", f"{self.optim.warmup_steps} is not less than train.steps {steps}"
        if isinstance(self.backbone, ViT):
            yield from self._misfits(self.backbone)
        for number, evaluation in enumerate(self.evaluations):
            data = evaluation.data or self.data
            if data.channels != self.data.channels:
                yield (
                    f"evaluations.{number}.data.channels",
                    f"{data.channels} is not data.channels {self.data.channels}",
                )

    def _misfits(self, backbone: ViT) -> Iterator[tuple[str, str]]:
        image, patch = pair(backbone.image_size), pair(backbone.patch_size)
        if not (image[0] % patch[0] or image[1] % patch[1]):
            try:
                self.masking.num_corrupted((image[0] // patch[0], image[1] // patch[1]))
            except ValueError as error:
                yield "masking.ratio", str(error)
        try:
            self.target.num_outputs(self.data.channels, patch)
        except ValueError as error:
            yield "target", str(error)
        for name in ("pixel_mean", "pixel_std"):
            value = getattr(backbone, name)
            if isinstance(value, tuple) and len(value) != self.data.channels:
                yield (
                    f"backbone.{name}",
                    f"{len(value)} values for {self.data.channels} channels; give one, or one each",
                )
        depth = backbone.shape()[1]
        for number, evaluation in enumerate(self.evaluations):
            if not all(-depth <= layer < depth for layer in evaluation.layers):
                yield (
                    f"evaluations.{number}.layers",
                    f"{list(evaluation.layers)} of a backbone with {depth} blocks",
                )
            if "cls" in evaluation.pool and not backbone.class_token:
                yield (
                    f"evaluations.{number}.pool",
                    "cls asks for a class token and backbone.class_token is false",
                )


def pretrain(config: PretrainConfig) -> int:
    """Runs, or goes on with, the run in `config.out`. Returns the exit code: 0 done, 75 stopped by a signal.

    ValueError for whatever in recipe, data or folder cannot work, before the first step.
    """
    runtime = start(config.train.precision, config.train.threads, config.train.trackers, config.out)
    return Pretraining(config, runtime).run()


class Pretraining:
    """One run. `__init__` makes its parts, top to bottom as an image passes them; `run` uses them."""

    def __init__(self, config: PretrainConfig, runtime: Runtime):
        assert config.out is not None, "the caller names the run folder"
        self.config, self.runtime, train = config, runtime, config.train
        self.files = Run(config.out, runtime.is_main)
        self.begun = self.files.exists()
        self.share = share_of(train, runtime.rank, runtime.world)
        with runtime.accelerator.main_process_first():  # downloads and caches are made once
            self.data = open_splits(config.data)
        self.backbone = build_backbone(config.backbone, config.data.channels, train.seed)
        choose_attention(self.backbone, runtime.device, train.precision)
        self.task = config.objective.build(self.backbone, config.masking, config.corruption, config.target, train.seed)
        steps = train.steps or math.ceil((train.epochs or 0) * len(self.data.train) / train.batch_size)
        self.learning_rate = LearningRate(config.optim, steps, train.extend)
        self.optimizer, self.names = config.optim.build(self.task)
        size, order = self.backbone.image_size, Order(len(self.data.train), train.seed)
        self.train_views = TrainingViews(self._pictures("train"), order, config.augment, size)
        self.fixed_views = {split: FixedViews(self._pictures(split), size) for split in ("train", "heldout")}
        self.opened: dict[Any, Splits] = {repr(config.data): self.data}
        self.evaluations = self._possible_evaluations()

    @property
    def total_steps(self) -> int:
        return self.learning_rate.total_steps

    def run(self) -> int:
        """Everything before the first step, the steps, and everything after."""
        found = self._open()
        gather = self.runtime.gather_objects
        self.skips = SkipList(self.files.skipped, gather)
        self.trace = Trace(self.files.trace, self.share.accumulation, gather) if self.config.train.trace else None
        for what, words in header(self, found.step if found else 0):
            self.runtime.log(f"{what:<10} {words}")
        views, workers = self.fixed_views, self.config.train.workers
        self.heldout = HeldOutLoss(
            self.config.heldout, self.task, views["train"], views["heldout"], self.runtime, workers
        )
        self.skips.add("heldout", self.heldout.skipped)
        self.trainer = self._make_trainer()
        if found is None:
            self._before_the_first_step()
        else:
            self.trainer.load_state(self.files.load(found, self.task, self.optimizer, self.names))
        if self.trainer.step < self.total_steps and not self._train():
            return EXIT_STOPPED
        return self._finish()

    def _train(self) -> bool:
        """False if a signal ended it before its end."""
        train = self.config.train
        if train.compile:
            compile_in_place(self.backbone)
        pin = self.runtime.device.type == "cuda"
        batches = training_batches(
            self.train_views, self.share, self.trainer.step, self.total_steps, train.workers, pin
        )
        self.progress = Progress(self.runtime, self.trainer.step, self.total_steps, train.batch_size)
        done = self.trainer.fit(
            batches,
            self.total_steps,
            [
                Event(1, self.progress.tick),
                Event(train.log_every, lambda step: self.skips.flush(), last=True),
                Event(train.eval_every, self._evaluate, last=True),
                Event(train.checkpoint_every, self._save, last=True),
            ],
        )
        self.progress.close()
        if not done:
            self.skips.flush()
            self._save(self.trainer.step)
            self.runtime.log(
                f"stopped and saved at step {self.trainer.step:,} of {self.total_steps:,}; the same command goes on"
            )
        return done

    def _open(self) -> Checkpoint | None:
        """The run folder, new or gone on with; the checkpoint to begin from."""
        config, found = self.config, None
        dataset = self.data.train.dataset
        data = {
            "fingerprint": dataset.fingerprint(),
            "images": len(dataset),
            "description": dataset.description,
        }
        facts = environment(self.runtime) | {"data": data, "commit": commit()}
        if self.begun:
            for note in self.files.check_same(config, self._free(), facts):
                self.runtime.log(f"note: {note}")
            found, damaged = self.files.newest()
            for path, reason in damaged:
                self.runtime.log(f"skipped a damaged checkpoint: {path}: {reason}")
            self.files.cut_back(found.step if found else -1)
        self.runtime.accelerator.wait_for_everyone()
        self.files.create(config, facts)
        if self.runtime.is_main:
            self.runtime.log_file = self.files.path / "train.log"
        if config.train.trackers:
            self.runtime.accelerator.init_trackers("mpp", {"recipe": dump_recipe(config)})
        return found

    def _free(self) -> set[str]:
        """Fields that may change from one start of the run to the next."""
        splits_matter = self.config.corruption.pool == "batch" or self.backbone.has_dropout
        return FREE - {"train.micro_batch_size"} if splits_matter else FREE

    def _pictures(self, split: str) -> Pictures:
        return Pictures(getattr(self.data, split), self.config.data.channels, self.config.data.range)

    def _possible_evaluations(self) -> list[Any]:
        """Those with labels. The pretraining data may have none; data named for an evaluation must."""
        kept = []
        for evaluation in self.config.evaluations:
            source = evaluation.data or self.config.data
            splits = self.opened.setdefault(repr(source), self.opened.get(repr(source)) or open_splits(source))
            if evaluation.data is None and splits.train.classes is None:
                self.runtime.log(
                    f"{evaluation.kind} is left out: {source.kind} has no labels; name labelled images in its data"
                )
                continue
            require_labels(splits, evaluation.kind)
            none = torch.empty(0)
            labels = [torch.from_numpy(part.labels()) for part in (splits.train, splits.heldout)]
            evaluation.check(Split(none, labels[0], none, labels[1], splits.train.classes or (), source.kind))
            kept.append(evaluation)
        return kept

    def _make_trainer(self) -> Trainer:
        train = self.config.train
        return Trainer(
            self.runtime,
            self.task,
            self.optimizer,
            self.learning_rate,
            accumulation=self.share.accumulation,
            batch_size=train.batch_size,
            clip=self.config.optim.clip,
            seed=train.seed,
            log_every=train.log_every,
            observe=self._observe,
            log=self._log,
        )

    def _before_the_first_step(self) -> None:
        """Scores of untrained features; then, with `init`, those of the weights to begin with."""
        self._score("untrained", 0)
        if self.config.init:
            self.runtime.log(f"init       {initialize(self.task, self.config.init)}")
            self._score("trained", 0)
        self._measure(0)

    def _observe(self, step: int, batch: dict[str, Any]) -> None:
        self.skips.add("train", batch["skipped"])
        if self.trace:
            self.trace.add(step + 1, batch, self.task.plan(batch["epoch"], batch["id"]))

    def _log(self, record: dict[str, Any]) -> None:
        self.files.metrics.write(record)
        self._track(record)
        self.progress.step(record)

    def _track(self, record: dict[str, Any]) -> None:
        if self.config.train.trackers:
            numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
            self.runtime.accelerator.log(numbers, step=record["step"])

    def _evaluate(self, step: int) -> None:
        """Is my loss normal, and does it help?"""
        self._measure(step)
        self._score("trained", step)

    def _measure(self, step: int) -> None:
        record = {"step": step} | self.heldout()
        self.files.metrics.write(record)
        self._track(record)
        self.runtime.log(heldout_line(record))
        if self.runtime.is_main and self.config.heldout.pictures:
            self.heldout.draw(self.files.path / "pictures" / f"reconstruction_{step:08}.png", f"step {step:,}")

    def _score(self, which: str, step: int) -> None:
        """Rows of results.jsonl for the backbone as it is now."""
        features = Features(
            self.backbone,
            self.runtime.accelerator,
            self.evaluations,
            self.config.data,
            self.config.train.workers,
            self.opened,
        )
        head = {"run": str(self.files.path), "step": step, "backbone": which}
        for row in evaluate(self.evaluations, features):
            self.files.results.write(head | row | {"commit": commit()})
            if step:
                self._track({"step": step, f"{row['evaluation']}_{row['metric']}": row["value"]})
        self.skips.add("evaluation", features.skipped)
        self.skips.flush()

    def _save(self, step: int) -> None:
        """One checkpoint, written by the main process while the others wait."""
        state = self.trainer.state()
        self.files.save(step, self.task, self.optimizer, self.names, state, self.config.train.keep_last)
        self.runtime.accelerator.wait_for_everyone()

    def _finish(self) -> int:
        """The small table, and what to try next."""
        run, log = self.files.path, self.runtime.log
        if self.config.train.trackers:
            self.runtime.accelerator.end_training()
        log(f"\nfinished: {self.total_steps:,} steps in {run}; pictures in {run / 'pictures'}\n")
        if results := self.files.results.read():
            log(comparison(results) + "\n")
        folder = run / "checkpoints" / f"{self.total_steps:08}"
        log("next:")
        log(f"  open the backbone in timm:   timm.create_model('local-dir:{folder}', pretrained=True)")
        log(
            "  your own images, no labels:  accelerate launch tools/pretrain_mpp.py "
            "--data.kind folder --data.path DIR --out runs/mine"
        )
        log(f"  train this run longer:       the same command with --train.extend.steps {self.total_steps}")
        return 0


def share_of(train: Train, rank: int, world: int) -> Share:
    """This process's part of every batch. ValueError if the batch does not divide over processes and accumulation."""
    micro = train.micro_batch_size or train.batch_size // world
    if not micro or train.batch_size % (world * micro):
        raise ValueError(
            f"train.batch_size {train.batch_size} does not divide over {world} process(es) with "
            f"train.micro_batch_size {train.micro_batch_size or 'unset'}; try a multiple of {world * (micro or 1)}"
        )
    return Share(train.batch_size, micro, rank, world)
