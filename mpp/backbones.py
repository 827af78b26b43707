"""Backbone: a timm vision transformer with a known patch grid, prefix tokens and pixel statistics.

The timm model is used as it comes, so state dicts travel. It answers two questions: `corrupted_features`, asked by
masked objectives, and `features`, asked by everybody else.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import timm
import torch
from torch import Tensor, nn

from mpp.architectures import Statistic, Timm, ViT
from mpp.masking import Plan, corrupt, gather
from mpp.patches import Size, grid_of, pair
from mpp.plain_vit import corrupted_tokens, is_plain_vit

Pool = Literal["mean", "cls"]
Readout = Pool | Literal["both"]
Layers = tuple[int, ...] | Literal["all"]


def build_backbone(spec: ViT | Timm, channels: int, seed: int) -> "Backbone":
    """An untrained backbone; its weights are a function of the seed alone (made on the CPU)."""
    name, arguments = spec.architecture(channels)
    return create_backbone(name, arguments, channels, spec.pixel_mean, spec.pixel_std, spec.regularization(), seed)


def create_backbone(
    name: str,
    arguments: dict[str, Any],
    channels: int,
    mean: Statistic = 0.5,
    std: Statistic = 0.5,
    regularization: dict[str, Any] | None = None,
    seed: int = 0,
) -> "Backbone":
    """The same from timm's name and arguments. regularization: arguments that do not travel with the weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = create_model(name, arguments | (regularization or {}))
            return Backbone(model, channels, mean, std, name, arguments)
        except (TypeError, AssertionError, RuntimeError, KeyError) as error:
            raise ValueError(
                f"timm cannot make {name} with the arguments {arguments}: {error}; masked patch prediction needs a "
                f"plain vision transformer, try `backbone.kind: vit`"
            ) from None


def create_model(name: str, arguments: dict[str, Any]) -> nn.Module:
    """timm's model without a head and without pooling, so that the final norm sits on the tokens."""
    pool = "token" if "distilled" in name.split(".")[0] else ""  # those know no other
    arguments = {"pretrained": False, "num_classes": 0, "global_pool": pool, **arguments}
    model = timm.create_model(name, **arguments)
    if isinstance(getattr(model, "fc_norm", None), nn.Identity | None):
        return model
    # Some families norm behind the pooling by default, whatever the pooling: their tokens would have no final norm.
    return timm.create_model(name, **arguments, fc_norm=False)


