"""What the processes that read pictures need of the machine, and where they were when one of them was lost."""

import errno
import os
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import get_worker_info

from mpp.words import plural

PREFETCH = 4  # batches that each worker has ready
FILES = 16  # open files per batch that is ready: its tensors, and what they travel through
SHARED = Path("/dev/shm")
# What a network disk says in a bad moment, and may not say again.
PASSING = {errno.EIO, errno.EREMOTEIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE, errno.ENETDOWN, errno.ENETUNREACH}
PASSING |= {errno.EHOSTUNREACH, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ENOTCONN}
WAITS = (0.1, 0.5, 2.0)  # seconds before the second, third and fourth attempt
HOPELESS = 3  # pictures in a row that no attempt could read: from then on there is one attempt for each


class Whereabouts:
    """The picture that each worker is at, in memory that all share."""

    def __init__(self, workers: int):
        self.table = torch.full((max(workers, 1), 2), -1, dtype=torch.int64).share_memory_()

    def note(self, id: int) -> None:
        """Called by a worker, for each picture; -1: for none."""
        if (worker := get_worker_info()) is not None:
            self.table[worker.id, 0], self.table[worker.id, 1] = os.getpid(), id

    def of(self, text: str) -> list[int]:
        """Ids of pictures: of the worker whose process number is told in a text, else of all that are at one."""
        rows = [(pid, id) for pid, id in self.table.tolist() if id >= 0]
        return [id for pid, id in rows if str(pid) in text] or [id for _, id in rows]


class Attempts:
    """Reads a picture again where the storage had a bad moment."""

    def __init__(self, waits: Sequence[float] = WAITS):
        self.waits, self.lost = waits, 0

    def again(self, found: Any, read: Callable[[], Any]) -> Any:
        """found: what the first attempt gave. `read()` is called with longer and longer waits, while what it gives is
        such an error; the last one counts."""
        if not is_passing(found):
            self.lost = 0
            return found
        for wait in self.waits if self.lost < HOPELESS else ():
            time.sleep(wait)
            found = read()
            if not is_passing(found):
                self.lost = 0
                return found
        self.lost += 1
        return found


def is_passing(found: Any) -> bool:
    """Whether this is an error that another attempt may not meet."""
    return isinstance(found, OSError) and found.errno in PASSING


def check_machine(workers: int, batch_bytes: int) -> list[str]:
    """Notes on what was changed for the workers. ValueError where their batches do not fit into /dev/shm.

    batch_bytes: of one micro-batch.
    """
    if not workers:
        return []
    needed = workers * PREFETCH * batch_bytes
    if SHARED.is_dir() and (free := shutil.disk_usage(SHARED).free) < needed:
        raise ValueError(
            f"train.workers: {plural(workers, 'worker')} with {PREFETCH} batches each need {needed / 1e6:,.0f} MB in "
            f"{SHARED}, and {free / 1e6:,.0f} MB are free; try --train.workers {workers * free // needed}, a smaller "
            f"train.micro_batch_size, or more of it (docker run --shm-size 8g)"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 256 + workers * PREFETCH * FILES
    if soft >= wanted:
        return []
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return [f"raised the limit of open files from {soft} to {wanted} for the workers"]
    torch.multiprocessing.set_sharing_strategy("file_system")
    return [f"at most {hard} files may be open (ulimit -n): batches travel through files in {SHARED} instead"]
