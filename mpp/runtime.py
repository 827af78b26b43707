"""The one place that makes an Accelerator: devices, processes, threads, precision; and the log and the stop signal."""

import ctypes
import os
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from tqdm import tqdm

Precision = Literal["fp32", "bf16", "fp16"]

_TO_ACCELERATE = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass
class Runtime:
    """What a job knows of where it runs."""

    accelerator: Accelerator
    threads: int
    stop: "StopSignal"
    log_file: Path | None = None
    _lines_before_the_run: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world(self) -> int:
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def log(self, text: str = "") -> None:
        """A line for the person, and for train.log once there is a run folder; the main process only."""
        if not self.is_main:
            return
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
        self._lines_before_the_run.append(text)
        if self.log_file:
            with self.log_file.open("a", encoding="utf-8") as file:
                file.write("".join(line + "\n" for line in self._lines_before_the_run))
            self._lines_before_the_run.clear()

    def gather_objects(self, values: list[Any]) -> list[Any]:
        """The lists of all processes, one after the other."""
        if self.world == 1:
            return values
        gathered: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(gathered, values)
        return [value for part in gathered for value in part]


def start(
    precision: Precision, threads: int | None = None, trackers: Sequence[str] = (), folder: Path | None = None
) -> Runtime:
    """The Accelerator, set up once. ValueError when the launcher and the recipe disagree."""
    _check_launcher(precision)
    stop = StopSignal()
    count = threads or max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    # `accelerate launch` sets one thread per process, which halves the speed of a 2-core laptop.
    torch.set_num_threads(count)
    accelerator = Accelerator(
        mixed_precision=_TO_ACCELERATE[precision],
        log_with=list(trackers) or None,  # pyright: ignore
        project_dir=folder,
        # No buffer changes in training; views avoid a second copy of the gradients.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )
    _check_world(accelerator)
    if precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError("train.precision: fp16 does not train on a CPU; try bf16 or fp32")
    stop.agree_across(accelerator)
    return Runtime(accelerator, count, stop)


class StopSignal:
    """INT, TERM and USR1 ask for a stop at the end of the step; a second one ends the process at once.

    The kernel sends TERM when the launcher dies (it may die of the same Ctrl-C that already came here): that one
    counts only as a first.
    """

    def __init__(self) -> None:
        self.requested, self._parent = False, os.getppid()
        self._group: Any = None
        _ask_for_term_when_the_parent_dies()
        for number in _SIGNALS:
            signal.signal(number, self._receive)

    def agree_across(self, accelerator: Accelerator) -> None:
        if accelerator.num_processes > 1:
            # On the CPU whatever the device: asking every step must not wait for a GPU.
            self._group = torch.distributed.new_group(backend="gloo")

    def agreed(self) -> bool:
        """Whether any process was asked to stop; every process gets the same answer, so call it on all."""
        if self._group is None:
            return self.requested
        flag = torch.tensor(int(self.requested))
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def _receive(self, number: int, frame: Any) -> None:
        if os.getppid() != self._parent:
            self._parent = os.getppid()
        elif self.requested:
            os.write(2, b"second signal: leaving now; the last checkpoint is intact\n")
            os._exit(128 + number)
        self.requested = True
        os.write(2, f"\n{signal.Signals(number).name}: finishing this step, saving, leaving\n".encode())


def environment(runtime: Runtime) -> dict[str, Any]:
    """What could change numbers besides the recipe: versions, device, processes, threads."""
    import accelerate
    import datasets
    import PIL
    import timm
    import torchvision

    versions = {module.__name__: module.__version__ for module in (torch, torchvision, accelerate, timm, datasets, PIL)}
    device = (
        torch.cuda.get_device_name() if runtime.device.type == "cuda" else platform.processor() or platform.machine()
    )
    return {
        "python": platform.python_version(),
        "versions": versions,
        "platform": platform.platform(),
        "device": f"{runtime.device.type}: {device}",
        "processes": runtime.world,
        "threads": runtime.threads,
    }


def _check_launcher(precision: Precision) -> None:
    """The recipe decides what changes numbers; a launcher that says otherwise is an error, not a default."""
    said = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") or "no"
    if said not in ("no", _TO_ACCELERATE[precision]):
        raise ValueError(
            f"accelerate launch was told --mixed_precision {said}, the recipe says train.precision: {precision}; "
            f"leave the precision to the recipe: --mixed_precision no"
        )
    if os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") not in ("", "1"):
        raise ValueError(
            "accelerate launch was told --gradient_accumulation_steps; here train.micro_batch_size decides"
        )
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() not in ("", "no"):
        raise ValueError("accelerate launch was told --dynamo_backend; here train.compile decides: --dynamo_backend no")


def _check_world(accelerator: Accelerator) -> None:
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if asked != accelerator.num_processes:
        raise ValueError(
            f"{asked} processes were started and each believes it is one of {accelerator.num_processes}. On CPUs use: "
            f"ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes {asked} --num_machines 1 "
            f"--mixed_precision no --dynamo_backend no ..."
        )


def _ask_for_term_when_the_parent_dies() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a launcher that dies orphans its ranks
