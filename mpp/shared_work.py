"""Tasks that several processes share, on one device each: every task has a folder, and who holds that does it."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mpp.exit_codes import EXIT_STOPPED
from mpp.lock import FolderInUse, hold, let_go
from mpp.progress import duration
from mpp.runtime import StopSignal
from mpp.words import plural

PATIENCE = 120.0  # seconds: another process is writing what all of them share


@dataclass(frozen=True)
class Task:
    """A part of the work with a folder of its own; `do` returns an exit code."""

    folder: Path
    do: Callable[[], int]
    title: str = ""
    is_done: Callable[[], bool] = lambda: False
    """whether nothing is left of it: then it is not begun again"""
    size: int = 0
    """how long it takes, in any unit, for the time that is left"""


class SharedWork:
    """This process's part of the work; signals are heeded between tasks, whichever of them they came to."""

    def __init__(self) -> None:
        self.stop: StopSignal | None = None
        self.is_waiting = False
        self.pace = Pace()

    def heed(self, stop: StopSignal) -> None:
        """The signals of the job that comes next; one that came before it stays."""
        stop.requested |= self.is_stopped
        self.stop = stop

    def listen(self) -> None:
        """Signals are heeded from now on, before the first job brings its own."""
        if self.stop is None:
            self.stop = StopSignal()

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None and self.stop.requested

    def run(self, tasks: Iterable[Task], later: int = 0) -> int:
        """Does what no other process is at, then waits for the others; the exit code. later: size of what comes after
        these tasks, for the time that is left."""
        wanted = list(tasks)
        self.listen()
        left = [task for task in wanted if not task.is_done()]
        while left:
            busy = []
            for place, task in enumerate(left):
                if self.is_stopped:
                    return EXIT_STOPPED
                try:
                    hold(task.folder, patience=0)
                except FolderInUse:
                    busy.append(task)
                    continue
                try:
                    if task.is_done():  # by another process, since we looked
                        continue
                    number = f"[{wanted.index(task) + 1} of {len(wanted)}]"
                    print(f"\n{number} {task.title or task.folder.name}: {task.folder}")
                    began = time.monotonic()
                    if code := task.do():
                        return code
                    self.pace.add(task.size, time.monotonic() - began)
                finally:
                    let_go(task.folder)
                self.pace.tell(later + sum(other.size for other in (*busy, *left[place + 1 :])))
            if busy and len(busy) == len(left) and (code := self._wait(len(busy))):
                return code
            left = busy
        return 0

    def _wait(self, count: int, seconds: float = 5.0) -> int:
        """A moment, while other processes do the rest; 75 where a signal came."""
        if not self.is_waiting:
            print(f"waiting    for {plural(count, 'run')} that other processes are at")
        self.is_waiting = True
        time.sleep(seconds)
        return EXIT_STOPPED if self.is_stopped else 0


class Pace:
    """Seconds per unit of work of this process, and so the time that is left."""

    def __init__(self) -> None:
        self.size, self.seconds = 0, 0.0

    def add(self, size: int, seconds: float) -> None:
        self.size, self.seconds = self.size + size, self.seconds + (seconds if size else 0.0)

    def tell(self, left: int) -> None:
        """What is left, for this process alone."""
        if self.size and left:
            print(f"time       about {duration(left * self.seconds / self.size)} left for one process")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder for this process alone. FolderInUse after a long wait."""
    hold(folder, PATIENCE)
    try:
        yield
    finally:
        let_go(folder)
