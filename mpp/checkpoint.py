"""The checkpoints of a run: whole or not there at all, checked before they are read, newest by step.

`run/checkpoints/00000200/` holds tensors (safetensors) and documents (JSON), no pickle, and `manifest.json`:
the size and sha256 of every file. It is written in a `.tmp-...` folder beside it, the manifest last,
everything flushed to the disk, and then renamed. Where that step exists already, the old folder first steps
aside as `.old-00000200-...` and is deleted last: at every moment one of the two is whole under a name that
`newest` looks at, and `tidy` puts it back.

    python -m mpp.checkpoint verify RUN_OR_CHECKPOINT
    python -m mpp.checkpoint compare A B
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mpp import manifest
from mpp.compare import differences, value_difference
from mpp.durable import TEMPORARY, discard, make_folder, sync_file, sync_folder, temporary, write_file
from mpp.durable import cut_back as cut_back
from mpp.manifest import CheckpointError, UnknownFormat, check_file, from_json, to_json
from mpp.optimizer_state import load_optimizer_state as load_optimizer_state
from mpp.optimizer_state import optimizer_state as optimizer_state
from mpp.optimizer_state import parameter_names as parameter_names

if TYPE_CHECKING:  # torch is imported where tensors are touched: checking a run needs none of it
    from torch import Tensor

NUMBERED = re.compile(r"([0-9]+)|\.old-([0-9]+)-[0-9a-f]{32}")


def save(
    run: Path,
    step: int,
    tensors: dict[str, dict[str, Tensor]],
    documents: dict[str, Any],
    facts: dict[str, Any],
) -> Path:
    """Write `run/checkpoints/<step>`; return its path once it is whole and on the disk. Other steps stay.

    `tensors`: {"model.safetensors": {name: tensor}, ...}, of any device, strides and size; tensors that share
    memory are stored one by one. `documents`: {"state/trainer.json": value, ...}. `facts` (versions, world
    size, ...) go into the manifest. CheckpointError: something that cannot be stored exactly. OSError: the
    disk refused. After an error, as after a kill at any point, what was valid before is valid still. For the
    run's one writer.
    """
    final = Path(run) / "checkpoints" / folder_name(step)
    names = checked_names([*tensors, *documents], final)
    texts = {name: to_json(value, f"{final}: {name}") for name, value in documents.items()}
    to_json(facts, f"{final}: facts")  # faults come before work
    fresh = temporary(final)
    try:
        for name, values in tensors.items():
            write_tensors(fresh / name, values, f"{final}: {name}")
        for name, text in texts.items():
            make_folder((fresh / name).parent)
            write_file(fresh / name, [text])
        make_folder(fresh)
        manifest.write(fresh, step, names, facts)
        put_in_place(fresh, final)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return final


def newest(run: Path) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The valid checkpoint of the highest step, every byte checked, and those passed over with the reason.

    (None, []) where the run has no checkpoint. CheckpointError where it has some and none is valid: never a
    silent start from scratch; UnknownFormat where the next best one needs another version of mpp. Changes
    nothing on the disk, so that others may ask while the run goes on.
    """
    skipped: list[tuple[Path, str]] = []
    for path in places(run):
        try:
            return opened(path), skipped
        except UnknownFormat:
            raise
        except CheckpointError as error:
            skipped.append((path, str(error).removeprefix(f"{path}: ")))
    if skipped:
        reasons = "".join(f"\n  {path.name}: {reason}" for path, reason in skipped)
        home = Path(run) / "checkpoints"
        raise CheckpointError(f"{home}: none is valid; to begin anew, move that folder away{reasons}")
    return None, skipped


