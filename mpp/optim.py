"""Optimiser, learning rate as a function of the step, and which parameters decay."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

Schedule = Literal["cosine", "linear", "constant"]

# Tokens and positions are no linear maps: no weight decay on them, nor on biases and norms (METHOD.md 1).
UNDECAYED = {
    "pos_embed",
    "cls_token",
    "reg_token",
    "dist_token",
    "mask_token",
    "relative_position_bias_table",
}


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019); with decay 0 it is Adam, as in the paper."""

    kind: Literal["adamw"] = "adamw"
    lr: Annotated[float, Gt(0)] = 2e-4
    """absolute peak learning rate: not scaled by the batch size"""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.999)
    eps: Annotated[float, Gt(0)] = 1e-8
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """decoupled, multiplied by the learning rate; not on biases, norms, positions and tokens"""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """steps of linear rise from 0 to lr"""
    schedule: Schedule = "cosine"
    """how lr falls to final_lr over the steps after warm-up"""
    final_lr: Annotated[float, Ge(0)] = 0.0
    """where cosine and linear end"""
    clip: Annotated[float, Gt(0)] | None = 1.0
    """largest global norm of the gradient; null = no clipping"""

    def build(self, module: nn.Module) -> tuple[torch.optim.Optimizer, list[str]]:
        """The optimiser of all trainable parameters, and their names in its order."""
        groups = parameter_groups(module, self.weight_decay)
        optimizer = torch.optim.AdamW(
            [{"params": list(group.values()), "weight_decay": decay} for decay, group in groups],
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            fused=True,
        )
        return optimizer, [name for _, group in groups for name in group]


Optim = AdamW


@dataclass(frozen=True, kw_only=True)
class Extend:
    """A stretch of training after a run's planned end."""

    steps: Annotated[int, Gt(0)]
    """how many steps more"""
    schedule: Schedule = "constant"
    """constant, or a new decay to optim.final_lr"""
    lr: Annotated[float, Gt(0)] | None = None
    """where it begins; null = optim.lr"""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """steps of linear rise at its beginning"""

    def faults(self) -> Iterator[tuple[str, str]]:
        if self.warmup_steps >= self.steps:
            yield "warmup_steps", f"{self.warmup_steps} is not less than the extension's {self.steps} steps"


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of every step, a pure function: step 0 is the first update."""

    optim: Optim
    steps: int
    extend: Sequence[Extend] = ()

    @property
    def total_steps(self) -> int:
        return self.steps + sum(stretch.steps for stretch in self.extend)

    def __call__(self, step: int) -> float:
        optim = self.optim
        if step < self.steps or not self.extend:
            return curve(step, self.steps, optim.schedule, optim.lr, optim.final_lr, optim.warmup_steps)
        step -= self.steps
        for stretch in self.extend:
            if step < stretch.steps or stretch is self.extend[-1]:
                break
            step -= stretch.steps
        peak = optim.lr if stretch.lr is None else stretch.lr
        return curve(step, stretch.steps, stretch.schedule, peak, optim.final_lr, stretch.warmup_steps)


def curve(step: int, steps: int, schedule: Schedule, peak: float, final: float, warmup: int) -> float:
    """Linear warm-up to `peak` over `warmup` steps, then the schedule down to `final` at `steps`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    fall = {"constant": 0.0, "linear": progress, "cosine": 0.5 - 0.5 * math.cos(math.pi * progress)}[schedule]
    return peak + (final - peak) * fall


def parameter_groups(module: nn.Module, weight_decay: float) -> list[tuple[float, dict[str, nn.Parameter]]]:
    """[(decay, {name: parameter})]: matrices with decay, then everything else without. Every parameter once."""
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    decayed = {name: p for name, p in trainable.items() if _decays(name, p)}
    rest = {name: p for name, p in trainable.items() if name not in decayed}
    return [(decay, group) for decay, group in ((weight_decay, decayed), (0.0, rest)) if group]


def _decays(name: str, parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and not UNDECAYED & set(name.split("."))
