"""The job: masked patch pretraining, from a recipe to a run folder."""

import math
from typing import Any

import torch

from mpp.backbones import build_backbone, choose_attention, compile_in_place
from mpp.checkpoint import Checkpoint
from mpp.config import dump_recipe
from mpp.data.loader import FixedViews, Pictures, TrainingViews, training_batches
from mpp.data.order import Order, Share
from mpp.data.skipped import SkipList
from mpp.data.sources import open_splits, require_labels
from mpp.evaluation.features import Features, Split, evaluate
from mpp.header import header, of_time
from mpp.heldout import HeldOutLoss
from mpp.metrics import commit, comparison
from mpp.optim import LearningRate
from mpp.pretrain_recipe import FREE, PretrainConfig
from mpp.progress import Progress, heldout_line, seconds_per_pass
from mpp.runs import Run
from mpp.runtime import Runtime, environment, start
from mpp.trace import Trace
from mpp.trainer import Event, Train, Trainer
from mpp.weights import initial_checkpoint, initialize

EXIT_STOPPED = 75  # a signal ended the run before its end: the same command goes on (EX_TEMPFAIL of sysexits)


def pretrain(config: PretrainConfig) -> int:
    """Runs, or goes on with, the run in `config.out`. Returns the exit code: 0 done, 75 stopped by a signal.

    ValueError for whatever in recipe, data or folder cannot work, before the first step.
    """
    return begin(config).go()


def begin(config: PretrainConfig) -> "Pretraining":
    """Everything that can be refused, done; nothing is trained or written yet but the run folder's recipe."""
    runtime = start(config.train.precision, config.train.threads, config.train.trackers, config.out)
    return Pretraining(config, runtime)


