"""The loop: batches in, updates out, and what is due after each step. It knows no task, no data and no evaluation."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

from mpp.chance import Purpose, seed_of
from mpp.optim import Extend
from mpp.runtime import Precision, Runtime

Batch = dict[str, Any]
Count = Annotated[int, Ge(0)]
Positive = Annotated[int, Gt(0)]
MAX_BAD_STEPS = 10  # non-finite updates in a row before the run is called lost


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
        "train.trackers",
        "train.trace",
        "train.extend",
        "train.micro_batch_size",
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
    log_every: Positive = 50
    """steps between lines in metrics.jsonl"""
    eval_every: Count = 0
    """steps between held-out loss, pictures and evaluations; 0 = at the beginning and the end only"""
    checkpoint_every: Count = 0
    """steps between checkpoints; 0 = at the end and on a stop only"""
    keep_last: Positive = 2
    """checkpoints that are kept"""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "aim", "comet_ml", "clearml", "trackio"], ...] = ()
    """accelerate's trackers by name"""
    trace: bool = False
    """write the sample ids, and a hash of each view and mask, of every step to trace.jsonl (for comparing runs)"""

    def faults(self) -> Iterator[tuple[str, str]]:
        if (self.steps is None) == (self.epochs is None):
            yield "steps", f"{self.steps} and epochs {self.epochs}: give one of them and set the other to null"
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            yield "micro_batch_size", f"{self.micro_batch_size} does not divide batch_size {self.batch_size}"


@dataclass(frozen=True)
class Event:
    """Something that is due every `every` steps (0: never by count), and at the end if `last`."""

    name: str
    every: int
    action: Callable[[int], None]
    last: bool = False

    def due(self, step: int, total: int) -> bool:
        return bool(self.every and step % self.every == 0) or (self.last and step == total)


class Trainer:
    """Runs a task's updates.

    task: a module, batch -> {"loss": sum, "count": int, "correct"?: sum}, with the same count for every micro-batch, so
    that sums over accumulation and processes are those of one large batch. learning_rate: step -> lr; a parameter
    group's `lr_scale` multiplies it. random: whether the task draws (dropout), from a generator that is then seeded
    from step, process and micro-batch. heeds_found_inf: whether the optimiser leaves an update out by itself when told
    so on the device. observe: sees every batch before it goes to the device. after_update: gets the number of updates
    done, after each. log: gets a record each `log_every` steps.
    """

    def __init__(
        self,
        runtime: Runtime,
        task: nn.Module,
        optimizer: torch.optim.Optimizer,
        learning_rate: Callable[[int], float],
        *,
        accumulation: int,
        batch_size: int,
        clip: float | None,
        seed: int,
        random: bool,
        heeds_found_inf: bool,
        log_every: int,
        observe: Callable[[int, Batch], None],
        after_update: Callable[[int], None],
        log: Callable[[dict[str, Any]], None],
    ):
        self.runtime, self.learning_rate, self.accumulation, self.batch_size = (
            runtime,
            learning_rate,
            accumulation,
            batch_size,
        )
        self.clip, self.seed, self.log_every, self.observe, self.log = clip, seed, log_every, observe, log
        self.after_update, self.heeds_found_inf = after_update, heeds_found_inf
        self.task, self.optimizer = runtime.accelerator.prepare(task, optimizer)
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.random = random
        self.window = Window(runtime.device)
        self.step, self.pending, self.ended = 0, list[str](), False

    def is_done(self, last_step: int) -> bool:
        """Whether nothing is left to train or to do."""
        return not self.pending and self.is_last(last_step)

    def is_last(self, last_step: int) -> bool:
        """Whether no update comes after this step."""
        return self.ended or self.step >= last_step

    def end_here(self) -> None:
        """Called by an event, on all processes: this step becomes the last one, with what is due at the last."""
        self.ended = True
        if self.window.images:
            self._log()

    def fit(self, batches: Iterator[Batch], last_step: int, events: Sequence[Event]) -> bool:
        """Trains from the present step to `last_step`; False if a signal ended it before.

        A signal is heeded after each update and before each event; what was due and not done is done first when the
        run goes on (`self.pending` is part of the state).
        """
        self.last_step = last_step
        self.window.restart_clock()
        if self.pending and not self._events(events, last_step):
            return False
        while self.step < last_step and not self.ended:
            self.task.train()
            self._update(batches)
            self.step += 1
            self.after_update(self.step)
            if self.step % self.log_every == 0 or self.step == last_step:
                self._log()
            self.pending = [event.name for event in events if event.due(self.step, last_step)]
            if not self._events(events, last_step):
                return False
        return True

    def _events(self, events: Sequence[Event], last_step: int) -> bool:
        """Does what is pending, in order; False if a signal asks to leave (all processes agree on when)."""
        for place, event in enumerate(events):
            if event.name in self.pending:
                if self.runtime.stop.agreed():
                    return False
                self.pending.remove(event.name)
                ended = self.ended
                with self.window.paused():
                    event.action(self.step)
                if self.ended and not ended:  # what else the last step asks for, and what comes later in the order
                    later = [other.name for other in events[place + 1 :] if other.last]
                    self.pending += [name for name in later if name not in self.pending]
        return not self.runtime.stop.agreed() or self.is_done(last_step)

    def state(self) -> dict[str, Any]:
        """Step, what is still due at it, and the sums of every process's log window: floats, exact in JSON."""
        gathered: Any = self.runtime.accelerator.gather(self.window.sums)
        scaler = self.runtime.accelerator.scaler
        return {
            "step": self.step,
            "pending": list(self.pending),
            "ended": self.ended,
            "window": gathered.view(self.runtime.world, -1).tolist(),
            "scaler": scaler.state_dict() if scaler else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.step, self.pending, self.ended = state["step"], list(state["pending"]), state.get("ended", False)
        sums = torch.tensor(state["window"])
        if len(sums) == self.runtime.world:
            mine = sums[self.runtime.rank]
        else:  # another number of processes continues the total; what is counted alike on each stays as it is
            shared = len(Window.SUMMED)
            mine = torch.cat([sums[:, :shared].sum(0) * (self.runtime.rank == 0), sums[0, shared:]])
        self.window.sums.copy_(mine)
        if self.runtime.accelerator.scaler and state.get("scaler"):
            self.runtime.accelerator.scaler.load_state_dict(state["scaler"])

    def _update(self, batches: Iterator[Batch]) -> None:
        """One optimiser step over `accumulation` micro-batches."""
        for micro in range(self.accumulation):
            with self.window.waiting():
                batch = next(batches)
            self.observe(self.step, batch)
            batch = {
                key: v.to(self.runtime.device, non_blocking=True) for key, v in batch.items() if isinstance(v, Tensor)
            }
            if self.random:
                torch.manual_seed(seed_of(self.seed, Purpose.DROPOUT, self.step, self.runtime.rank, micro))
            last = micro == self.accumulation - 1
            # Gradients are averaged over processes once, with the last micro-batch.
            with contextlib.nullcontext() if last else self.runtime.accelerator.no_sync(self.task):
                result = self.task(batch)
                self.runtime.accelerator.backward(result["loss"] / (result["count"] * self.accumulation))
            self.window.add(result, len(batch["id"]))
        self._apply()

    def _apply(self) -> None:
        """Clip and step; an update with a non-finite gradient is left out, on every process alike."""
        accelerator = self.runtime.accelerator
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.step) * group.get("lr_scale", 1.0)
        limit = float("inf") if self.clip is None else self.clip
        norm = accelerator.clip_grad_norm_(self.parameters, limit)
        assert norm is not None
        bad = (~norm.isfinite()).float()
        if accelerator.scaler is None and self.heeds_found_inf:
            # The fused optimiser reads this flag on the device: no wait for it here.
            self.optimizer.optimizer.found_inf, self.optimizer.optimizer.grad_scale = bad, None
        if self.heeds_found_inf or accelerator.scaler is not None or not bad.item():
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.window.norm = norm.detach()
        self.window.count_bad(bad)

    def _log(self) -> None:
        record = self.window.summary(self.runtime)
        limit = min(MAX_BAD_STEPS, self.last_step)
        if record.pop("longest_bad_streak") >= limit:
            raise FloatingPointError(
                f"the gradient was not finite for {limit} steps in a row up to step {self.step}; none "
                f"was applied. Try a lower optim.lr or precision: fp32, and look for broken values in the data"
            )
        head = {"step": self.step, "images_seen": self.step * self.batch_size}
        self.log(head | record | {"lr": self.learning_rate(self.step - 1)})


