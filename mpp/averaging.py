"""Weight averaging: a second set of weights that follows the trained one, for evaluation and export.

`WeightAverage` keeps it in float32 beside the module, moves it after every update, and puts it into the module for
the length of a `with`; the module is never copied (backbones carry hooks that a copy would share).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

Place = tuple[nn.Module, str]  # an attribute of one of a module's parts


@dataclass(frozen=True, kw_only=True)
class Average:
    """Exponential moving average of the weights (the paper's Polyak averaging, 0.9999, appendix B.1.1).

    It remembers about 1 / (1 - decay) updates: in a run of fewer steps it is mostly the weights of the beginning,
    unless `warmup` or `start` lets go of them.
    """

    kind: Literal["ema"] = "ema"
    decay: Annotated[float, Gt(0), Lt(1)] = 0.9999
    """share of the average that stays at each update"""
    warmup: bool = False
    """begin with a short memory: decay is at most (1 + n) / (10 + n) at the n-th update"""
    start: Annotated[int, Ge(0)] = 0
    """updates before averaging begins; until then the average is the weights themselves"""

    def is_too_long_for(self, steps: int) -> bool:
        """Whether more than a tenth of the average would still be the weights it began with, after all steps."""
        share = 1.0
        for step in range(self.start + 1, min(steps, 100_000) + 1):
            share *= self.factor(step)
        return share > 0.1

    def factor(self, step: int) -> float:
        """The share that stays after update `step` (1: the first)."""
        updates = step - self.start
        if updates <= 0:
            return 0.0
        return min(self.decay, (1 + updates) / (10 + updates)) if self.warmup else self.decay


class WeightAverage:
    """The average of a module's trainable parameters and of its persistent floating-point buffers, by name.

    Made once the module is on its device. Frozen parameters are their own average and not kept. Every process of a run
    holds the same one. An update that the trainer left out (non-finite gradient) counts as one that changed nothing.
    """

    def __init__(self, module: nn.Module, spec: Average):
        self.spec = spec
        self._places = _places(module)
        self._average = {name: _float32_copy(tensor) for name, tensor in self._live().items()}
        self._is_applied = False

    @torch.no_grad()
    def update(self, step: int) -> None:
        """average = factor * average + (1 - factor) * weights, after update `step` (1: the first)."""
        assert not self._is_applied, "an update while the module holds the average"
        live = [tensor.float() for tensor in self._live().values()]
        torch._foreach_lerp_(list(self._average.values()), live, 1 - self.spec.factor(step))  # pyright: ignore

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the module holds the average; after, its own weights again, bit for bit, whatever happens inside.

        What is written to the weights inside is lost.
        """
        assert not self._is_applied, "the module holds the average already"
        self._is_applied = True
        try:
            with _swapped(self._places, self._average):
                yield
        finally:
            self._is_applied = False

    def state(self) -> dict[str, Tensor]:
        """Name -> average, float32: the live tensors, to be stored before the next update."""
        return dict(self._average)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state`. ValueError names everything missing, unexpected or of another shape or type; the
        average is then as it was before.
        """
        own = self._average
        if own.keys() != tensors.keys():
            missing, more = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
            raise ValueError(f"not the average of these weights: missing in it {missing}; unexpected in it {more}")
        wrong = [name for name, tensor in tensors.items() if _form(tensor) != _form(own[name])]
        if wrong:
            told = "; ".join(f"{name}: expected {_form(own[name])}, got {_form(tensors[name])}" for name in wrong)
            raise ValueError(f"not the average of these weights: {told}")
        _write(own, tensors)

    def _live(self) -> dict[str, Tensor]:
        return _found(self._places)


def averaged(module: nn.Module) -> dict[str, Tensor]:
    """What training changes, by name, the live tensors: trainable parameters, persistent floating-point buffers."""
    return _found(_places(module))


def swapped(module: nn.Module, tensors: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Inside, the module holds `tensors` (some of `averaged`); after, its own again, bit for bit."""
    return _swapped({name: place for name, place in _places(module).items() if name in tensors}, tensors)


def averaged_names(module: nn.Module) -> list[str]:
    """Trainable parameters (tied ones once), then floating-point buffers that a state dict holds."""
    stored = module.state_dict().keys()
    parameters = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    buffers = [name for name, b in module.named_buffers() if name in stored and b.is_floating_point()]
    return parameters + buffers


@contextmanager
def _swapped(places: dict[str, Place], tensors: dict[str, Tensor]) -> Iterator[None]:
    kept = {name: tensor.detach().clone() for name, tensor in _found(places).items()}
    try:
        _write(_found(places), tensors)
        yield
    finally:
        _write(_found(places), kept)


def _found(places: dict[str, Place]) -> dict[str, Tensor]:
    return {name: getattr(owner, attribute) for name, (owner, attribute) in places.items()}


def _places(module: nn.Module) -> dict[str, Place]:
    # By place and not by tensor: moving a module to a device replaces its buffers.
    return {name: _place(module, name) for name in averaged_names(module)}


def _place(module: nn.Module, name: str) -> Place:
    owner, _, attribute = name.rpartition(".")
    return module.get_submodule(owner), attribute


def _float32_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32, copy=True)


@torch.no_grad()
def _write(to: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        to[name].copy_(tensor)


def _form(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype
