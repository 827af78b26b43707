"""Whether a disk has room for the checkpoints that a run will write: asked before its first step."""

import errno
import os
import shutil
from pathlib import Path

from mpp.durable import make_folder

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def check_room(folder: Path, largest: int, needed: int) -> None:
    """ValueError where `needed` bytes more, in files of at most `largest`, do not fit on the folder's disk.

    Besides what the file system says is free, a file of the largest size is reserved and removed again: quotas and
    limits on files are not seen otherwise.
    """
    make_folder(folder)
    free = shutil.disk_usage(folder).free
    advice = f"free some, write elsewhere with --out, or keep fewer with --train.keep_last (1 needs {_mb(2 * largest)})"
    if free < needed:
        raise ValueError(
            f"out: {folder} has {_mb(free)} free, and the run's checkpoints need about {_mb(needed)} more; {advice}"
        )
    probe = folder / ".probe"
    try:
        with probe.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(largest, 1))
    except OSError as error:
        if error.errno not in FULL:
            raise ValueError(f"out: {folder} cannot be written: {error.strerror}; name another with --out") from None
        raise ValueError(
            f"out: a file of {_mb(largest)}, as the run's checkpoints need, cannot be written in {folder}: "
            f"{error.strerror} (a quota, or ulimit -f?); {advice}"
        ) from None
    finally:
        probe.unlink(missing_ok=True)


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; 0 where there is none."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
