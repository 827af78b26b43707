"""Optimisers, learning rate as a function of the step, and parameter groups: what decays, how fast each layer learns.

A section builds the optimiser of a module; the trainer sets each group's `lr`, to the step's rate times its `lr_scale`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field
from torch import Tensor, nn

from mpp.optimizer_state import optimizer_state

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
MODEL = "backbone.model"  # where a task keeps the timm model; the layers that layer decay counts are its own


@dataclass(frozen=True, kw_only=True)
class OptimFields(ABC):
    """What can be said about every optimiser."""

    heeds_found_inf: ClassVar[bool]  # whether `optimizer.found_inf = 1` on the device makes step() change nothing

    kind: str
    """which optimiser"""
    lr: Annotated[float, Gt(0)]
    """absolute peak learning rate: not scaled by the batch size"""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """not on biases, norms, positions and tokens"""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """steps of linear rise from 0 to lr"""
    schedule: Schedule = "cosine"
    """how lr falls to final_lr over the steps after warm-up"""
    final_lr: Annotated[float, Ge(0)] = 0.0
    """where cosine and linear end"""
    clip: Annotated[float, Gt(0)] | None = 1.0
    """largest global norm of the gradient; null = no clipping"""
    skip_above: Annotated[float, Gt(1)] | None = None
    """updates whose gradient norm is more than this many times the mean of the last ~100 are left out; null = none"""
    layer_decay: Annotated[float, Gt(0), Le(1)] | None = None
    """each block learns at this times the rate of the one above it, the embedding slowest; null = all alike"""

    def warmup_fault(self, steps: int, whole: str) -> str | None:
        """Why a warm-up as long as the training is refused; None where it is shorter. whole: `steps` in words."""
        short = self.warmup_steps < steps
        return None if short else f"{self.warmup_steps} is not less than {whole}; try {steps // 10}"

    @property
    @abstractmethod
    def settings(self) -> str:
        """What is this optimiser's own, in words, for the header."""

    def build(self, module: nn.Module) -> tuple[torch.optim.Optimizer, list[str]]:
        """The optimiser of all trainable parameters, and their names in its order.

        ValueError: nothing to train, layers that cannot be told, or an optimiser that does not work here.
        """
        groups = parameter_groups(module, self.weight_decay, self.layer_decay)
        return self._optimizer([group.entries() for group in groups]), [n for group in groups for n in group.parameters]

    @abstractmethod
    def _optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimiser of some groups of parameters."""


@dataclass(frozen=True, kw_only=True)
class AdamW(OptimFields):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019); with decay 0 it is Adam, as in the paper."""

    heeds_found_inf = True

    kind: Literal["adamw"] = "adamw"
    lr: Annotated[float, Gt(0)] = 2e-4
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """decoupled, multiplied by the learning rate; not on biases, norms, positions and tokens"""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.999)
    eps: Annotated[float, Gt(0)] = 1e-8

    @property
    def settings(self) -> str:
        return f"betas {self.betas[0]:g} {self.betas[1]:g}"

    def _optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


@dataclass(frozen=True, kw_only=True)
class SGD(OptimFields):
    """Stochastic gradient descent with momentum; with the defaults and clip 1 it is the paper's fine-tuning."""

    heeds_found_inf = True

    kind: Literal["sgd"] = "sgd"
    lr: Annotated[float, Gt(0)] = 0.01
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """coupled: added to the gradient after clipping, so momentum sees it; not on biases, norms, positions and tokens"""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    nesterov: bool = False
    """look ahead along the momentum; the paper does not"""

    def faults(self) -> Iterator[tuple[str, str]]:
        if self.nesterov and not self.momentum:
            yield "nesterov", "looks ahead along the momentum, which is 0; set momentum: 0.9 or nesterov: false"

    @property
    def settings(self) -> str:
        return f"momentum {self.momentum:g}{', nesterov' if self.nesterov else ''}"

    def _optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        sgd = torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, fused=True)
        if self.momentum:
            sgd.register_step_pre_hook(_begin_momentum)
        return sgd


def _begin_momentum(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Momentum begins at zero, which makes the same first update as torch's own beginning.

    torch's fused SGD gives the first step uninitialised memory to fill, and where found_inf skips that step, keeps it
    as momentum (seen in torch 2.14). Not in `build`: the parameters are on their device only now.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if parameter.grad is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


@dataclass(frozen=True, kw_only=True)
class TimmOptimizer(OptimFields):
    """Any optimiser of timm by name, with timm's defaults for it (among them momentum 0.9 where there is one)."""

    heeds_found_inf = False

    kind: Literal["timm"] = "timm"
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """what the optimiser makes of it: often coupled (adam, lars), decoupled in most names that end in w"""
    name: str
    """as timm.optim.list_optimizers() gives them, e.g. lamb, lars, lion, muon"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """of the optimiser, beside lr and weight_decay: {betas: [0.9, 0.95]}"""

    def faults(self) -> Iterator[tuple[str, str]]:
        """Unknown names and arguments; optimisers that the trainer cannot drive or a checkpoint cannot hold."""
        taken, known = sorted({"params", "lr", "weight_decay"} & set(self.arguments)), _timm().list_optimizers()
        for name in taken:
            yield f"arguments.{name}", "is set by other fields (optim.lr, optim.weight_decay) or not free here"
        if self.name not in known:
            near = ", ".join(get_close_matches(self.name, known, 5, 0.4) or known)
            yield "name", f"timm has no optimiser {self.name!r}; the nearest that it has: {near}"
        elif _timm().get_optimizer_info(self.name).second_order:
            yield "name", f"timm's {self.name} needs second derivatives, which the trainer does not make; try adamw"
        elif not taken and not self._package():
            yield from self._trial()

    @property
    def settings(self) -> str:
        return ", ".join([self.name, *(f"{key} {value}" for key, value in self.arguments.items())])

    def _package(self) -> str:
        """The package of fused and 8-bit optimisers, which timm imports when asked for one; "" for all others."""
        place = _timm().get_optimizer_info(self.name).opt_class
        return place.partition(".")[0] if isinstance(place, str) else ""

    def _trial(self) -> Iterator[tuple[str, str]]:
        """One step of a matrix and a vector, and its state: what fails here would fail in a run, later."""
        module = nn.ParameterDict({"weight": nn.Parameter(torch.ones(2, 2)), "bias": nn.Parameter(torch.ones(2))})
        groups = parameter_groups(module, self.weight_decay)
        names = [name for group in groups for name in group.parameters]
        try:
            optimizer = self._made([group.entries() for group in groups])
            optimizer_state(optimizer, names)  # before the step too: kron would compile for a minute, to be refused
            for parameter in module.values():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer_state(optimizer, names)
        except Exception as error:  # whatever their constructors and steps raise
            given = f" with {self.arguments}" if self.arguments else ""
            what = "arguments" if self.arguments else "name"
            yield what, f"timm's {self.name}{given} does not work here: {type(error).__name__}: {error}"

    def _optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        for where, message in self.faults():
            raise ValueError(f"optim.{where}: {message}")
        try:
            return self._made(groups)
        except Exception as error:
            needs = f"; it needs a GPU and the package {self._package()}" if self._package() else ""
            raise ValueError(f"optim.name: timm's {self.name}: {type(error).__name__}: {error}{needs}") from error

    def _made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        # Not by timm.optim.create_optimizer_v2: that drops eps, betas and momentum unsaid where there are none.
        momentum = {"momentum": 0.9} if _timm().get_optimizer_info(self.name).has_momentum else {}
        kind = _timm().get_optimizer_class(self.name)
        return kind(groups, lr=self.lr, weight_decay=self.weight_decay, **(momentum | self.arguments))


def _timm() -> Any:
    import timm.optim  # slow, and only this kind needs it

    return timm.optim


Optim = Annotated[AdamW | SGD | TimmOptimizer, Field(discriminator="kind")]


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


@dataclass(frozen=True)
class Group:
    """Parameters by name that share a weight decay and a factor on the learning rate."""

    parameters: dict[str, nn.Parameter]
    weight_decay: float
    lr_scale: float = 1.0

    def entries(self) -> dict[str, Any]:
        """As torch's optimisers take it."""
        return {
            "params": list(self.parameters.values()),
            "weight_decay": self.weight_decay,
            "lr_scale": self.lr_scale,
        }


def parameter_groups(module: nn.Module, weight_decay: float, layer_decay: float | None = None) -> list[Group]:
    """Every trainable parameter in one group: the slowest layers first, in each the matrices before what never decays.

    Without layer decay that is one layer. Frozen parameters are in no group. ValueError: nothing is trainable, or
    `layer_decay` for a module whose layers cannot be told.
    """
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError("nothing to train: every parameter is frozen")
    scales = dict.fromkeys(trainable, 1.0) if layer_decay is None else lr_scales(module, layer_decay)
    spared = model_undecayed(module)
    groups = []
    for scale in sorted({scales[name] for name in trainable}):
        layer = {name: p for name, p in trainable.items() if scales[name] == scale}
        decayed = {name: p for name, p in layer.items() if _decays(name, p) and name not in spared}
        rest = {name: p for name, p in layer.items() if name not in decayed}
        groups += [Group(part, decay, scale) for part, decay in ((decayed, weight_decay), (rest, 0.0)) if part]
    covered = [name for group in groups for name in group.parameters]
    assert sorted(covered) == sorted(trainable), "each parameter belongs to one group"
    return groups


def model_undecayed(module: nn.Module) -> set[str]:
    """What the timm model itself spares from decay: learned rotary frequencies, for one."""
    try:
        model: Any = module.get_submodule(MODEL)
    except AttributeError:
        return set()
    own = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    return {f"{MODEL}.{name}" for name in own}


def _decays(name: str, parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and not UNDECAYED & set(name.split("."))


def lr_scales(module: nn.Module, layer_decay: float) -> dict[str, float]:
    """Name -> layer_decay ** (layers above), for every parameter of a task with a backbone.

    As in BEiT and MAE: the embedding is layer 0, block i is layer i + 1; the final norm, the head and everything else
    outside the timm model are the last layer, depth + 1, whose factor is 1.
    """
    try:
        layers = layer_numbers(module.get_submodule(MODEL))
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"optim.layer_decay: cannot tell the layers of {MODEL}: {error}; expected a vision transformer whose "
            f"blocks timm can number, try optim.layer_decay: null"
        ) from None
    top = max(layers.values())
    names = [name for name, _ in module.named_parameters()]
    return {name: layer_decay ** (top - layers.get(name.removeprefix(f"{MODEL}."), top)) for name in names}


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Name -> layer for the parameters of a timm model, 0 .. depth + 1 (trainable or not)."""
    from timm.models import group_parameters

    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is None:
        raise ValueError(f"timm's {type(model).__name__} has no group_matcher")
    found: Any = group_parameters(model, matcher(coarse=False), reverse=True)
    blocks = {layer for name, layer in found.items() if name.startswith("blocks")}
    top = max(blocks, default=0) + 1
    if blocks != set(range(1, top)) or top == 1:
        raise ValueError(f"timm puts the blocks of {type(model).__name__} into the layers {sorted(blocks)}")
    return {name: layer if name.startswith("blocks") else _end(name, layer, top) for name, layer in found.items()}


def _end(name: str, layer: int, top: int) -> int:
    """Below or above the blocks: timm counts the final norm to the last block, and what it does not know as a head."""
    is_embedding = layer == 0 or name.partition(".")[0] in UNDECAYED | {"rope"}
    return 0 if is_embedding else top