class Checkpoint:
    """One checkpoint folder; each file is checked (size, sha256) before it is read, and only listed ones are.

    `step`; `facts` as given to `save`; `files`: {name: {"size", "sha256"}}. CheckpointError, beginning with
    the folder, for whatever is missing, damaged or not listed.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        content = manifest.read(self.path)
        self.step: int = content["step"]
        self.facts: dict[str, Any] = content["facts"]
        self.files: dict[str, dict[str, Any]] = content["files"]
        self._checked: set[str] = set()
        if step_of(self.path) not in (-1, self.step):
            raise CheckpointError(f"{self.path}: {manifest.NAME}: is that of step {self.step}")

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one file by name, on the CPU, in memory of their own."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            mapped = load_file(self.checked(name))
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}: {name}: is no safetensors file: {error}") from None
        # Mapped pages would kill the process (SIGBUS) if somebody cut the file later on.
        return {key: value.clone() for key, value in mapped.items()}

    def document(self, name: str) -> Any:
        """The value of one JSON file; tuples come back as lists."""
        self.checked(name)
        return from_json(manifest.read_bytes(self.path, name), f"{self.path}: {name}")

    def checked(self, name: str) -> Path:
        """The path of one listed file, its bytes found to be those that were written."""
        if name not in self.files:
            raise CheckpointError(f"{self.path}: {name}: is no part of it; it holds {', '.join(self.files)}")
        if name not in self._checked:
            check_file(self.path, name, self.files[name])
            self._checked.add(name)
        return self.path / name

    def verify(self) -> None:
        """Check every listed file to the last byte."""
        for name in self.files:
            self.checked(name)


def verify(path: Path) -> None:
    """Check one checkpoint folder to the last byte; CheckpointError names the file and the reason."""
    Checkpoint(path).verify()


def prune(run: Path, keep_last: int, keep_every: int = 0) -> list[Path]:
    """Delete all but the `keep_last` (>= 1) newest valid checkpoints, and leftovers; return what was deleted.

    Those whose step is a multiple of `keep_every` stay beside them (0: none does).
    The newest valid one is found by a full check, the others go by their sizes. Invalid ones count for
    nothing and stay, for a person to look at. For the run's one writer, after a save.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}, but at least the newest checkpoint must stay: 1 or more")
    gone = tidy(run)
    left = iter(places(run))
    kept = 1 if any(is_valid(path) for path in left) else 0  # `any` stops right behind the newest valid one
    for path in left:
        if is_valid(path, sizes_only=True):
            if kept < keep_last:
                kept += 1
            elif not keep_every or step_of(path) % keep_every:
                discard(path)
                gone.append(path)
    return gone


def tidy(run: Path) -> list[Path]:
    """Clear up behind a killed writer; return what was deleted. For the run's one writer, first of all.

    Unfinished folders go. An old folder that stood aside while its step was written again goes too if the
    step is whole; otherwise it returns to its place (so call `newest` afterwards: the path changes).
    """
    home = Path(run) / "checkpoints"
    gone = sorted(home.glob(f"{TEMPORARY}*"))
    for path in gone:
        discard(path)
    aside = [path for path in places(run) if path.name.startswith(".old-")]
    for path in sorted(aside, key=is_valid, reverse=True):
        final = home / folder_name(step_of(path))
        if is_valid(final) or (os.path.lexists(final) and not is_valid(path)):
            discard(path)
            gone.append(path)
        else:
            put_in_place(path, final)
    return gone


def places(run: Path) -> list[Path]:
    """What stands where a checkpoint should, valid or not, highest step first; other names are ignored."""
    home = Path(run) / "checkpoints"
    try:
        found = [home / name for name in os.listdir(home) if NUMBERED.fullmatch(name)]
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise CheckpointError(f"{home}: is not a folder") from None
    return sorted(found, key=rank, reverse=True)


def rank(path: Path) -> tuple[int, bool, str]:
    """By step; of one step, the folder in its proper place is worth more than one that stands aside."""
    step = step_of(path)
    return step, path.name == folder_name(step), path.name


def step_of(path: Path) -> int:
    match = NUMBERED.fullmatch(path.name)
    return int(match[1] or match[2]) if match else -1


def folder_name(step: int) -> str:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"a step is a whole number from 0 on, not {step!r}")
    return f"{step:08d}"


def opened(path: Path, sizes_only: bool = False) -> Checkpoint:
    """The checkpoint in one of `places`, checked."""
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path}: is {'a link' if path.is_symlink() else 'a file'}, not a folder")
    checkpoint = Checkpoint(path)
    for name, stamp in checkpoint.files.items():  # cheap, so ahead of the hashes of gigabytes
        check_file(path, name, stamp, sizes_only=True)
    if not sizes_only:
        checkpoint.verify()
    return checkpoint


def is_valid(path: Path, sizes_only: bool = False) -> bool:
    try:
        opened(path, sizes_only)
    except CheckpointError:
        return False
    return True


