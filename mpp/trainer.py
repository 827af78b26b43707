"""The loop: batches in, updates out, and what is due after each step. It knows no task, no data and no evaluation."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpp.chance import Purpose, seed_of
from mpp.guard import Guard
from mpp.runtime import Runtime

Batch = dict[str, Any]


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
    so on the device. spike_limit: see `Guard`. observe: sees every batch before it goes to the device. after_update:
    gets the number of updates done, after each. log: gets a record each `log_every` steps. report: gets rows of updates
    that were left out, or far off, from all processes.
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
        spike_limit: float | None,
        max_nonfinite: int,
        log_every: int,
        observe: Callable[[int, Batch], None],
        after_update: Callable[[int], None],
        log: Callable[[dict[str, Any]], None],
        report: Callable[[list[dict[str, Any]]], None],
    ):
        self.runtime, self.learning_rate, self.accumulation, self.batch_size = (
            runtime,
            learning_rate,
            accumulation,
            batch_size,
        )
        self.clip, self.seed, self.log_every, self.observe, self.log = clip, seed, log_every, observe, log
        self.after_update, self.heeds_found_inf = after_update, heeds_found_inf
        self.report, self.max_nonfinite = report, max_nonfinite
        self.guard = Guard(runtime.device, spike_limit)
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
        """Step, what is still due at it, the guard, and the sums of every process's log window: exact in JSON."""
        self._look()
        gathered: Any = self.runtime.accelerator.gather(self.window.sums)
        scaler = self.runtime.accelerator.scaler
        return {
            "step": self.step,
            "pending": list(self.pending),
            "ended": self.ended,
            "window": gathered.view(self.runtime.world, -1).tolist(),
            "guard": self.guard.state(),
            "scaler": scaler.state_dict() if scaler else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.step, self.pending, self.ended = state["step"], list(state["pending"]), state.get("ended", False)
        sums = torch.tensor(state["window"])[:, : len(Window.SUMMED)]
        # Another number of processes continues the total.
        alike = len(sums) == self.runtime.world
        self.window.sums.copy_(sums[self.runtime.rank] if alike else sums.sum(0) * (self.runtime.rank == 0))
        if guard := state.get("guard"):  # not in checkpoints before it came
            self.guard.load_state(guard)
        if self.runtime.accelerator.scaler and state.get("scaler"):
            self.runtime.accelerator.scaler.load_state_dict(state["scaler"])

    def _update(self, batches: Iterator[Batch]) -> None:
        """One optimiser step over `accumulation` micro-batches."""
        for micro in range(self.accumulation):
            with self.window.waiting():
                batch = next(batches)
            self.observe(self.step, batch)
            ids = batch["id"]
            batch = {
                key: v.to(self.runtime.device, non_blocking=True) for key, v in batch.items() if isinstance(v, Tensor)
            }
            last = micro == self.accumulation - 1
            # Gradients are averaged over processes once, with the last micro-batch.
            with contextlib.nullcontext() if last else self.runtime.accelerator.no_sync(self.task):
                result = self._pass(batch, micro)
                loss = self.guard.sound(result["loss"], ids) / (result["count"] * self.accumulation)
                self.runtime.accelerator.backward(loss)
            self.window.add(result, len(ids))
            self.last_batch = batch
        self._apply()

    def _pass(self, batch: Batch, micro: int) -> Batch:
        """What the task makes of one micro-batch."""
        if self.random:
            torch.manual_seed(seed_of(self.seed, Purpose.DROPOUT, self.step, self.runtime.rank, micro))
        return self.task(batch)

    def _apply(self) -> None:
        """Clip and step; an update that the guard judges is left out, on every process alike."""
        accelerator = self.runtime.accelerator
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.step) * group.get("lr_scale", 1.0)
        limit = float("inf") if self.clip is None else self.clip
        norm = accelerator.clip_grad_norm_(self.parameters, limit)
        assert norm is not None
        out = self.guard.judge(self.step + 1, norm)
        if accelerator.scaler is None and self.heeds_found_inf:
            # The fused optimiser reads this flag on the device: no wait for it here.
            self.optimizer.optimizer.found_inf, self.optimizer.optimizer.grad_scale = out, None
        if self.heeds_found_inf or accelerator.scaler is not None or not out.item():
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.window.norm = norm.detach()
        if self.guard.is_due:
            self._look()

    def _look(self) -> None:
        """Unusual updates, reported; FloatingPointError where too many in a row were not finite."""
        if found := self.guard.look():
            self.report(self.runtime.gather_objects([one.row(self.runtime.rank) for one in found]))
        limit = min(self.max_nonfinite, self.last_step)
        if len(streak := self.guard.streak) >= limit:
            raise FloatingPointError(
                f"loss or gradient was not finite for {len(streak)} updates in a row, steps {streak[0]:,} to "
                f"{streak[-1]:,}; none was applied.\n{self._blame()}\nSteps, processes and samples are in "
                f"unusual_updates.jsonl. Try a lower optim.lr, precision: fp32, or another look at the data"
            )

    def _blame(self) -> str:
        """Where the last micro-batch's loss and gradient are not finite: made again by each process for itself."""
        self.optimizer.zero_grad()
        with self.runtime.accelerator.no_sync(self.task):
            result = self._pass(self.last_batch, self.accumulation - 1)
            self.runtime.accelerator.backward(result["loss"] / result["count"])
        gradients = [(name, p.grad) for name, p in self.task.named_parameters() if p.grad is not None]
        bad = [name.removeprefix("module.") for name, gradient in gradients if not gradient.isfinite().all()]
        where = f"not finite in {len(bad)} of {len(gradients)} parameters, {bad[0]} among them" if bad else "finite"
        told = f"  process {self.runtime.rank}: loss {result['loss'].item() / result['count']:.4g}, gradient {where}"
        return "\n".join(["The last batch again, each process for itself:", *self.runtime.gather_objects([told])])

    def _log(self) -> None:
        self._look()
        head = {"step": self.step, "images_seen": self.step * self.batch_size}
        record = self.window.summary(self.runtime) | self.guard.counted()
        self.log(head | record | {"lr": self.learning_rate(self.step - 1)})


class Window:
    """Sums since the last log line, kept on the device, and the clock."""

    SUMMED = ("loss", "count", "correct")  # over processes

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(len(self.SUMMED), device=device)
        self.norm = torch.zeros((), device=device)
        self.has_correct = False
        self.restart_clock()

    def add(self, result: Batch, images: int) -> None:
        self.has_correct = "correct" in result
        """A micro-batch; one without a finite loss counts for nothing, as it teaches nothing."""
        loss = result["loss"].detach()
        correct = result.get("correct", torch.zeros_like(loss))
        values = torch.stack([loss, torch.full_like(loss, result["count"]), correct.detach()])
        self.sums += torch.where(loss.isfinite(), values, 0.0)
        self.images += images

    def summary(self, runtime: Runtime) -> dict[str, Any]:
        """Means over the window and all processes; starts the next window."""
        sums: Any = runtime.accelerator.reduce(self.sums.clone(), reduction="sum")
        loss, count, correct = sums.tolist()
        seconds = max(time.perf_counter() - self.started, 1e-9)
        record = {
            "loss": loss / count if count else float("nan"),
            "grad_norm": self.norm.item(),
            "images_per_second": self.images * runtime.world / seconds,
            "data_wait": self.waited / seconds,
        }
        if self.has_correct:
            record["accuracy"] = correct / count if count else float("nan")
        self.sums.zero_()
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
