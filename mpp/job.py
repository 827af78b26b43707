"""What every training job shares: a run folder gone on with, the loop with what is due, checkpoints, records.

A job's `__init__` makes its parts top to bottom, as an image passes them, and ends with `_open`; `go` uses them.
"""

import math
import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from mpp.agreement import check_same_data, check_same_start
from mpp.backbones import Backbone, compile_in_place
from mpp.checkpoint import Checkpoint
from mpp.config import dump_recipe
from mpp.data.loader import Pictures, TrainingViews, told_worker, training_batches
from mpp.data.order import Share
from mpp.data.skipped import SkipList
from mpp.data.sources import Subset
from mpp.data.workers import check_machine
from mpp.disk import check_room, size_of
from mpp.exit_codes import EXIT_STOPPED
from mpp.guard import told
from mpp.header import of_time
from mpp.metrics import commit
from mpp.optim import Extend, LearningRate
from mpp.optimizer_state import load_optimizer_state, optimizer_state
from mpp.progress import Progress, seconds_per_pass
from mpp.run_folder import Run, extension
from mpp.runtime import Runtime, environment
from mpp.trace import Trace
from mpp.train_recipe import Train
from mpp.trainer import Event, Trainer
from mpp.words import plural


class Job(ABC):
    """One run: begin it or go on with it, train, leave."""

    free: frozenset[str]  # dotted recipe fields that may differ from one start to the next

    data_description: str
    data_parts: tuple[Any, ...]  # datasets whose fingerprints must not change between starts
    backbone: Backbone
    task: Any  # the module that is trained
    learning_rate: LearningRate
    optimizer: Any
    names: list[str]
    train_views: TrainingViews

    def __init__(self, config: Any, runtime: Runtime, is_part: bool = False):
        """is_part: of a larger job, which says what is done and with which weights; the header and what to try next
        then go to train.log alone, and `init` may be spelled anew."""
        assert config.out is not None, "the caller names the run folder"
        self.config, self.runtime = config, runtime
        check_same_start(runtime, config)
        self.files = Run(config.out, runtime.is_main)
        runtime.on_main(self.files.check)  # before minutes are spent on data and baselines
        self.free = type(self).free | {"init"} if is_part else type(self).free
        self.tell = runtime.record if is_part else runtime.log
        self.share = share_of(config.train, runtime.rank, runtime.world)

    @property
    def total_steps(self) -> int:
        return self.learning_rate.total_steps

    def _has_saved(self) -> bool:
        """Whether this run has checkpoints: weights to begin with are not needed again, and may be gone by now."""
        return self.runtime.on_main(lambda: (self.files.path / "checkpoints").is_dir())

    def go(self) -> int:
        """Header, what comes before the first step, the steps, and the end; the exit code."""
        self.trainer = self._make_trainer()
        if self.found:
            self.trainer.load_state(self._load(self.found))
            if self.trainer.pending and "save" not in self.trainer.pending:
                self.trainer.pending.append("save")  # what is made up for now must not be made twice
        self._introduce(self.trainer.step)
        if self.found is None and not self._before_the_first_step():
            self.runtime.log("stopped before the first step; the same command begins again")
            return self._leave(EXIT_STOPPED)
        if not self.trainer.is_done(self.total_steps) and not self._train():
            return self._leave(EXIT_STOPPED)
        self._tell_the_end()
        return self._leave(0)

    # What a job says and does in its own way

    @abstractmethod
    def _header(self) -> Iterator[tuple[str, str]]:
        """(what, in words) of everything that one would ask before the first step."""

    @abstractmethod
    def _before_the_first_step(self) -> bool:
        """What is measured of the weights to begin with; False if a signal came."""

    @abstractmethod
    def _evaluate(self, step: int) -> None:
        """Every train.eval_every steps, and at the end."""

    @abstractmethod
    def _contents(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """({file: tensors}, {file: document}) of a checkpoint, without optimiser and trainer."""

    @abstractmethod
    def _restore(self, found: Checkpoint) -> None:
        """The inverse of `_contents`."""

    def _is_split_sensitive(self) -> bool:
        """Whether results depend on how a batch is split over micro-batches and processes."""
        return self.backbone.has_dropout

    def _after_update(self, step: int) -> None:  # noqa: B027  (most jobs have nothing to do here)
        """After each update, before anything else that is due."""

    @abstractmethod
    def _tell_the_end(self) -> None:
        """What came of it, and what to try next."""

    # What all share

    def _introduce(self, first_step: int) -> None:
        """The header, with the time that one real micro-batch needs now."""
        say = lambda what, words: self.tell(f"{what:<10} {words}")  # noqa: E731
        done = self.trainer.is_done(self.total_steps)
        state = (
            f": goes on at step {first_step:,}" if not done else f": finished at step {first_step:,}; nothing is left"
        )
        say("run", f"{self.files.path}" + (state if first_step else ""))
        for what, words in self._header():
            say(what, words)
        if not self.trainer.is_done(self.total_steps):
            steps = self.total_steps - first_step
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
        span = (trainer.step, self.total_steps)
        batches = training_batches(self.train_views, self.share, *span, train.workers, pin, train.data_timeout)
        self.runtime.wait_at_most(train.timeout)
        self.progress = Progress(self.runtime, trainer.step, self.total_steps, train.batch_size)
        try:
            done = trainer.fit(batches, self.total_steps, self._events())
        except RuntimeError as error:
            if "DataLoader" not in str(error):
                raise
            for worker in multiprocessing.active_children():
                worker.kill()  # they heed no other signal, and one that hangs would be waited for
            raise ValueError(told_worker(str(error), self.train_views.pictures)) from None
        self.progress.close()
        if not done:
            self._save(trainer.step)
            self.runtime.log(
                f"stopped and saved at step {trainer.step:,} of {self.total_steps:,}; the same command goes on"
            )
        return done

    def _flush_skipped(self, step: int) -> None:
        """ValueError where too many of the training pictures could not be used."""
        self.skips.flush()
        bad = self.skips.count("train")
        seen = min(len(self.train_views.pictures.subset), step * self.config.train.batch_size + bad)
        if self.skips.is_too_much(bad, seen, self.config.train.max_unreadable):
            raise ValueError(
                f"{bad:,} of about {seen:,} training pictures read so far could not be used, more than "
                f"train.max_unreadable {self.config.train.max_unreadable:g} allows: {self.skips.file.path} names them "
                f"with reasons. Is {self.data_description} what you meant?"
            )

    def _events(self) -> list[Event]:
        """What is due, in order."""
        train = self.config.train
        return [
            Event("skipped", train.log_every, self._flush_skipped, last=True),
            Event("evaluate", train.eval_every, self._evaluate, last=True),
            Event("save", train.checkpoint_every, self._save, last=True),
        ]

    def _planned_steps(self, images: int) -> int:
        """train.steps, or as many as the epochs take."""
        train, optim = self.config.train, self.config.optim
        steps = train.steps or math.ceil((train.epochs or 0) * images / train.batch_size)
        if fault := optim.warmup_fault(steps, f"the {steps} steps of {train.epochs} epochs"):
            raise ValueError(f"optim.warmup_steps: {fault}")
        return steps

    def _open(self) -> None:
        """The run folder, new or gone on with; the checkpoint to begin from. The main process decides for all."""
        data = {
            "fingerprint": "-".join(part.fingerprint() for part in self.data_parts),
            "images": len(self.data_parts[0]),
            "description": self.data_description,
        }
        check_same_data(self.runtime, self.data_parts)
        views = self.train_views
        size = self.share.micro_batch_size * views.pictures.channels * math.prod(views.size)
        machine = check_machine(self.config.train.workers, size)
        facts = environment(self.runtime) | {"data": data, "commit": commit()}
        facts |= {"micro_batch_size": self.share.micro_batch_size, "steps": self.total_steps}
        begin: Callable[[], Any] = lambda: self.files.begin(self.config, facts, self.free, self._is_split_sensitive())  # noqa: E731
        path, notes = self.runtime.on_main(begin)
        if path is None or Checkpoint(path).step < self.total_steps:
            self.runtime.on_main(self._check_room)
        if self.runtime.is_main:
            self.runtime.log_file = self.files.path / "train.log"
        for note in [*machine, *notes]:
            self.runtime.log(f"note       {note}")
        if self.config.train.trackers:
            self.runtime.accelerator.init_trackers("mpp", {"recipe": dump_recipe(self.config)})
        gather = self.runtime.gather_objects
        self.found = Checkpoint(path) if path else None
        self.skips = SkipList(self.files.skipped, gather)
        self.trace = Trace(self.files.trace, self.share.accumulation, gather) if self.config.train.trace else None

    def _pictures(self, subset: Subset) -> Pictures:
        return Pictures(subset, self.config.data.channels, self.config.data.range)

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
            heeds_found_inf=self.config.optim.heeds_found_inf,
            spike_limit=self.config.optim.skip_above,
            max_nonfinite=train.max_nonfinite,
            log_every=train.log_every,
            observe=self._observe,
            after_update=self._updated,
            log=self._log,
            report=self._report,
        )

    def _updated(self, step: int) -> None:
        self._after_update(step)
        self.progress.tick(step)

    def _observe(self, step: int, batch: dict[str, Any]) -> None:
        self.skips.add("train", batch["skipped"])
        if self.trace:
            self.trace.add(step + 1, batch, *self._plan(batch))

    def _plan(self, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        """What is traced of a batch beside its ids and views: tensors (B, ...)."""
        return ()

    def _log(self, record: dict[str, Any]) -> None:
        self.files.metrics.write(record)
        self._track(record)
        self.progress.step(record)

    def _report(self, updates: list[dict[str, Any]]) -> None:
        """Updates that were left out, or far off: with the images they were made of, for a person to look at."""
        name = self.data_parts[0].name
        for row in updates:
            self.files.unusual.write(row | {"names": [name(id) for id in row["ids"]]})
        for line in told(updates, self.config.optim.skip_above):
            self.runtime.log(f"note       {line}")

    def _track(self, record: dict[str, Any]) -> None:
        if self.config.train.trackers:
            numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
            self.runtime.accelerator.log(numbers, step=record["step"])

    def _save(self, step: int) -> None:
        """One checkpoint, written by the main process while the others wait.

        OSError where it cannot be written and the run ends with it, or is not to go on without it.
        """
        self.skips.flush()
        trainer = self.trainer.state()  # asks all processes
        if fault := self.runtime.on_main(lambda: self._write(step, trainer)):
            text = f"no checkpoint of step {step:,}: {fault}. Those before it stay"
            is_end = self.trainer.is_last(self.total_steps) or self.runtime.stop.agreed()
            if is_end or self.config.train.save_errors == "stop":
                raise OSError(f"{text}; make room, and the same command goes on from the last one")
            self.runtime.log(f"note       {text}; trying again in {self.config.train.checkpoint_every:,} steps")

    def _write(self, step: int, trainer: dict[str, Any]) -> str | None:
        """What kept a checkpoint from being written. Main process only."""
        files, documents = self._contents()
        tensors, state = optimizer_state(self.optimizer, self.names)
        files["state/optimizer.safetensors"] = tensors
        documents["state/trainer.json"] = {"trainer": trainer, "optimizer": state}
        try:
            self.files.save(step, files, documents, self.config.train.keep_last, self.config.train.keep_every)
        except OSError as error:
            return str(error)
        return None

    def _check_room(self) -> None:
        """ValueError where the checkpoints will not fit on the disk. Main process only."""
        weights = sum(p.numel() * p.element_size() for p in self.task.parameters())
        moments = 2 * weights  # of Adam; no optimiser here that keeps more is known
        there = size_of(self.files.path / "checkpoints")  # makes way for the new ones
        copies = self.config.train.keep_last + 1  # a new one is whole before an old one goes
        check_room(self.files.path, moments, max(moments + weights, copies * (moments + weights) - there))

    def _load(self, found: Checkpoint) -> dict[str, Any]:
        """Weights and optimiser as they were; the trainer's state."""
        self._restore(found)
        state = found.document("state/trainer.json")
        load_optimizer_state(
            self.optimizer, self.names, found.tensors("state/optimizer.safetensors"), state["optimizer"]
        )
        return state["trainer"]

    def _longer(self) -> str:
        """The option that trains a finished run longer: what it was extended by, and as much again."""
        if not self.config.train.extend:
            return f"--train.extend.steps {self.total_steps}"
        return extension((*self.config.train.extend, Extend(steps=self.total_steps)))

    def _leave(self, code: int) -> int:
        if self.config.train.trackers:
            self.runtime.accelerator.end_training()
        self.files.leave()
        return code


def share_of(train: Train, rank: int, world: int) -> Share:
    """This process's part of every batch. ValueError if the batch does not divide over processes and accumulation."""
    micro = train.micro_batch_size or train.batch_size // world
    if not micro or train.batch_size % (world * micro):
        raise ValueError(
            f"train.batch_size {train.batch_size} does not divide over {plural(world, 'process', 'processes')} with "
            f"train.micro_batch_size {train.micro_batch_size or 'unset'}; try a multiple of {world * (micro or 1)}"
        )
    return Share(train.batch_size, micro, rank, world)