class Backbone(nn.Module):
    """A timm model and what must be known of it.

    model: the timm model, without head. grid: patches (rows, columns). patch_size, image_size: pixels, height first.
    num_prefix_tokens: class and register tokens before the patches. mean, std: per channel, of pixels in [0, 1].
    ValueError for models whose output tokens are not their input patches (Swin and other pyramids).
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        model: nn.Module,
        channels: int,
        mean: Statistic = 0.5,
        std: Statistic = 0.5,
        name: str = "",
        arguments: dict[str, Any] | None = None,
    ):
        super().__init__()
        self.model, self.channels, self.name, self.arguments = model, channels, name, arguments or {}
        self.origin = "untrained"  # a sentence on where the weights came from; weights.py writes it
        self.register_buffer("mean", _per_channel(mean, channels, "pixel_mean"), persistent=False)
        self.register_buffer("std", _per_channel(std, channels, "pixel_std"), persistent=False)
        self.image_size = _image_size(model, name)
        self._corruption: Callable[[Tensor], Tensor] | None = None
        _refuse_what_mixes_images(model, name)
        _patch_embedding(model, name).register_forward_hook(self._corrupt_embedding)
        self.grid, self.num_prefix_tokens, self.embed_dim = self._measure()
        self.patch_size: Size = (self.image_size[0] // self.grid[0], self.image_size[1] // self.grid[1])
        grid_of(self.image_size, self.patch_size)  # a border that belongs to no patch is refused
        self.is_plain = is_plain_vit(model)
        if not self.is_plain:
            self._refuse_unused_parameters()
        self.has_dropout = any(_is_random(module) for module in model.modules())

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def depth(self) -> int:
        return len(self.model.blocks) if hasattr(self.model, "blocks") else 1  # pyright: ignore

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) -> float32, (pixel / 255 - mean) / std."""
        scale = 1 / (255 * self.std)
        return torch.addcmul((-self.mean / self.std)[:, None, None], images.float(), scale[:, None, None])

    def corrupted_features(self, images: Tensor, plan: Plan, mask_token: Tensor, plain: bool = True) -> Tensor:
        """uint8 (B, C, H, W) -> (B, K, D): final tokens of the corrupted patches, in the plan's order.

        `plain` takes the short way where the model allows it; the values are the same (a test holds them equal).
        """
        if plain and self.is_plain:
            return corrupted_tokens(self.model, images, plan, mask_token, self.patch_size, self.mean, self.std)
        self._corruption = lambda tokens: corrupt(tokens, plan, mask_token)
        try:
            tokens = self.model.forward_features(self.normalize(images))  # pyright: ignore
        finally:
            self._corruption = None
        return gather(tokens[:, self.num_prefix_tokens :], plan.corrupted)

    def features(
        self, images: Tensor, pools: Sequence[Readout] = ("mean",), layers: Sequence[int] = (-1,)
    ) -> dict[tuple[Readout, int], Tensor]:
        """uint8 (B, C, H, W) -> {(pool, layer): (B, D)}, all after the final norm; negative layers count from the last.

        `mean` is over the patch tokens: the class token gets no loss in masked patch prediction (METHOD.md 1). `both`
        is the class token and behind it the mean, (B, 2 D).
        """
        self.check_readout(pools, layers)
        outputs = {}
        for layer, tokens in zip(layers, self._layer_tokens(images, layers), strict=True):
            pooled = {"mean": tokens[:, self.num_prefix_tokens :].mean(1), "cls": tokens[:, 0]}
            pooled["both"] = torch.cat([pooled["cls"], pooled["mean"]], 1)
            outputs |= {(pool, layer): pooled[pool] for pool in pools}
        return outputs

    def width(self, pool: Readout) -> int:
        """Features of an image under a pooling."""
        return self.embed_dim * (2 if pool == "both" else 1)

    def layers_of(self, layers: Layers) -> tuple[int, ...]:
        """The blocks that a recipe asks for; `all`: from the first, 0, to the last."""
        return tuple(range(self.depth)) if layers == "all" else layers

    def tokens(self, images: Tensor, layers: Sequence[int] = (-1,)) -> list[Tensor]:
        """uint8 (B, C, H, W) -> for each layer the patch tokens (B, N, D), after the final norm."""
        self.check_readout((), layers)
        return [tokens[:, self.num_prefix_tokens :] for tokens in self._layer_tokens(images, layers)]

    def check_readout(self, pools: Sequence[Readout], layers: Sequence[int] | Literal["all"]) -> None:
        """ValueError for a pooling or layer that this backbone does not have."""
        asking = [pool for pool in pools if pool != "mean"]
        if asking and getattr(self.model, "cls_token", None) is None:
            raise ValueError(f"pool: {asking[0]} asks for a class token and this backbone has none; try pool: mean")
        if layers != "all" and not all(-self.depth <= layer < self.depth for layer in layers):
            raise ValueError(
                f"layers {list(layers)} of a backbone with {self.depth}: expected {-self.depth} .. {self.depth - 1}"
            )

    def _layer_tokens(self, images: Tensor, layers: Sequence[int]) -> list[Tensor]:
        images = self.normalize(images)
        if all(layer in (-1, self.depth - 1) for layer in layers):
            return [self.model.forward_features(images)] * len(layers)  # pyright: ignore
        indices = [layer + self.depth if layer < 0 else layer for layer in layers]
        wanted = sorted(set(indices))
        try:
            pairs = self.model.forward_intermediates(  # pyright: ignore
                images,
                indices=wanted,
                norm=True,
                output_fmt="NLC",
                intermediates_only=True,
                return_prefix_tokens=True,
            )
        except (AttributeError, TypeError):
            raise ValueError(f"timm's {self.name} gives no intermediate layers; try layers: [-1]") from None
        tokens = [
            torch.cat([prefix, patches], 1) if prefix is not None else patches for patches, prefix in map(_split, pairs)
        ]
        return [tokens[wanted.index(index)] for index in indices]

    def _corrupt_embedding(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if self._corruption is None:
            return None
        tokens = output[0] if isinstance(output, tuple) else output
        corrupted = self._corruption(tokens.flatten(1, -2)).view(tokens.shape)
        return (corrupted, *output[1:]) if isinstance(output, tuple) else corrupted

    def _refuse_unused_parameters(self) -> None:
        """What no token depends on would never learn, and stops data-parallel training after its first step."""
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            self.model.forward_features(torch.rand(1, self.channels, *self.image_size)).sum().backward()  # pyright: ignore
        unused = [name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        self.model.zero_grad(set_to_none=True)
        if unused:
            raise ValueError(
                f"timm's {self.name} has parameters that its tokens do not depend on: {', '.join(unused[:5])}; try "
                f"arguments that leave them out, or another model"
            )

    @torch.no_grad()
    def _measure(self) -> tuple[Size, int, int]:
        """One image of zeros through the model: (grid, prefix tokens, width), as they really are."""
        seen: list[Tensor] = []
        was_training = self.model.training
        self.model.eval()
        self._corruption = lambda tokens: seen.append(tokens) or tokens
        try:
            out = self.model.forward_features(torch.zeros(1, self.channels, *self.image_size))  # pyright: ignore
        finally:
            self._corruption = None
            self.model.train(was_training)
        patches = seen[0].shape[1] if seen else 0
        prefix = int(getattr(self.model, "num_prefix_tokens", 1))
        if out.ndim != 3 or out.shape[1] != patches + prefix or not patches:
            raise ValueError(
                f"timm's {self.name} turns {patches} patches into an output of shape {tuple(out.shape)}: masked patch "
                f"prediction needs one output token per input patch; try a plain ViT, DeiT, EVA-02 or BEiT"
            )
        return _grid_for(patches, self.image_size, self.model), prefix, out.shape[2]


def choose_attention(model: nn.Module, device: torch.device, precision: str) -> None:
    """The one place that picks the attention kernel.

    PyTorch's CPU flash attention in bf16 runs at a third of the speed of bmm + softmax + bmm; elsewhere fused wins.
    """
    fused = not (device.type == "cpu" and precision == "bf16")
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused  # pyright: ignore


def compile_in_place(backbone: "Backbone") -> None:
    """Compiles block by block, so that names in state dicts stay and all blocks share one compiled graph."""
    for block in getattr(backbone.model, "blocks", [backbone.model]):
        block.compile()


def _per_channel(value: Statistic, channels: int, name: str) -> Tensor:
    values = (value,) * channels if isinstance(value, float | int) else value
    if len(values) != channels:
        raise ValueError(
            f"backbone.{name} has {len(values)} values for {channels} channels; give one, or one per channel"
        )
    return torch.tensor(values, dtype=torch.float32)


def _refuse_what_mixes_images(model: nn.Module, name: str) -> None:
    """Dropped patches have no token to predict from; batch statistics would make results depend on the split."""
    for module in model.modules():
        kind = type(module).__name__
        if kind in ("PatchDropout", "PatchDropoutWithIndices") or "BatchNorm" in kind:
            raise ValueError(f"timm's {name} has a {kind}: not possible here; try another model or other arguments")


def _patch_embedding(model: nn.Module, name: str) -> nn.Module:
    if not isinstance(getattr(model, "patch_embed", None), nn.Module) or not hasattr(model, "forward_features"):
        raise ValueError(f"timm's {name} has no patch embedding; masked patch prediction needs a vision transformer")
    return model.patch_embed  # pyright: ignore


def _image_size(model: nn.Module, name: str) -> Size:
    own: Any = getattr(_patch_embedding(model, name), "img_size", None)
    size: Any = own or model.default_cfg["input_size"][-2:]  # pyright: ignore
    return pair(tuple(size) if not isinstance(size, int) else size)


def _grid_for(patches: int, image_size: Size, model: nn.Module) -> Size:
    grid = tuple(getattr(model.patch_embed, "grid_size", None) or ())  # pyright: ignore
    if len(grid) == 2 and grid[0] * grid[1] == patches:
        return grid  # pyright: ignore
    rows = round((patches * image_size[0] / image_size[1]) ** 0.5)
    if not rows or patches % rows:
        raise ValueError(f"cannot tell the grid of {patches} patches on an image of {image_size[0]}x{image_size[1]}")
    return rows, patches // rows


def _split(output: Any) -> tuple[Tensor, Tensor | None]:
    return output if isinstance(output, tuple) else (output, None)


def _is_random(module: nn.Module) -> bool:
    return float(getattr(module, "p", 0) or getattr(module, "drop_prob", 0) or 0) > 0
