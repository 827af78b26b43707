"""Processes of one job that disagree are refused: another recipe, code, library or data on one of them."""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mpp.config import differences
from mpp.data.dataset import Dataset
from mpp.recipe.types import plain
from mpp.runtime import Runtime

LIBRARIES = ("torch", "torchvision", "accelerate", "timm", "datasets", "pillow", "numpy", "safetensors")


def check_same_start(runtime: Runtime, recipe: Any) -> None:
    """As `check_same`, of what is known before any data are opened: recipe, code, versions."""
    if runtime.world > 1:
        check_same(runtime, {"recipe": plain(recipe), "code": source_digest(), "versions": versions()})


def check_same_data(runtime: Runtime, parts: Sequence[Dataset]) -> None:
    """As `check_same`, of data that each process has opened for itself."""
    if runtime.world > 1:
        found = [{"images": len(part), "fingerprint": part.fingerprint()} for part in parts]
        check_same(runtime, {"data": found})


def check_same(runtime: Runtime, facts: Mapping[str, Any]) -> None:
    """ValueError, on all processes, unless each has the facts of process 0; names what differs. Call it on all."""
    found = runtime.gather_objects([dict(facts)])
    for process, other in enumerate(found):
        if faults := differences(found[0], other):
            listed = "\n  ".join(faults)
            raise ValueError(
                f"process {process} of {len(found)} was started otherwise than process 0:\n  {listed}\n"
                f"Start the same command on every machine, with the same code, libraries and data"
            )


def versions() -> dict[str, str]:
    """Of Python and of the libraries that numbers depend on."""
    return {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}


@cache
def source_digest() -> str:
    """A short hash of this package's source."""
    root = Path(__file__).parent
    total = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        total.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()[:16]
