"""An optimizer's state under the names of its parameters, to be stored, compared and put back exactly.

Tensors go by `<parameter>.<what>` ("blocks.0.norm1.weight.exp_avg"), everything else into a JSON document.
torch's own `load_state_dict` goes by position, so that two layers of one shape can swap their moments
unnoticed, and casts the state to the parameter's type; here the names must agree and every bit stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

# How the arithmetic is carried out depends on the machine: the optimizer at hand decides, not the stored one.
EXECUTION = {"foreach", "fused", "capturable", "differentiable"}


def parameter_names(optimizer: Optimizer, module: Module) -> list[str]:
    """The names in `module` of the optimizer's parameters, in the optimizer's order: group after group.

    Found by identity, so grouping may reorder them. ValueError: the optimizer holds a parameter that is not
    the module's. A tied parameter goes by its first name.
    """
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    unknown = [tuple(p.shape) for p in parameters(optimizer) if id(p) not in known]
    if unknown:
        raise ValueError(f"the optimizer holds parameters that are not the module's, of shapes {unknown}")
    return [known[id(parameter)] for parameter in parameters(optimizer)]


def optimizer_state(optimizer: Optimizer, names: list[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The whole state of an optimizer: (tensors by name, JSON document).

    `names` belong to the parameters in the optimizer's order (`parameter_names` gives them). The tensors are
    the live ones, not copies: store them before the next step. ValueError: names that do not fit, or state
    that has no place in tensors and JSON.
    """
    optimizer = unwrapped(optimizer)
    named = dict(zip(fitting(names, optimizer), parameters(optimizer), strict=True))
    refuse_foreign_state(optimizer, named.values())
    tensors: dict[str, Tensor] = {}
    groups = [
        {"names": part, **split(hyperparameters(group), f"param_groups.{index}", tensors)}
        for index, (part, group) in enumerate(by_group(names, optimizer))
    ]
    states = {
        name: {"shape": list(parameter.shape), **split(optimizer.state.get(parameter, {}), name, tensors)}
        for name, parameter in named.items()
    }
    return tensors, {"optimizer": kind(optimizer), "groups": groups, "parameters": states}


def load_optimizer_state(
    optimizer: Optimizer, names: list[str], tensors: dict[str, Tensor], document: dict[str, Any]
) -> None:
    """Put a state from `optimizer_state` into an optimizer over the same names, shapes and groups.

    The optimizer's own state and hyperparameters are replaced, except how it computes (fused, foreach, ...).
    ValueError names everything that is missing, unexpected or of another shape; the optimizer is then as it
    was before.
    """
    optimizer = unwrapped(optimizer)
    check_kind(optimizer, document)
    fitting(names, optimizer)
    groups = document["groups"]
    check_names([part for part, _ in by_group(names, optimizer)], [group["names"] for group in groups])
    check_shapes(dict(zip(names, parameters(optimizer), strict=True)), document["parameters"])
    check_tensors(tensors, document)
    states = {}
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for name, parameter in zip(saved["names"], group["params"], strict=True):
            states[parameter] = restored_state(name, parameter, group, tensors, document["parameters"][name])
        group.update(restored_group(f"param_groups.{index}", group, tensors, saved))
    optimizer.state.clear()
    optimizer.state.update({parameter: state for parameter, state in states.items() if state})


def parameters(optimizer: Optimizer) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def kind(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer that holds the state, inside accelerate's wrapper or timm's Lookahead."""
    for holder in ("optimizer", "_base_optimizer"):
        optimizer = getattr(optimizer, holder, optimizer)
    return optimizer


def fitting(names: list[str], optimizer: Optimizer) -> list[str]:
    """`names`, if there is one for each of the optimizer's parameters and none twice."""
    count = len(parameters(optimizer))
    if len(names) != count:
        raise ValueError(f"the optimizer has {count} parameters, but {len(names)} names came")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"parameter names must differ; twice: {shortened(twice)}")
    for part, group in by_group(names, optimizer):
        if (own := group.get("param_names", part)) != part:  # torch notes the names where it was given them
            raise ValueError(f"the optimizer calls its parameters {shortened(own)}, not {shortened(part)}")
    return names


def by_group(names: list[str], optimizer: Optimizer) -> list[tuple[list[str], dict[str, Any]]]:
    """Each parameter group with its part of `names`."""
    left = iter(names)
    return [([next(left) for _ in group["params"]], group) for group in optimizer.param_groups]


def refuse_foreign_state(optimizer: Optimizer, known: Iterable[Parameter]) -> None:
    """Stop rather than store half a state: timm's kron and adahessian draw from generators of their own."""
    import torch

    whole = optimizer.state_dict()
    more = set(whole) - {"state", "param_groups"}
    more |= {key for key, value in vars(optimizer).items() if isinstance(value, torch.Generator)}
    if more:
        raise ValueError(f"{kind(optimizer)} keeps more than what goes by parameter: {shortened(more)}")
    strays = optimizer.state.keys() - set(known)
    if strays or len(whole["state"]) != len(optimizer.state):
        raise ValueError(f"{kind(optimizer)} keeps state elsewhere than by its parameters")


