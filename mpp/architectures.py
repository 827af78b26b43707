"""Which network: the recipe sections that name an architecture, and what they mean to timm."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import timm
from annotated_types import Ge, Gt, Lt
from pydantic import Field

from mpp.patches import grid_of, pair

Positive = Annotated[int, Gt(0)]
ImageSize = Positive | tuple[Positive, Positive]
Statistic = float | tuple[float, ...]
Deviation = Annotated[float, Gt(0)] | tuple[Annotated[float, Gt(0)], ...]
# They read other weights, or give a model that is no backbone, without a word.
NOT_FREE = {"num_classes", "global_pool", "in_chans", "img_size", "pretrained", "checkpoint_path", "features_only"}
NOT_FREE |= {"pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict"}

# width, depth, heads; MLP ratio 4 (paper, table 1; Ti and S from DeiT)
SIZES = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "huge": (1280, 32, 16),
}


@dataclass(frozen=True, kw_only=True)
class ViT:
    """A plain vision transformer of any size, patch and shape."""

    kind: Literal["vit"] = "vit"
    size: Literal["tiny", "small", "base", "large", "huge"] = "small"
    """width/depth/heads: 192/12/3, 384/12/6, 768/12/12, 1024/24/16, 1280/32/16"""
    patch_size: ImageSize = 16
    """pixels, or [height, width]"""
    image_size: ImageSize = 224
    """pixels, or [height, width]"""
    embed_dim: Positive | None = None
    """instead of the size's width"""
    depth: Positive | None = None
    """instead of the size's number of blocks"""
    num_heads: Positive | None = None
    """instead of the size's number of heads"""
    class_token: bool = True
    """whether there is a class token; features for evaluation are the mean of the patches by default"""
    register_tokens: Annotated[int, Ge(0)] = 0
    """extra tokens without a position"""
    weight_init: Literal["jax", "timm"] = "jax"
    """jax: that of the paper's code, Xavier for attention and MLP; timm: normal, standard deviation 0.02"""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """dropout after positions, projections and MLPs"""
    drop_path: Annotated[float, Ge(0), Lt(1)] = 0.0
    """stochastic depth of the last block, rising linearly from 0"""
    pixel_mean: Statistic = 0.5
    """subtracted from pixels in [0, 1], one value or one per channel"""
    pixel_std: Deviation = 0.5
    """divides them"""

    def faults(self) -> Iterator[tuple[str, str]]:
        try:
            grid_of(pair(self.image_size), pair(self.patch_size))
        except ValueError as error:
            yield "patch_size", str(error)
        width, _, heads = self.shape()
        if width % heads:
            yield "num_heads", f"{heads} heads do not divide a width of {width}"

    def shape(self) -> tuple[int, int, int]:
        """(width, depth, heads)."""
        width, depth, heads = SIZES[self.size]
        return self.embed_dim or width, self.depth or depth, self.num_heads or heads

    def architecture(self, channels: int) -> tuple[str, dict[str, Any]]:
        """timm's name and arguments: what config.json says, and what opens the weights again."""
        width, depth, heads = self.shape()
        arguments = {
            "img_size": pair(self.image_size),
            "patch_size": pair(self.patch_size),
            "embed_dim": width,
            "depth": depth,
            "num_heads": heads,
            "in_chans": channels,
            "class_token": self.class_token,
            "reg_tokens": self.register_tokens,
        }
        if self.register_tokens:
            arguments["no_embed_class"] = True  # registers have no position
        return "vit_base_patch16_224", arguments

    def regularization(self) -> dict[str, Any]:
        """Arguments that matter in training only and do not travel with the weights."""
        return {
            "weight_init": "jax" if self.weight_init == "jax" else "",
            "proj_drop_rate": self.dropout,
            "pos_drop_rate": self.dropout,
            "drop_path_rate": self.drop_path,
        }


@dataclass(frozen=True, kw_only=True)
class Timm:
    """Any vision transformer of timm by name, untrained."""

    kind: Literal["timm"] = "timm"
    name: str
    """e.g. vit_small_patch16_224, deit3_base_patch16_224, eva02_tiny_patch14_224, vit_base_r50_s16_224"""
    image_size: ImageSize | None = None
    """pixels, or [height, width]; null = the model's own"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """passed on to timm.create_model"""
    drop_path: Annotated[float, Ge(0), Lt(1)] = 0.0
    """stochastic depth"""
    pixel_mean: Statistic = 0.5
    """subtracted from pixels in [0, 1], one value or one per channel"""
    pixel_std: Deviation = 0.5
    """divides them"""

    def faults(self) -> Iterator[tuple[str, str]]:
        for taken in sorted(NOT_FREE & set(self.arguments)):
            yield f"arguments.{taken}", "is set by other fields (backbone.image_size, data.channels) or not free here"
        if not timm.is_model(self.name):
            near = get_close_matches(self.name.split(".")[0], timm.list_models(), n=5, cutoff=0.3)
            yield "name", f"timm {timm.__version__} has no model {self.name!r}; some that it has: {near}"

    def architecture(self, channels: int) -> tuple[str, dict[str, Any]]:
        arguments = {"in_chans": channels, **self.arguments}
        if self.image_size is not None:
            arguments["img_size"] = pair(self.image_size)
        return self.name, arguments

    def regularization(self) -> dict[str, Any]:
        return {"drop_path_rate": self.drop_path} if self.drop_path else {}


BackboneSpec = Annotated[ViT | Timm, Field(discriminator="kind")]
