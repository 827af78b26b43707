"""Weights that stay what they were: a copy that outlives its run, and a hash to know them by."""

import hashlib
import os
import shutil
from pathlib import Path

import torch

from mpp.checkpoint import Checkpoint, folder_name, is_valid, places
from mpp.durable import make_folder, replace_file, temporary
from mpp.weight_files import read


def keep_weights(checkpoint: Checkpoint, recipe: Path, folder: Path) -> None:
    """A run of its own with one checkpoint and its recipe; whole or not there. Files are linked where the disk can.

    One that was damaged since is made again. ValueError where the folder holds another checkpoint.
    """
    place = folder / "checkpoints" / folder_name(checkpoint.step)
    if others := [other for other in places(folder) if other != place]:
        raise ValueError(f"{folder} holds another checkpoint, {others[0].name}; name another folder with --out")
    if place.exists() and (place.samefile(checkpoint.path) or is_valid(place)):
        return
    shutil.rmtree(place, ignore_errors=True)
    make_folder(place.parent)
    replace_file(folder / "recipe.yaml", [recipe.read_bytes()])
    fresh = temporary(place)
    try:
        shutil.copytree(checkpoint.path, fresh, copy_function=linked)
        os.rename(fresh, place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def linked(source: str, target: str) -> None:
    """No file of a checkpoint is ever written again, so two folders can share it."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def fingerprint(spec: str) -> str:
    """A hash of all stored weights, by name; whatever image size they will be opened at."""
    found = hashlib.sha256()
    for name, tensor in sorted(read(spec).tensors.items()):
        found.update(name.encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
