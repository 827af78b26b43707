"""The short way through a plain ViT: the same final tokens of the corrupted patches, with less work.

Tokens are kept in the plan's order, so that corrupted ones are a slice and not a gather. Masked patches are never
embedded, and the last block computes keys and values for all tokens, but everything else only for the corrupted ones.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from mpp.masking import Plan, gather, partners
from mpp.patches import Size, to_patches


def corrupted_tokens(
    model: Any, images: Tensor, plan: Plan, mask_token: Tensor, patch_size: Size, mean: Tensor, std: Tensor
) -> Tensor:
    """uint8 (B, C, H, W) -> (B, K, D), as `Backbone.corrupted_features` by the general way. mean, std: per channel."""
    pixels = to_patches(images, patch_size)
    needed = torch.cat([partners(pixels, plan), gather(pixels, plan.permutation[:, plan.masked + plan.random :])], 1)
    embedded = embed(model.patch_embed.proj, needed, mean, std)
    replaced, own = embedded[:, : plan.random], embedded[:, plan.random :]
    masks = mask_token.to(embedded.dtype).expand(len(images), plan.masked, -1)
    tokens = add_positions(model, torch.cat([masks, replaced, own], 1), plan.permutation)
    tokens = model.norm_pre(tokens)
    for block in model.blocks[:-1]:
        tokens = block(tokens)
    prefix = model.num_prefix_tokens
    return model.norm(partial_block(model.blocks[-1], tokens, slice(prefix, prefix + plan.num_corrupted)))


def embed(projection: nn.Conv2d, pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 (B, M, P*Q*C) -> (B, M, D): the patch projection as one matrix product, pixel statistics folded in.

    Not folded under autocast: the shift is far larger than what is left of it after cancelling raw pixels, and half
    precision would round both.
    """
    if torch.is_autocast_enabled(pixels.device.type):
        normal = (pixels.unflatten(-1, (-1, len(mean))).float() / 255 - mean) / std
        return F.linear(normal.flatten(-2), projection.weight.permute(0, 2, 3, 1).flatten(1), projection.bias)
    scaled = projection.weight.permute(0, 2, 3, 1) / (255 * std)
    shift = (projection.weight.sum((2, 3)) * (mean / std)).sum(1)
    bias = -shift if projection.bias is None else projection.bias - shift
    return F.linear(pixels.float(), scaled.flatten(1), bias)


def add_positions(model: Any, patches: Tensor, permutation: Tensor) -> Tensor:
    """Patches (B, N, D) in permuted order -> prefix tokens and patches with their positions."""
    tokens = (model.cls_token, model.reg_token)
    prefix = [token.expand(len(patches), -1, -1) for token in tokens if token is not None]
    positions, count = model.pos_embed[0], model.num_prefix_tokens
    if not model.no_embed_class and count:
        prefix = [torch.cat(prefix, 1) + positions[:count]]
        positions = positions[count:]
    return model.pos_drop(torch.cat([*prefix, patches + positions[permutation]], 1))


def is_plain_vit(model: nn.Module) -> bool:
    """Whether every step of the model is one that this file spells out."""
    return (
        type(model) is VisionTransformer
        and model.pos_embed is not None
        and not model.dynamic_img_size
        and isinstance(model.patch_drop, nn.Identity)
        and isinstance(getattr(model.patch_embed, "norm", None), nn.Identity)
        and isinstance(getattr(model.patch_embed, "proj", None), nn.Conv2d)
        and model.patch_embed.proj.kernel_size == model.patch_embed.proj.stride
        and all(type(block) is Block and type(block.attn) is Attention for block in model.blocks)
    )


def partial_block(block: Any, tokens: Tensor, wanted: slice) -> Tensor:
    """A timm `Block` whose output is needed for some tokens only: (B, T, D) -> (B, wanted, D)."""
    attention, normed, rest = block.attn, block.norm1(tokens), tokens[:, wanted]
    heads, width = attention.num_heads, attention.qkv.weight.shape[0] // 3
    weights, biases = attention.qkv.weight.split([width, 2 * width]), (None, None)
    if attention.qkv.bias is not None:
        biases = attention.qkv.bias.split([width, 2 * width])
    query = _heads(F.linear(normed[:, wanted], weights[0], biases[0]), heads, 1)[0]
    key, value = _heads(F.linear(normed, weights[1], biases[1]), heads, 2)
    query, key = attention.q_norm(query), attention.k_norm(key)
    if attention.fused_attn:
        drop = attention.attn_drop.p if attention.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=drop)
    else:
        mixed = attention.attn_drop((query * attention.scale @ key.mT).softmax(-1)) @ value
    mixed = mixed.transpose(1, 2).flatten(2)
    if hasattr(attention, "norm"):
        mixed = attention.norm(mixed)
    if getattr(attention, "gate", None) is not None:
        mixed = mixed * attention.gate(normed[:, wanted]).sigmoid()
    rest = rest + block.drop_path1(block.ls1(attention.proj_drop(attention.proj(mixed))))
    return rest + block.drop_path2(block.ls2(block.mlp(block.norm2(rest))))


def _heads(x: Tensor, heads: int, parts: int) -> Tensor:
    """(B, T, parts * D) -> (parts, B, heads, T, D / heads)."""
    return x.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4)
