"""What differs between two checkpoints, to the last bit: the twin of a killed run must show nothing here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from mpp.checkpoint import Checkpoint


def differences(first: Checkpoint, second: Checkpoint) -> Iterator[str]:
    """One line for the step and for each file that differs, naming the first differing tensor or value in it.

    Facts (versions, host, threads) are no part of the result and not compared. CheckpointError: a damaged
    file.
    """
    if first.step != second.step:
        yield f"step: {first.step} against {second.step}"
    for name in sorted(first.files.keys() | second.files.keys()):
        if name not in first.files or name not in second.files:
            yield f"{name}: only in the {'first' if name in first.files else 'second'}"
        elif first.files[name] == second.files[name]:
            continue
        elif name.endswith(".safetensors"):
            yield from tensor_differences(name, first.tensors(name), second.tensors(name))
        elif found := value_difference(first.document(name), second.document(name)):
            yield f"{name}: {found}"


def tensor_differences(file: str, first: dict[str, Tensor], second: dict[str, Tensor]) -> Iterator[str]:
    """One line on the first tensor (by name) that is missing or differs, and how many do, or none."""
    lines = []
    for name in sorted(first.keys() | second.keys()):
        if name not in first or name not in second:
            lines.append(f"{name} is only in the {'first' if name in first else 'second'}")
        elif found := tensor_difference(first[name], second[name]):
            lines.append(f"{name} {found}")
    if lines:
        yield f"{file}: {lines[0]}" + (f" ({len(lines)} tensors differ)" if len(lines) > 1 else "")


def tensor_difference(first: Tensor, second: Tensor) -> str:
    """Empty if all bits are equal: NaNs too, while 0 and -0 differ."""
    import torch

    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return f"is {tuple(first.shape)} {first.dtype} against {tuple(second.shape)} {second.dtype}"
    bits = [tensor.reshape(-1, 1).view(torch.uint8) for tensor in (first, second)]
    places = (bits[0] != bits[1]).any(dim=1).nonzero().flatten()
    if not len(places):
        return ""
    wide = torch.complex128 if first.is_complex() else torch.float64
    a, b = (tensor.reshape(-1)[places].to(wide) for tensor in (first, second))
    return (
        f"differs in {len(places):,} of {first.numel():,} values, by up to {(a - b).abs().max().item():.3g}; "
        f"the first, number {places[0].item()}: {a[0].item():.9g} against {b[0].item():.9g}"
    )


def value_difference(first: Any, second: Any, path: str = "") -> str:
    """The first leaf of two JSON values that differs, as "a.b.0: 1 against 2"; empty if none does."""
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        first, second = dict(enumerate(first)), dict(enumerate(second))
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return "" if repr(first) == repr(second) else f"{path or 'value'}: {first!r} against {second!r}"
    for key in [*first, *(key for key in second if key not in first)]:
        below = f"{path}.{key}" if path else str(key)
        if key not in first or key not in second:
            return f"{below}: only in the {'first' if key in first else 'second'}"
        if found := value_difference(first[key], second[key], below):
            return found
    return ""
