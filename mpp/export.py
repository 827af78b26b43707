"""The way out: a backbone, or a classifier on it, as a folder that opens in plain timm."""

import json
from functools import lru_cache
from typing import Any

import timm
import torch
from torch import Tensor, nn

from mpp.backbones import Backbone, Pool
from mpp.data.views import View

WHOLE = View(crop=1.0)  # pretraining's features are of whole pictures
SPELLINGS: dict[Pool, tuple[dict[str, Any], ...]] = {
    "mean": (
        {"global_pool": "avg", "fc_norm": False},
        {"global_pool": "avg", "use_fc_norm": False},
        {"global_pool": "avg"},
    ),
    "cls": ({"global_pool": "token", "fc_norm": False}, {"global_pool": "token"}),
}


def timm_config(
    backbone: Backbone, classes: tuple[str, ...] | None = None, pool: Pool = "mean", view: View = WHOLE
) -> dict[str, Any]:
    """config.json of a timm folder, in our words.

    What timm derives by itself would inherit the base model's licence, tag and pixel statistics. Without classes it
    describes the backbone, features pooled over the patches after the final norm: the class token is untrained in
    masked patch prediction. With classes, it describes the classifier of `classifier_tensors`, tested on `view`.
    """
    spelling = pooling_arguments(backbone) if classes is None else classifier_arguments(backbone, pool)
    assert spelling is not None, "the caller asks classifier_tensors first"
    labels = {"label_names": list(classes)} if classes else {}
    return {
        "architecture": backbone.name,
        "num_classes": len(classes or ()),
        "num_features": backbone.embed_dim,
        "model_args": backbone.arguments | spelling,
        "pretrained_cfg": {
            "tag": "mpp",
            "custom_load": False,
            "input_size": [backbone.channels, *backbone.image_size],
            "fixed_input_size": True,
            "interpolation": view.interpolation,
            "crop_pct": view.crop if view.kind == "center_crop" else 1.0,
            "crop_mode": "center" if view.kind == "center_crop" else "squash",
            "mean": [round(value, 6) for value in backbone.mean.tolist()],
            "std": [round(value, 6) for value in backbone.std.tolist()],
            "num_classes": len(classes or ()),
            "pool_size": None,
            "first_conv": backbone.model.pretrained_cfg.get("first_conv", "patch_embed.proj"),  # pyright: ignore
            "classifier": backbone.model.pretrained_cfg.get("classifier", "head"),  # pyright: ignore
            **labels,
        },
    }


def classifier_tensors(backbone: Backbone, head: nn.Linear, pool: Pool) -> dict[str, Tensor] | None:
    """The backbone's tensors with a linear head under timm's name for it.

    None where timm's own forward would not give the head's logits (DeiT with a distillation token averages two heads,
    some models pool over the prefix tokens too): the folder then holds the backbone only, the head lies beside it.
    """
    if classifier_arguments(backbone, pool) is None:
        return None
    name = backbone.model.pretrained_cfg["classifier"]  # pyright: ignore
    bias = head.weight.new_zeros(head.out_features) if head.bias is None else head.bias
    return backbone.model.state_dict() | {f"{name}.weight": head.weight.detach(), f"{name}.bias": bias.detach()}


def classifier_arguments(backbone: Backbone, pool: Pool) -> dict[str, Any] | None:
    """How timm must be told to classify from this pooling; None where it cannot be told."""
    if pool == "cls" and getattr(backbone.model, "cls_token", None) is None:
        return None
    arguments = json.dumps(backbone.arguments, sort_keys=True)
    names = frozenset(backbone.model.state_dict())
    for spelling in SPELLINGS[pool]:
        if _names(backbone, spelling) == names and _classifies(backbone.name, arguments, json.dumps(spelling), pool):
            return spelling
    return None


def pooling_arguments(backbone: Backbone) -> dict[str, Any]:
    """How timm must be told to pool over patches after the final norm: families spell it in their own ways.

    The first spelling whose model has exactly our parameters; `token` where a family cannot pool over patches.
    """
    for spelling in (*SPELLINGS["mean"], {"global_pool": "token"}):
        if _names(backbone, spelling) == set(backbone.model.state_dict()):
            return spelling
    return {"global_pool": ""}


def _names(backbone: Backbone, spelling: dict[str, Any]) -> set[str]:
    """Tensors of timm's model without a head, made without memory; none where timm does not take the spelling."""
    try:
        with torch.device("meta"):
            return set(timm.create_model(backbone.name, num_classes=0, **backbone.arguments, **spelling).state_dict())
    except (TypeError, AssertionError):
        return set()


@lru_cache(maxsize=16)
def _classifies(name: str, arguments: str, spelling: str, pool: Pool) -> bool:
    """Whether timm's forward is one linear layer on the pooled tokens of its own forward_features; tried on a picture.

    Random weights decide: two forwards that agree on them are the same function. 3 classes, one image.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: Any = timm.create_model(name, num_classes=3, **json.loads(arguments), **json.loads(spelling)).eval()
        classifier = model.get_classifier()
        if not isinstance(classifier, nn.Linear):
            return False
        randomize(model)
        size = getattr(model.patch_embed, "img_size", None) or model.pretrained_cfg["input_size"][-2:]
        image = torch.randn(1, json.loads(arguments).get("in_chans", 3), *size)
        tokens = model.forward_features(image)
        pooled = tokens[:, 0] if pool == "cls" else tokens[:, model.num_prefix_tokens :].mean(1)
        return torch.allclose(model(image), classifier(pooled), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Every parameter drawn: some begin at zero or nearly so, and zeros agree with everything."""
    for parameter in model.parameters():
        parameter.normal_(std=0.05)
