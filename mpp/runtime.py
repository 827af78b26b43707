"""The one place that makes an Accelerator: devices, processes, threads, precision; and the log and the stop signal."""

import ctypes
import faulthandler
import os
import platform
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from torch import Tensor
from tqdm import tqdm

T = TypeVar("T")
Precision = Literal["fp32", "bf16", "fp16"]
Signal = Literal["INT", "TERM", "USR1", "USR2", "HUP", "XCPU"]

_TO_ACCELERATE = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
START = timedelta(hours=2)  # others wait while the main process downloads data or indexes them
STUCK = 20  # seconds after a signal: a launcher kills after 30
SIGNALS: tuple[Signal, ...] = ("INT", "TERM", "USR1", "HUP")


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
        if self.is_main:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
            self.record(text)

    def record(self, text: str) -> None:
        """A line for train.log alone; the main process only."""
        if not self.is_main:
            return
        self._lines_before_the_run.append(text)
        if self.log_file:
            with self.log_file.open("a", encoding="utf-8") as file:
                file.write("".join(line + "\n" for line in self._lines_before_the_run))
            self._lines_before_the_run.clear()

    def on_main(self, action: Callable[[], T]) -> T:
        """What the main process finds, on every process; its ValueError is raised on all of them alike."""
        if self.world == 1:
            return action()
        answer: list[Any] = [None, None]
        if self.is_main:
            try:
                answer[0] = action()
            except ValueError as error:
                answer[1] = str(error)
        torch.distributed.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise ValueError(answer[1])
        return answer[0]

    def wait_at_most(self, seconds: int) -> None:
        """From now on a process that waits longer for the others ends with an error, and so ends the job."""
        if self.world > 1:
            set_timeout = getattr(torch.distributed, "set_timeout", None)  # a name that torch 2.9 has not
            set_timeout = set_timeout or torch.distributed.distributed_c10d._set_pg_timeout
            for group in (None, self.stop.group):
                set_timeout(timedelta(seconds=seconds), group)

    def summed(self, values: Tensor) -> Tensor:
        """Sum over processes, on the CPU. Where each entry was filled by one of them, adding the zeros is exact."""
        if self.world == 1:
            return values
        return self.accelerator.reduce(values.to(self.device), reduction="sum").cpu()  # pyright: ignore

    def gather_objects(self, values: list[Any]) -> list[Any]:
        """The lists of all processes, one after the other."""
        if self.world == 1:
            return values
        gathered: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(gathered, values)
        return [value for part in gathered for value in part]


def start(
    precision: Precision,
    threads: int | None = None,
    trackers: Sequence[str] = (),
    folder: Path | None = None,
    signals: Sequence[Signal] = SIGNALS,
) -> Runtime:
    """The Accelerator, set up once. ValueError when the launcher and the recipe disagree."""
    _check_launcher(precision)
    check_trackers(trackers)
    stop = StopSignal(signals)
    count = threads or max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    # `accelerate launch` sets one thread per process, which halves the speed of a 2-core laptop.
    torch.set_num_threads(count)
    # One process may run several jobs, each with its own precision; the process group stays.
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    accelerator = Accelerator(
        mixed_precision=_TO_ACCELERATE[precision],
        log_with=list(trackers) or None,  # pyright: ignore
        project_dir=folder,
        # No buffer changes in training; views avoid a second copy of the gradients.
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=START),
        ],
    )
    # accelerate has no other name for it yet; a user can do nothing about it.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
    _check_world(accelerator)
    check_precision(precision, accelerator.device)
    stop.agree_across(accelerator)
    return Runtime(accelerator, count, stop)


class StopSignal:
    """Signals (INT, TERM, USR1, HUP) ask for a stop at the end of the step; a second one ends the process at once.

    Under a launcher TERM comes more than once for one wish: to the group, passed on by the launcher, and from the
    kernel when the launcher has died. There only a second INT or USR1 is a second wish.
    """

    def __init__(self, signals: Sequence[Signal] = SIGNALS) -> None:
        self.requested = False
        self._launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "LOCAL_RANK" in os.environ
        self.group: Any = None
        if self._launched:  # without one, the parent is a shell, and its end is no reason to stop (nohup)
            _ask_for_term_when_the_parent_dies()
        for number in (getattr(signal, f"SIG{name}") for name in signals):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored: nohup
                signal.signal(number, self._receive)

    def agree_across(self, accelerator: Accelerator) -> None:
        if accelerator.num_processes > 1:
            # On the CPU whatever the device: asking every step must not wait for a GPU.
            self.group = torch.distributed.new_group(backend="gloo", timeout=START)

    def agreed(self) -> bool:
        """Whether any process was asked to stop; every process gets the same answer, so call it on all."""
        if self.group is None:
            return self.requested
        flag = torch.tensor(int(self.requested))
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=self.group)
        if flag:
            faulthandler.cancel_dump_traceback_later()
        return bool(flag)

    def _receive(self, number: int, frame: Any) -> None:
        if self.requested and not (self._launched and number == signal.SIGTERM):
            os.write(2, b"second signal: leaving now; saved is what was saved before\n")
            os._exit(128 + number)
        self.requested = True
        if self.group is not None:  # a process that hangs is asked where, before the launcher kills it
            faulthandler.dump_traceback_later(STUCK)
        os.write(2, f"\n{signal.Signals(number).name}: finishing what is being done, saving, leaving\n".encode())


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


def default_device() -> torch.device:
    """Where accelerate would train, told without making anything."""
    is_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return torch.device("cuda" if torch.cuda.is_available() and not is_cpu else "cpu")


def check_precision(precision: Precision, device: torch.device) -> None:
    """ValueError for a precision that this device does not train in."""
    if precision == "fp16" and device.type == "cpu":
        raise ValueError("train.precision: fp16 does not train on a CPU; try bf16 or fp32")


def check_trackers(names: Sequence[str]) -> None:
    """accelerate leaves out, silently, a tracker whose package is missing."""
    missing = sorted(set(names) - {str(getattr(name, "value", name)) for name in get_available_trackers()})
    if missing:
        raise ValueError(f"train.trackers: {', '.join(missing)} not installed; try: pip install {' '.join(missing)}")


def _check_world(accelerator: Accelerator) -> None:
    possible = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if accelerator.distributed_type not in possible:
        raise ValueError(
            f"accelerate was configured for {accelerator.distributed_type.value}; this version trains with plain data "
            f"parallelism only: accelerate launch --multi_gpu ..., or change the default with `accelerate config`"
        )
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
