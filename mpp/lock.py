"""One writer per folder: a lock that the kernel lets go of when its process ends, however it ends."""

import fcntl
import os
import platform
import re
import time
from pathlib import Path
from typing import TextIO

JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")  # of the batch systems that set one
OWNER = re.compile(r"process (\d+) on (\S+)")
_HELD: dict[Path, TextIO] = {}  # open lock files


class FolderInUse(ValueError):
    """Another process writes in this folder."""


def hold(path: Path, patience: float = 20.0, take_over: bool = False) -> str:
    """Nobody else writes in the folder until `let_go`, or the end of this process. FolderInUse otherwise.

    Waits a little, for a run that was stopped a moment ago may still be saving. Returns who held it before and ended
    without letting go, in words, or "". On a file system without locks the lock file's text decides: a dead process
    of this machine is passed over, one of another machine with take_over alone. patience: seconds.
    """
    place = path.resolve()
    if place in _HELD:
        return ""
    try:
        place.mkdir(parents=True, exist_ok=True)
        file = (place / ".lock").open("a+")
    except OSError as error:
        raise ValueError(f"out: {path} cannot be written: {error}; name another with --out") from None
    until = time.monotonic() + patience
    while (locked := _lock(file)) is False:
        if time.monotonic() > until:
            with file:
                raise FolderInUse(
                    f"out: {path} is in use by another run ({_owner(file)}); wait for it to end, or name another "
                    f"folder with --out"
                )
        time.sleep(0.2)
    before = _owner(file)
    if locked is None and not take_over and _may_live(before):
        with file:
            raise FolderInUse(
                f"out: {path} was in use by {before}, and this file system has no locks that would say whether it "
                f"still is. If that run has ended: --train.take_over true"
            )
    file.truncate(0)
    jobs = "".join(f", job {os.environ[name]}" for name in JOB_IDS if os.environ.get(name))
    file.write(f"process {os.getpid()} on {platform.node()}{jobs}\n")
    file.flush()
    _HELD[place] = file
    return before


def let_go(path: Path) -> None:
    """Others may write in the folder now."""
    if file := _HELD.pop(path.resolve(), None):
        with file:
            file.truncate(0)


def is_held(path: Path) -> bool:
    """Whether this process holds a folder."""
    return path.resolve() in _HELD


def _lock(file: TextIO) -> bool | None:
    """True: it is ours; False: another's; None: this file system knows no locks."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _owner(file: TextIO) -> str:
    file.seek(0)
    return file.read().strip()


def _may_live(owner: str) -> bool:
    """Whether a process that wrote this may still be there: it is, or it is another machine's."""
    match = OWNER.match(owner)
    if match is None or int(match[1]) == os.getpid():
        return False
    if match[2] != platform.node():
        return True
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
