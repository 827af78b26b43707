"""One door for weights: a backbone into a folder that opens in plain timm, and out of a run again."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from mpp.backbones import Backbone
from mpp.checkpoint import Checkpoint, newest


def timm_config(backbone: Backbone) -> dict[str, Any]:
    """config.json of a timm folder, in our words.

    What timm derives by itself would inherit the base model's licence, tag and pixel statistics. Features are pooled
    over the patches after the final norm: the class token is untrained in masked patch prediction.
    """
    arguments = backbone.arguments | pooling_arguments(backbone)
    return {
        "architecture": backbone.name,
        "num_classes": 0,
        "num_features": backbone.embed_dim,
        "model_args": arguments,
        "pretrained_cfg": {
            "tag": "mpp",
            "custom_load": False,
            "input_size": [backbone.channels, *backbone.image_size],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": [round(value, 6) for value in backbone.mean.tolist()],
            "std": [round(value, 6) for value in backbone.std.tolist()],
            "num_classes": 0,
            "pool_size": None,
            "first_conv": backbone.model.pretrained_cfg.get("first_conv", "patch_embed.proj"),  # pyright: ignore
            "classifier": backbone.model.pretrained_cfg.get("classifier", "head"),  # pyright: ignore
        },
    }


def pooling_arguments(backbone: Backbone) -> dict[str, Any]:
    """How timm must be told to pool over patches after the final norm: families spell it in their own ways.

    The first spelling whose model has exactly our parameters; `token` where a family cannot pool over patches.
    """
    spellings: tuple[dict[str, Any], ...] = (
        {"global_pool": "avg", "fc_norm": False},
        {"global_pool": "avg", "use_fc_norm": False},
        {"global_pool": "avg"},
        {"global_pool": "token"},
    )
    for spelling in spellings:
        try:
            with torch.device("meta"):
                model = timm.create_model(backbone.name, num_classes=0, **backbone.arguments, **spelling)
        except (TypeError, AssertionError):
            continue
        if set(model.state_dict()) == set(backbone.model.state_dict()):
            return spelling
    return {"global_pool": ""}


def objective_tensors(task: nn.Module) -> dict[str, Tensor]:
    """What a task has beside its backbone: head and mask token."""
    return {name: t for name, t in task.state_dict().items() if not name.startswith("backbone.")}


def objective_config(task: Any) -> dict[str, Any]:
    """What the head predicts, for readers of objective.safetensors."""
    sections = {name: asdict(getattr(task, name)) for name in ("masking", "corruption", "target")}
    return sections | {"num_corrupted": task.num_corrupted, "patch_size": list(task.backbone.patch_size)}


def load_task(task: Any, checkpoint: Checkpoint) -> None:
    """Backbone, head and mask token of the same recipe; strict."""
    load_strictly(task.backbone.model, checkpoint.tensors("model.safetensors"), str(checkpoint.path))
    objective = checkpoint.tensors("objective.safetensors")
    check_fit(objective_tensors(task), objective, str(checkpoint.path))
    task.load_state_dict(objective, strict=False)  # the backbone's names are not among these


def initial_checkpoint(task: Any, spec: str) -> Checkpoint:
    """The checkpoint that `init` names; ValueError if there is none or its backbone does not fit."""
    checkpoint = checkpoint_at(Path(spec))
    check_fit(task.backbone.model.state_dict(), checkpoint.tensors("model.safetensors"), f"init: {spec}")
    return checkpoint


def initialize(task: Any, checkpoint: Checkpoint) -> str:
    """Weights of another run's checkpoint into a fresh task; a sentence on what was taken.

    The backbone must fit exactly. Head and mask token come along where they fit: another target needs another head.
    """
    load_strictly(task.backbone.model, checkpoint.tensors("model.safetensors"), f"init: {checkpoint.path}")
    theirs, ours = checkpoint.tensors("objective.safetensors"), objective_tensors(task)
    fitting = {name: t for name, t in theirs.items() if name in ours and t.shape == ours[name].shape}
    task.load_state_dict(fitting, strict=False)
    fresh = sorted(set(ours) - set(fitting))
    return f"weights of step {checkpoint.step:,}, {checkpoint.path}" + (f"; fresh: {', '.join(fresh)}" if fresh else "")


def checkpoint_at(path: Path) -> Checkpoint:
    """A run's newest valid checkpoint, or the checkpoint that the path itself names."""
    if (path / "manifest.json").is_file():
        checkpoint = Checkpoint(path)
        checkpoint.verify()
        return checkpoint
    found, skipped = newest(path) if path.is_dir() else (None, [])
    if found is None:
        damaged = "".join(f"\n  skipped {bad}: {reason}" for bad, reason in skipped)
        raise ValueError(f"init: {path} has no checkpoint; expected a run folder or one of its checkpoints{damaged}")
    return found


def load_strictly(model: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """All names and shapes must agree; both differences are reported."""
    check_fit(model.state_dict(), tensors, where)
    model.load_state_dict(tensors)


def check_fit(own: dict[str, Tensor], tensors: dict[str, Tensor], where: str) -> None:
    """ValueError with what is missing, unexpected or of another shape."""
    missing, unexpected = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
    shapes = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    if missing or unexpected or shapes:
        parts = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
        told = "; ".join(f"{what}: {_some(names)}" for what, names in parts.items() if names)
        raise ValueError(f"{where} does not fit this backbone ({told}); use the same backbone and data.channels")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
