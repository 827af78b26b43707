"""What a checkpoint folder must hold to be believed: its manifest, with the size and sha256 of every file.

Nothing in here trusts a folder: names that lead outside, links, pipes, huge or cut files end in a
`CheckpointError`.
"""

import hashlib
import json
import os
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from mpp.durable import sync_folder, write_file

FORMAT = 1
NEEDS = "mpp >= 0.1"  # the oldest version that reads FORMAT, for those who meet a newer checkpoint
NAME = "manifest.json"
LIMIT = 16 * 2**20  # bytes; a real one has a few thousand


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or written, as asked; the text begins with its folder."""


class UnknownFormat(CheckpointError):
    """An undamaged checkpoint of another version of mpp; never passed over for an older one."""


def write(folder: Path, step: int, names: list[str], facts: dict[str, Any]) -> None:
    """Seal a folder once all its files, and their names, are on the disk."""
    inner = {folder / parent for name in names for parent in PurePosixPath(name).parents}
    for path in sorted(inner | {folder}):
        sync_folder(path)
    files = {name: stamp(folder / name) for name in names}
    manifest = {"format": FORMAT, "needs": NEEDS, "step": step, "files": files, "facts": facts}
    write_file(folder / NAME, [sealed(manifest, f"{folder}: {NAME}")])
    sync_folder(folder)
    read(folder)  # whatever the facts may be: what cannot be read back must not count as saved


def stamp(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def sealed(manifest: dict[str, Any], where: str) -> bytes:
    """The bytes of a manifest, its own sha256 at the end.

    Every future format keeps this, `format` and `needs`: a version must tell a newer checkpoint from a
    damaged one.
    """
    digest = hashlib.sha256(to_json(manifest, where)).hexdigest()
    return to_json({**manifest, "sha256": digest}, where)


def read(folder: Path) -> dict[str, Any]:
    """{"format", "needs", "step", "files": {name: {"size", "sha256"}}, "facts"}, undamaged."""
    where = f"{folder}: {NAME}"
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: {'is no folder' if folder.exists() else 'does not exist'}")
    if plain_size(folder, NAME) > LIMIT:
        raise CheckpointError(f"{where}: is larger than any manifest ({LIMIT:,} bytes)")
    text = read_bytes(folder, NAME)
    manifest = from_json(text, where)
    body = dict(manifest) if isinstance(manifest, dict) else {}
    body.pop("sha256", None)
    if sealed(body, where) != text:
        raise CheckpointError(f"{where}: is damaged: it does not agree with its own sha256")
    if body.get("format") != FORMAT:
        raise UnknownFormat(
            f"{folder}: has checkpoint format {body.get('format')!r}, this version reads {FORMAT}; "
            f"needed: {body.get('needs', 'the version that wrote it')}"
        )
    check_manifest(body, where)
    return body


def check_manifest(manifest: dict[str, Any], where: str) -> None:
    """The right types everywhere, and file names that stay inside the folder."""
    step, files, facts = manifest.get("step"), manifest.get("files"), manifest.get("facts")
    if type(step) is not int or not isinstance(files, dict) or not isinstance(facts, dict):
        raise CheckpointError(f"{where}: lacks a step, files or facts")
    for name, entry in files.items():
        if not is_inside(name):
            raise CheckpointError(f"{where}: lists {name!r}, which does not lie in the folder")
        if not isinstance(entry, dict) or type(entry.get("size")) is not int or "sha256" not in entry:
            raise CheckpointError(f"{where}: lists {name!r} without its size and sha256")


def is_inside(name: str) -> bool:
    """Whether a file name is plain and relative: nothing outside may be read or written through it."""
    path = PurePosixPath(name)
    plain = path.as_posix() == name and not path.is_absolute() and not {"\\", "\0"} & set(name)
    return plain and bool(path.parts) and ".." not in path.parts and name != NAME


def check_file(folder: Path, name: str, stamp: dict[str, Any], sizes_only: bool = False) -> None:
    """CheckpointError unless the file is there, no link or pipe, and holds what the manifest says."""
    size = plain_size(folder, name)
    if size != stamp["size"]:
        raise CheckpointError(f"{folder}: {name}: has {size:,} bytes, but {stamp['size']:,} were written")
    if not sizes_only and attempt(sha256, folder, name) != stamp["sha256"]:
        raise CheckpointError(f"{folder}: {name}: is damaged: its sha256 is not the one that was written")


def plain_size(folder: Path, name: str) -> int:
    """Bytes of a regular file that no link leads to; a pipe is never opened: that could wait for ever."""
    for parent in PurePosixPath(name).parents[:-1]:
        if (folder / parent).is_symlink():
            raise CheckpointError(f"{folder}: {parent}: is a link")
    status = attempt(os.lstat, folder, name)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{folder}: {name}: is not a plain file")
    return status.st_size


def read_bytes(folder: Path, name: str) -> bytes:
    return attempt(Path.read_bytes, folder, name)


def attempt(how: Any, folder: Path, name: str) -> Any:
    """`how(path)`, with what the system says about a file as the reason."""
    try:
        return how(folder / name)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: {name}: is missing") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: {name}: cannot be read: {error.strerror}") from error


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_json(value: Any, where: str) -> bytes:
    """JSON that reads back as the same value (tuples as lists); CheckpointError for what would not."""
    try:
        check_keys(value)
        return json.dumps(value, indent=1).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: cannot be stored as JSON: {error}") from None


def check_keys(value: Any) -> None:
    """JSON would turn other keys into text, where a restarted run would not find them."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not text")
            check_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            check_keys(inner)


def from_json(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: is no JSON: {error}") from None
