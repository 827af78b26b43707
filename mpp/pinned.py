"""Weights that stay what they were: a copy that outlives its run, and a hash to know them by."""

import hashlib
import os
import shutil
from pathlib import Path

from mpp.backbones import Backbone
from mpp.checkpoint import Checkpoint, folder_name
from mpp.durable import make_folder, replace_file, temporary


def keep_weights(checkpoint: Checkpoint, recipe: Path, folder: Path) -> None:
    """A run of its own with one checkpoint and its recipe; whole or not there. Files are linked where the disk can."""
    place = folder / "checkpoints" / folder_name(checkpoint.step)
    if place.exists():
        return
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


def fingerprint(backbone: Backbone) -> str:
    """A hash of all weights, by name."""
    found = hashlib.sha256()
    for name, tensor in backbone.model.state_dict().items():
        found.update(name.encode())
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()