def split(entries: dict[str, Any], prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Put the tensors among `entries` into `tensors`; return their shapes, and the other values for JSON."""
    import torch

    values, shapes = {}, {}
    for key, value in entries.items():
        if isinstance(value, torch.Tensor):
            if f"{prefix}.{key}" in tensors:
                raise ValueError(f"two parts of the optimizer's state would both be called {prefix}.{key}")
            tensors[f"{prefix}.{key}"] = value.detach()
            shapes[key] = list(value.shape)
        elif is_plain(value):
            values[key] = value
        elif isinstance(value, torch.dtype):
            values[key] = str(value)
        else:
            raise ValueError(f"{prefix}.{key}: a {type(value).__name__} is neither a tensor nor plain JSON")
    return {"values": values, "tensors": shapes}


def is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def check_kind(optimizer: Optimizer, document: dict[str, Any]) -> None:
    if document["optimizer"] != kind(optimizer):
        raise ValueError(f"this is a state of {document['optimizer']}, the optimizer is {kind(optimizer)}")


def check_names(here: list[list[str]], stored: list[list[str]]) -> None:
    """The same names in the same groups and order, which is the order of the arithmetic."""
    if here == stored:
        return
    ours, theirs = {name for part in here for name in part}, {name for part in stored for name in part}
    if ours != theirs:
        raise ValueError(
            f"the parameters are not those of the state: missing in it {shortened(ours - theirs)}; "
            f"unexpected in it {shortened(theirs - ours)}"
        )
    raise ValueError(
        f"the same parameters, grouped or ordered otherwise: groups of {[len(part) for part in here]} here, "
        f"of {[len(part) for part in stored]} in the state"
    )


def check_shapes(named: dict[str, Parameter], stored: dict[str, Any]) -> None:
    faults = [
        f"{name} is {tuple(parameter.shape)} here, {tuple(stored[name]['shape'])} in the state"
        for name, parameter in named.items()
        if list(parameter.shape) != stored[name]["shape"]
    ]
    if faults:
        raise ValueError(f"parameters of another shape: {shortened(faults)}")


def check_tensors(tensors: dict[str, Tensor], document: dict[str, Any]) -> None:
    """Exactly the tensors that the document lists, in the shapes that it lists."""
    owners = {f"param_groups.{index}": group for index, group in enumerate(document["groups"])}
    wanted = {
        f"{owner}.{key}": shape
        for owner, entry in [*owners.items(), *document["parameters"].items()]
        for key, shape in entry["tensors"].items()
    }
    if wanted.keys() != tensors.keys():
        raise ValueError(
            f"the tensors do not fit the document: missing {shortened(wanted.keys() - tensors.keys())}; "
            f"unexpected {shortened(tensors.keys() - wanted.keys())}"
        )
    if wrong := [name for name, shape in wanted.items() if list(tensors[name].shape) != shape]:
        raise ValueError(f"optimizer tensors of another shape than their document says: {shortened(wrong)}")


def restored_state(
    name: str, parameter: Parameter, group: dict[str, Any], tensors: dict[str, Tensor], saved: dict[str, Any]
) -> dict[str, Any]:
    # torch keeps the step counter on the CPU unless a kernel on the device has to read it.
    on_device = group.get("fused") or group.get("capturable")
    state = dict(saved["values"])
    for key in saved["tensors"]:
        device = parameter.device if key != "step" or on_device else "cpu"
        state[key] = laid_out(tensors[f"{name}.{key}"], parameter, device)
    return state


def laid_out(tensor: Tensor, parameter: Parameter, device: Any) -> Tensor:
    """A copy with the parameter's strides: fused kernels walk both in memory order, mixing up others."""
    import torch

    like = parameter if tensor.shape == parameter.shape else tensor
    return torch.empty_like(like, dtype=tensor.dtype, device=device).copy_(tensor)


def restored_group(
    prefix: str, group: dict[str, Any], tensors: dict[str, Tensor], saved: dict[str, Any]
) -> dict[str, Any]:
    """Stored hyperparameters as the optimizer uses them: JSON knows no tuples, dtypes and devices."""
    import torch

    entries = {key: value for key, value in saved["values"].items() if key not in EXECUTION}
    for key, value in entries.items():
        if isinstance(group.get(key), tuple):
            entries[key] = tuple(value)
        if isinstance(group.get(key), torch.dtype):
            entries[key] = getattr(torch, value.removeprefix("torch."))
    for key in saved["tensors"]:
        here = group.get(key)
        device = here.device if isinstance(here, torch.Tensor) else "cpu"
        entries[key] = tensors[f"{prefix}.{key}"].to(device, copy=True)
    return entries


def shortened(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"
