"""Which weights of a classifier are judged, and which are kept: the trained ones, their average, or the best so far."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mpp.averaging import Average, WeightAverage, averaged, swapped
from mpp.checkpoint import Checkpoint

BEST = "state/best.safetensors"
AVERAGE = "state/average.safetensors"
STOPPING = "state/stopping.json"


@dataclass
class Best:
    """The weights with the highest validation accuracy so far; equal ones: the earliest."""

    accuracy: float = -1.0
    step: int = 0
    without: int = 0
    """evaluations since"""
    weights: dict[str, Tensor] = field(default_factory=dict)


class KeptWeights:
    """Beside a module that is trained: its running average, where one is asked for, and its best weights, where they
    are judged. Made once the module is on its device."""

    def __init__(self, module: nn.Module, averaging: Average | None):
        self.module, self.best = module, Best()
        self.average = WeightAverage(module, averaging) if averaging else None

    def update(self, step: int) -> None:
        """After each update, 1 the first."""
        if self.average:
            self.average.update(step)

    def judge(self, accuracy: float, step: int) -> None:
        """Remembers the weights that the module holds now, if they are better than all before."""
        if accuracy > self.best.accuracy:
            weights = {name: tensor.detach().clone() for name, tensor in averaged(self.module).items()}
            self.best = Best(accuracy, step, 0, weights)
        else:
            self.best.without += 1

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Inside, the module holds what is evaluated in the course of a run: the average, where there is one."""
        with self.average.applied() if self.average else nullcontext():
            yield

    @contextmanager
    def kept(self, is_last: bool) -> Iterator[None]:
        """Inside, the module holds what is tested and exported: the best of a run at its end, else as `judged`."""
        with swapped(self.module, self.best.weights) if self.best.weights and is_last else self.judged():
            yield

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """({file: tensors}, {file: document}) of a checkpoint."""
        tensors = {AVERAGE: self.average.state()} if self.average else {}
        if self.best.weights:
            tensors[BEST] = self.best.weights
        best = self.best
        return tensors, {STOPPING: {"accuracy": best.accuracy, "step": best.step, "without": best.without}}

    def load(self, found: Checkpoint) -> None:
        """The inverse of `state`, on the module's device."""
        if self.average:
            self.average.load(found.tensors(AVERAGE))
        weights = found.tensors(BEST) if BEST in found.files else {}
        live = averaged(self.module)
        on_device = {name: tensor.to(live[name].device) for name, tensor in weights.items()}
        self.best = Best(**found.document(STOPPING), weights=on_device)