class Pretraining:
    """One run. `__init__` makes its parts, top to bottom as an image passes them; `go` uses them."""

    def __init__(self, config: PretrainConfig, runtime: Runtime):
        assert config.out is not None, "the caller names the run folder"
        self.config, self.runtime, train = config, runtime, config.train
        self.files = Run(config.out, runtime.is_main)
        self.share = share_of(train, runtime.rank, runtime.world)
        with runtime.accelerator.main_process_first():  # downloads and caches are made once
            self.opened = {repr(source): open_splits(source) for source in self._sources()}
        self.data = self.opened[repr(config.data)]
        self.backbone = build_backbone(config.backbone, config.data.channels, train.seed)
        choose_attention(self.backbone, runtime.device, train.precision)
        self.task = config.objective.build(self.backbone, config.masking, config.corruption, config.target, train.seed)
        self.learning_rate = LearningRate(config.optim, self._planned_steps(), train.extend)
        self.evaluations = self._possible_evaluations()
        self.initial = initial_checkpoint(self.task, config.init) if config.init else None
        self.optimizer, self.names = config.optim.build(self.task)
        size, order = self.backbone.image_size, Order(len(self.data.train), train.seed)
        self.train_views = TrainingViews(self._pictures("train"), order, config.augment, size)
        fixed_views = [FixedViews(self._pictures(split), size) for split in ("train", "heldout")]
        # The recipe of a run is written once nothing is left that could be refused, so that a mistake can be mended.
        self.heldout = HeldOutLoss(config.heldout, self.task, fixed_views[0], fixed_views[1], runtime)
        self.found = self._open()
        self.skips = SkipList(self.files.skipped, runtime.gather_objects)
        self.skips.add("heldout", self.heldout.skipped)
        self.trace = Trace(self.files.trace, self.share.accumulation, runtime.gather_objects) if train.trace else None

    @property
    def total_steps(self) -> int:
        return self.learning_rate.total_steps

    def go(self) -> int:
        """Header, untrained scores, the steps, and the end; the exit code."""
        self.trainer = self._make_trainer()
        if self.found:
            self.trainer.load_state(self.files.load(self.found, self.task, self.optimizer, self.names))
        self._introduce(self.trainer.step)
        if self.found is None and not self._before_the_first_step():
            self.runtime.log("stopped before the first step; the same command begins again")
            return self._leave(EXIT_STOPPED)
        if (self.trainer.step < self.total_steps or self.trainer.pending) and not self._train():
            return self._leave(EXIT_STOPPED)
        self._tell_the_end()
        return self._leave(0)

    def _introduce(self, first_step: int) -> None:
        """The header, with the time that one real micro-batch needs now."""
        say = lambda what, words: self.runtime.log(f"{what:<10} {words}")  # noqa: E731
        say("run", f"{self.files.path}" + (f": goes on at step {first_step:,}" if first_step else ""))
        for what, words in header(self.config, self.data, self.task, self.share, self.runtime, self.total_steps):
            say(what, words)
        if steps := self.total_steps - first_step:
            batch = self.train_views.__getitems__(next(self.share.micro_batches(0, 1)))
            self.skips.add("train", batch["skipped"])
            seconds = seconds_per_pass(self.task, batch, self.runtime) * self.share.accumulation * steps
            say(*of_time(seconds, self.config.train.compile))

    def _train(self) -> bool:
        """False if a signal ended it before its end."""
        train, trainer = self.config.train, self.trainer
        if train.compile:
            compile_in_place(self.backbone)
        pin = self.runtime.device.type == "cuda"
        batches = training_batches(self.train_views, self.share, trainer.step, self.total_steps, train.workers, pin)
        self.progress = Progress(self.runtime, trainer.step, self.total_steps, train.batch_size)
        events = [
            Event("skipped", train.log_every, lambda step: self.skips.flush(), last=True),
            Event("evaluate", train.eval_every, self._evaluate, last=True),
            Event("save", train.checkpoint_every, self._save, last=True),
        ]
        done = trainer.fit(batches, self.total_steps, events)
        self.progress.close()
        if not done:
            self._save(trainer.step)
            self.runtime.log(
                f"stopped and saved at step {trainer.step:,} of {self.total_steps:,}; the same command goes on"
            )
        return done

    def _sources(self) -> list[Any]:
        return [self.config.data, *(e.data for e in self.config.evaluations if e.data is not None)]

    def _planned_steps(self) -> int:
        """train.steps, or as many as the epochs take."""
        train, warmup = self.config.train, self.config.optim.warmup_steps
        steps = train.steps or math.ceil((train.epochs or 0) * len(self.data.train) / train.batch_size)
        if warmup >= steps:
            raise ValueError(
                f"optim.warmup_steps: {warmup} is not less than the {steps} steps of {train.epochs} epochs"
            )
        return steps

    def _open(self) -> Checkpoint | None:
        """The run folder, new or gone on with; the checkpoint to begin from. The main process decides for all."""
        parts = (self.data.train.dataset, self.data.heldout.dataset)
        data = {
            "fingerprint": "-".join(part.fingerprint() for part in parts),
            "images": len(parts[0]),
            "description": self.data.description,
        }
        facts = environment(self.runtime) | {"data": data, "commit": commit()}
        facts |= {"micro_batch_size": self.share.micro_batch_size, "steps": self.total_steps}
        path, notes = self.runtime.on_main(lambda: self.files.begin(self.config, facts, FREE, self._is_split_sensitive))
        if self.runtime.is_main:
            self.runtime.log_file = self.files.path / "train.log"
        for note in notes:
            self.runtime.log(f"note       {note}")
        if self.config.train.trackers:
            self.runtime.accelerator.init_trackers("mpp", {"recipe": dump_recipe(self.config)})
        return Checkpoint(path) if path else None

    @property
    def _is_split_sensitive(self) -> bool:
        """Whether results depend on how a batch is split over micro-batches and processes."""
        return self.config.corruption.pool == "batch" or self.backbone.has_dropout

    def _pictures(self, split: str) -> Pictures:
        return Pictures(getattr(self.data, split), self.config.data.channels, self.config.data.range)

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
            require_labels(splits, evaluation.kind)
            self.backbone.check_readout(evaluation.pool, evaluation.layers)
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
            random=self.backbone.has_dropout,
            log_every=train.log_every,
            observe=self._observe,
            log=self._log,
        )

    def _before_the_first_step(self) -> bool:
        """Scores of untrained features, and with `init` of the weights to begin with; False if a signal came."""
        self._score("untrained", 0)
        if self.initial:
            self.runtime.log(f"init       {initialize(self.task, self.initial)}")
            self._score("trained", 0)
        self._measure(0)
        return not self.runtime.stop.agreed()

    def _observe(self, step: int, batch: dict[str, Any]) -> None:
        self.skips.add("train", batch["skipped"])
        self.progress.tick(step)
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
        features = Features(self.backbone, self.runtime, self.evaluations, self.config.data, self.opened)
        head = {"run": str(self.files.path), "step": step, "backbone": which}
        for row in evaluate(self.evaluations, features):
            self.files.results.write(head | row | {"commit": commit()})
            setting = ",".join(f"{key}={value}" for key, value in row["setting"].items())
            self._track({"step": step, f"{which}/{row['evaluation']}_{row['metric']}/{setting}": row["value"]})
        for where, skip in features.skipped:
            self.skips.add(where, [skip])
        self.skips.flush()

    def _save(self, step: int) -> None:
        """One checkpoint, written by the main process while the others wait."""
        self.skips.flush()
        state = self.trainer.state()
        self.files.save(step, self.task, self.optimizer, self.names, state, self.config.train.keep_last)
        self.runtime.accelerator.wait_for_everyone()

    def _tell_the_end(self) -> None:
        """The small table, and what to try next."""
        run, log, stretches = self.files.path, self.runtime.log, len(self.config.train.extend)
        log(f"\nfinished: {self.total_steps:,} steps in {run}; pictures in {run / 'pictures'}")
        if len(self.skips):
            log(f"{len(self.skips):,} pictures could not be used: {self.skips.file.path}")
        if results := self.files.results.read():
            log(f"\n{comparison(results)}")
        folder = run / "checkpoints" / f"{self.total_steps:08}"
        log("\nnext:")
        log(f"  open the backbone in timm:   timm.create_model('local-dir:{folder}', pretrained=True)")
        log(
            "  your own images, no labels:  accelerate launch tools/pretrain_mpp.py "
            "--data.kind folder --data.path DIR --out runs/mine"
        )
        longer = f"--train.extend.{stretches}.steps" if stretches else "--train.extend.steps"
        log(f"  train this run longer:       the same command with {longer} {self.total_steps}")

    def _leave(self, code: int) -> int:
        if self.config.train.trackers:
            self.runtime.accelerator.end_training()
        return code


def share_of(train: Train, rank: int, world: int) -> Share:
    """This process's part of every batch. ValueError if the batch does not divide over processes and accumulation."""
    micro = train.micro_batch_size or train.batch_size // world
    if not micro or train.batch_size % (world * micro):
        raise ValueError(
            f"train.batch_size {train.batch_size} does not divide over {world} process(es) with "
            f"train.micro_batch_size {train.micro_batch_size or 'unset'}; try a multiple of {world * (micro or 1)}"
        )
    return Share(train.batch_size, micro, rank, world)