def put_in_place(fresh: Path, final: Path) -> None:
    """Rename a whole folder to its step's name; an old one steps aside first and is deleted last."""
    if os.path.lexists(final):
        os.rename(final, final.with_name(f".old-{final.name}-{uuid4().hex}"))
    os.rename(fresh, final)
    sync_folder(final.parent)
    for path in final.parent.glob(f".old-{final.name}-*"):
        discard(path)


def checked_names(names: list[str], final: Path) -> list[str]:
    for name in names:
        if not manifest.is_inside(name) or names.count(name) > 1:
            raise CheckpointError(f"{final}: {name!r} cannot name a file: it must be relative and used once")
    return names


def write_tensors(path: Path, values: dict[str, Tensor], where: str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    make_folder(path.parent)
    try:
        save_file(storable(values, where), path, metadata={"format": "pt"})
    except SafetensorError as error:  # hides the errno, which the caller needs (disk full?), in its text
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error
    sync_file(path)


def storable(values: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Plain contiguous tensors on the CPU, each with memory of its own, as safetensors wants them."""
    import torch

    plain: dict[str, Tensor] = {}
    owners: set[int] = set()
    unstorable = (torch.complex128, torch.qint8, torch.quint8, torch.qint32)
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or type(value.detach()) is not torch.Tensor:
            raise CheckpointError(f"{where}: {name} is a {type(value).__name__}, no plain (gathered) tensor")
        if value.is_meta or value.layout != torch.strided or value.dtype in unstorable:
            raise CheckpointError(f"{where}: {name} cannot be stored: {value.dtype}, {value.layout}")
        tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        owner = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if owner in owners else tensor
        owners.add(owner)
    return plain


def main(argv: list[str] | None = None) -> int:
    """Look after checkpoints from a shell. Exit codes: 0 valid or equal, 1 invalid or different, 2 usage."""
    parser = argparse.ArgumentParser(prog="python -m mpp.checkpoint")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("verify", help="check every byte of a checkpoint, or of all those of a run")
    command.add_argument("paths", metavar="RUN_OR_CHECKPOINT", nargs=1, type=Path)
    command.set_defaults(command=show_verify)
    command = commands.add_parser("compare", help="the first difference between two (of a run: the newest)")
    command.add_argument("paths", metavar="RUN_OR_CHECKPOINT", nargs=2, type=Path)
    command.set_defaults(command=show_comparison)
    arguments = parser.parse_args(argv)
    paths = [path.parent if path.name == "checkpoints" else path for path in arguments.paths]
    if missing := [path for path in paths if not os.path.lexists(path)]:
        print(f"{missing[0]}: does not exist", file=sys.stderr)
        return 2
    try:
        return arguments.command(*paths)
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def is_run(path: Path) -> bool:
    return (path / "checkpoints").exists()


def show_verify(path: Path) -> int:
    found = places(path)[::-1] if is_run(path) else [path]
    if not is_run(path) and not (path / manifest.NAME).exists() and step_of(path) == -1:
        what = "a run that has not saved yet" if (path / "recipe.yaml").exists() else "neither a run nor a checkpoint"
        print(f"{path}: is {what}")
        return 1
    faults = 0
    for place in found:
        try:
            checkpoint = opened(place) if is_run(path) else Checkpoint(place)
            checkpoint.verify()
        except CheckpointError as error:
            faults += 1
            print(f"INVALID  {error}")
        else:
            size = sum(stamp["size"] for stamp in checkpoint.files.values())
            print(f"valid    {place}: {len(checkpoint.files)} files, {size / 1e6:,.1f} MB")
    if not found:
        print(f"{path}: has no checkpoint")
    return 1 if faults or not found else 0


def show_comparison(first: Path, second: Path) -> int:
    a, b = chosen(first), chosen(second)
    lines = list(differences(a, b))
    for line in lines:
        print(line)
    if note := value_difference(a.facts, b.facts):
        print(f"(not counted: facts differ: {note})")
    print(f"{'different' if lines else 'equal'}: {a.path} and {b.path}")
    return 1 if lines else 0


def chosen(path: Path) -> Checkpoint:
    """The checkpoint itself, or a run's newest valid one."""
    if not is_run(path):
        checkpoint = Checkpoint(path)
        checkpoint.verify()
        return checkpoint
    checkpoint, skipped = newest(path)
    for place, reason in skipped:
        print(f"passed over {place}: {reason}")
    if checkpoint is None:
        raise CheckpointError(f"{path}: has no checkpoint")
    return checkpoint


if __name__ == "__main__":
    sys.exit(main())
