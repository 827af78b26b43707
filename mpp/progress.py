"""What a person sees of a run: a bar on a terminal, plain lines elsewhere; durations and counts in words."""

import sys
import time
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm

from mpp.runtime import Runtime


class Progress:
    """Shows records of training steps and of evaluations as they come."""

    def __init__(self, runtime: Runtime, first_step: int, last_step: int, batch_size: int):
        self.runtime, self.last_step, self.batch_size = runtime, last_step, batch_size
        self.bar = None
        if runtime.is_main and sys.stderr.isatty():
            self.bar = tqdm(initial=first_step, total=last_step, unit="step", dynamic_ncols=True, smoothing=0.05)

    def tick(self, step: int) -> None:
        """A step is done."""
        if self.bar is not None:
            self.bar.update(step - self.bar.n)

    def step(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl; time left at the present speed, without saving and evaluating."""
        left = (self.last_step - record["step"]) * self.batch_size / record["images_per_second"]
        words = [
            f"loss {record['loss']:.4f}",
            f"lr {record['lr']:.2e}",
            f"{record['images_per_second']:,.0f} images/s",
            f"data {100 * record['data_wait']:.0f} %",
        ]
        if self.bar is not None:
            self.bar.set_postfix_str(", ".join(words))
        else:
            self.runtime.log(f"step {record['step']:,}/{self.last_step:,}  {'  '.join(words)}  {duration(left)} left")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def heldout_line(record: dict[str, Any]) -> str:
    """Held-out loss beside what predictors get that learn nothing."""
    kinds = ", ".join(
        f"{kind} {record[f'heldout_loss_{kind}']:.3f}"
        for kind in ("masked", "random", "kept")
        if record[f"heldout_loss_{kind}"] is not None
    )
    return f"step {record['step']:,}: held-out loss {record['heldout_loss']:.4f} ({kinds}){normal(record)}"


def normal(record: dict[str, Any]) -> str:
    """Is my loss normal? The yardsticks, as the tail of a line."""
    constant, neighbour = record["baseline_entropy"], record["baseline_neighbour_loss"]
    if record["heldout_accuracy"] is None:
        return f"; best constant {constant:.4f}, from the nearest visible patch's colour {neighbour:.4f}"
    return (
        f", accuracy {record['heldout_accuracy']:.3f}; best constant {constant:.3f}, nearest visible patch "
        f"{neighbour:.3f} (copying it: accuracy {record['baseline_neighbour_accuracy']:.3f})"
    )


def seconds_per_pass(task: nn.Module, batch: dict[str, Any], runtime: Runtime) -> float:
    """Forward and backward of one micro-batch on the device, the last of three; leaves weights as they were."""
    batch = {key: value.to(runtime.device) for key, value in batch.items() if isinstance(value, Tensor)}
    seconds = 0.0
    for _ in range(3):
        began = time.perf_counter()
        with runtime.accelerator.autocast():
            loss = task(batch)["loss"]
        loss.backward()
        task.zero_grad(set_to_none=True)
        loss.item()  # waits for a GPU
        seconds = time.perf_counter() - began
    return seconds


def duration(seconds: float) -> str:
    """95 -> 1:35, 4000 -> 1:06:40."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def millions(module: nn.Module) -> str:
    return f"{sum(p.numel() for p in module.parameters()) / 1e6:,.2f} M"