class Window:
    """Sums since the last log line, kept on the device, and the clock."""

    SUMMED = ("loss", "count", "correct")  # over processes
    ALIKE = ("bad", "bad_streak", "longest_bad_streak")  # the same on each, since gradients are

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(len(self.SUMMED) + len(self.ALIKE), device=device)
        self.norm = torch.zeros((), device=device)
        self.has_correct = False
        self.restart_clock()

    def add(self, result: Batch, images: int) -> None:
        self.has_correct = "correct" in result
        correct = result.get("correct", torch.zeros_like(result["loss"]))
        self.sums[:3] += torch.stack(
            [result["loss"].detach(), torch.full_like(result["loss"], result["count"]), correct]
        ).detach()
        self.images += images

    def count_bad(self, bad: Tensor) -> None:
        self.sums[3] += bad
        self.sums[4] = (self.sums[4] + bad) * bad
        self.sums[5] = torch.maximum(self.sums[5], self.sums[4])

    def summary(self, runtime: Runtime) -> dict[str, Any]:
        """Means over the window and all processes; starts the next window."""
        sums: Any = runtime.accelerator.reduce(self.sums[:3].clone(), reduction="sum")
        loss, count, correct = sums.tolist()
        bad, _, longest = self.sums[3:].tolist()
        seconds = max(time.perf_counter() - self.started, 1e-9)
        record = {
            "loss": loss / count,
            "grad_norm": self.norm.item(),
            "images_per_second": self.images * runtime.world / seconds,
            "data_wait": self.waited / seconds,
            "skipped_updates": int(bad),
            "longest_bad_streak": longest,
        }
        if self.has_correct:
            record["accuracy"] = correct / count
        self.sums[:4] = 0
        self.sums[5] = self.sums[4]
        self.restart_clock()
        return record

    def restart_clock(self) -> None:
        self.started, self.waited, self.images = time.perf_counter(), 0.0, 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time in here is waiting for data."""
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here (saving, evaluating) is not training time."""
        began = time.perf_counter()
        yield
        self.started += time.perf_counter() - began
