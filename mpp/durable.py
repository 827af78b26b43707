"""Files that survive a crash: whole and flushed to the disk, or not there at all."""

import errno
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

TEMPORARY = ".tmp-"  # so begin the names of what is unfinished or given up: a run's writer may delete it


def temporary(beside: Path) -> Path:
    """A fresh name in the same folder, hence on the same file system: only there is a rename atomic."""
    return beside.with_name(TEMPORARY + uuid4().hex)


def make_folder(path: Path) -> None:
    """Make `path` and its missing parents so that they are still there after a power cut."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def check_can_write(folder: Path, option: str) -> None:
    """ValueError where no file can be made in a folder, which need not be there yet; looks only. option: its name."""
    above = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not above.is_dir():
        raise ValueError(f"{option}: {folder} cannot be a folder: {above} is a file; name another with --{option}")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(
            f"{option}: {folder} cannot be written: no permission in {above}; name another with --{option}"
        )


def write_file(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file and wait until it is on the disk; OSError where the disk refuses."""
    with open(path, "wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Wait until a file that somebody else wrote is on the disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder (new, renamed, deleted) are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot flush a folder and say so; they keep names in their own way.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def discard(path: Path) -> None:
    """Delete a file, a link (not its target) or a folder; after a kill half-way no half keeps the name."""
    if not os.path.lexists(path):
        return
    trash = path
    if not path.name.startswith(TEMPORARY):
        os.rename(path, trash := temporary(path))
        sync_folder(path.parent)
    if trash.is_dir() and not trash.is_symlink():
        shutil.rmtree(trash, ignore_errors=True)  # what resists (NFS: still open somewhere) goes next time
    else:
        trash.unlink(missing_ok=True)


def cut_back(path: Path, step: int) -> int:
    """Make a JSON-lines log end where a checkpoint of `step` was written; return the number of lines dropped.

    Dropped are lines with a `"step"` beyond `step`, and lines that are no JSON object: what a kill in the
    middle of writing leaves. Lines without a step stay. The others keep every byte. The file is replaced in
    one go, so a kill meanwhile leaves the old or the new one; a log that needs no cut, or is not there, is
    left alone.
    """
    path = path.resolve()  # a linked log stays linked
    if not path.exists():
        return 0
    with open(path, "rb") as log:
        lines = list(log)
    kept = [line for line in lines if belongs(line, step)]
    unended = bool(kept) and not kept[-1].endswith(b"\n")  # whole, but the next line would be glued to it
    if len(kept) < len(lines) or unended:
        replace_file(path, kept + [b"\n"] * unended)
    return len(lines) - len(kept)


def belongs(line: bytes, step: int) -> bool:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not isinstance(entry, dict):
        return False
    at = entry.get("step")
    return not (isinstance(at, int | float) and at > step)


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file, new or over an old one: what stands there is all of the old or all of the new."""
    # A fixed name: what a kill leaves behind, the next attempt overwrites (a run has one writer).
    fresh = path.with_name(f".{path.name}.new")
    write_file(fresh, parts)
    if path.exists():
        shutil.copymode(path, fresh)
    os.replace(fresh, path)
    sync_folder(path.parent)
