"""What training recipes have in common: how long, how much at a time, what is written down."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

from mpp.optim import Extend, Optim
from mpp.runtime import Precision, Signal

Count = Annotated[int, Ge(0)]
Positive = Annotated[int, Gt(0)]


# Fields of a training recipe that may change between a run and its continuation: nothing here changes what is learned.
# Data may move, since its fingerprint is compared; train.extend may grow, which is checked by itself.
FREE = frozenset(
    {
        "out",
        "data.path",
        "data.root",
        "train.workers",
        "train.log_every",
        "train.checkpoint_every",
        "train.keep_last",
        "train.keep_every",
        "train.save_errors",
        "train.signals",
        "train.take_over",
        "train.allow_changed_data",
        "train.trackers",
        "train.trace",
        "train.extend",
        "train.micro_batch_size",
        "train.max_nonfinite",
        "train.timeout",
        "train.data_timeout",
        "train.max_unreadable",
    }
)


@dataclass(frozen=True, kw_only=True)
class Train:
    """How long, how much at a time, and what is written down."""

    steps: Positive | None = 10_000
    """optimiser updates; null = by epochs"""
    epochs: Annotated[float, Gt(0)] | None = None
    """passes over the training pictures, where steps is null"""
    extend: tuple[Extend, ...] = ()
    """stretches after the planned end of a finished run, e.g. --train.extend.steps 1000"""
    batch_size: Positive = 256
    """images per update over all devices; accumulation is derived"""
    micro_batch_size: Positive | None = None
    """images per device at once; null = batch_size / processes; never changes results beyond rounding"""
    seed: Annotated[int, Ge(0), Lt(2**63)] = 0
    """of weights, order, crops and masks"""
    precision: Precision = "fp32"
    """fp16 is refused on a CPU"""
    compile: bool = False
    """compile the transformer blocks (25-50 s at the start, then faster)"""
    threads: Positive | None = None
    """CPU threads per process; null = cores / processes"""
    workers: Count = 0
    """processes per device that read and decode training pictures; never changes results"""
    data_timeout: Count = 600
    """seconds that a worker may take for a batch before the run ends and names the picture; 0 = for ever"""
    max_unreadable: Annotated[float, Gt(0), Le(1)] = 0.5
    """share of the training pictures read so far that may be unreadable before the run ends"""
    log_every: Positive = 50
    """steps between lines in metrics.jsonl"""
    eval_every: Count = 0
    """steps between held-out loss, pictures and evaluations; 0 = at the beginning and the end only"""
    checkpoint_every: Count = 0
    """steps between checkpoints; 0 = at the end and on a stop only"""
    keep_last: Positive = 2
    """newest checkpoints that are kept"""
    keep_every: Count = 0
    """checkpoints at multiples of so many steps are kept beside the newest; 0 = none"""
    save_errors: Literal["retry", "stop"] = "retry"
    """where a checkpoint cannot be written (disk full): go on and try at the next one, or stop; the last is kept"""
    signals: Annotated[tuple[Signal, ...], MinLen(1)] = ("INT", "TERM", "USR1", "HUP")
    """signals that ask for a stop: the step is finished and saved, exit code 75"""
    take_over: bool = False
    """write in a folder that another machine's run may still be at, where the file system has no locks"""
    allow_changed_data: bool = False
    """go on with a run though its data have changed"""
    timeout: Positive = 1800
    """seconds that processes wait for one another before the job ends; more than a save or an evaluation takes"""
    max_nonfinite: Positive = 10
    """updates in a row with a loss or gradient that is not finite, none of them applied, before the run stops"""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "aim", "comet_ml", "clearml", "trackio"], ...] = ()
    """accelerate's trackers by name"""
    trace: bool = False
    """write the sample ids, and a hash of each view and mask, of every step to trace.jsonl (for comparing runs)"""

    def faults(self) -> Iterator[tuple[str, str]]:
        if (self.steps is None) == (self.epochs is None):
            yield "steps", f"{self.steps} and epochs {self.epochs}: give one of them and set the other to null"
        if self.keep_every and (not self.checkpoint_every or self.keep_every % self.checkpoint_every):
            yield "keep_every", f"{self.keep_every} is no multiple of checkpoint_every {self.checkpoint_every}"
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            yield "micro_batch_size", f"{self.micro_batch_size} does not divide batch_size {self.batch_size}"


def contradictions(train: Train, optim: Optim) -> Iterator[tuple[str, str]]:
    """Faults (field, message) of a training recipe that neither section can see alone."""
    if train.steps is not None and (fault := optim.warmup_fault(train.steps, f"train.steps {train.steps}")):
        yield "optim.warmup_steps", fault
    if optim.skip_above and train.precision == "fp16":
        yield "optim.skip_above", "does not go with fp16, whose loss scaling leaves out updates by itself; try bf16"
