"""Images and their patches: cutting, joining, grids, exact colours per patch. Pure functions."""

import torch
from einops import rearrange
from torch import Tensor

Size = tuple[int, int]


def pair(size: int | Size) -> Size:
    """32 -> (32, 32); (48, 80) stays: height first, as everywhere in mpp."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def grid_of(image_size: Size, patch_size: Size) -> Size:
    """How many patches fit, (rows, columns). ValueError if they do not fit exactly."""
    if image_size[0] % patch_size[0] or image_size[1] % patch_size[1]:
        raise ValueError(
            f"patch size {_times(patch_size)} does not divide the image size {_times(image_size)}; "
            f"try an image size of {_times(_nearest_multiple(image_size, patch_size))}, or a patch size of "
            f"{_times(_nearest_divisor(image_size, patch_size))}"
        )
    return image_size[0] // patch_size[0], image_size[1] // patch_size[1]


def to_patches(images: Tensor, patch_size: Size) -> Tensor:
    """(B, C, H, W) -> (B, N, P*Q*C), patches in row-major order, a patch's values as (p q c)."""
    p, q = patch_size
    return rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=p, q=q)


def to_images(patches: Tensor, grid: Size, patch_size: Size) -> Tensor:
    """The inverse of `to_patches`: (B, N, P*Q*C) -> (B, C, H, W)."""
    (h, w), (p, q) = grid, patch_size
    return rearrange(patches, "b (h w) (p q c) -> b c (h p) (w q)", h=h, w=w, p=p, q=q)


def color_levels(images: Tensor, patch_size: Size, bits: int, cells: Size = (1, 1)) -> Tensor:
    """Mean colour of every patch, or of its cells, in `bits` bits per channel, exactly.

    images: uint8 (B, C, H, W), raw pixels. Returns int64 (B, N, cells, C) with values 0 .. 2**bits - 1:
    `level = floor(mean * 2**bits / 256)` in integers, so that a mean of exactly 128 belongs to level 4 of 8
    (paper, appendix B.1.2). Cells follow adaptive average pooling where they do not divide the patch.
    """
    _require_uint8(images)
    p, q = patch_size
    blocks = rearrange(images, "b c (h p) (w q) -> b (h w) c p q", p=p, q=q)
    rows, columns = _edges(p, cells[0]), _edges(q, cells[1])
    sums = torch.stack([blocks[..., a:b, :].sum(-2, dtype=torch.int32) for a, b in rows], -2)
    sums = torch.stack([sums[..., a:b].sum(-1, dtype=torch.int32) for a, b in columns], -1)
    counts = torch.tensor([[(b - a) * (d - c) for c, d in columns] for a, b in rows], device=images.device)
    # 2**bits <= 256, so dividing by pixels * 2**(8 - bits) is the whole formula, without a rounding anywhere.
    levels = torch.div(sums, counts.to(torch.int32) * 2 ** (8 - bits), rounding_mode="floor")
    return rearrange(levels, "b n c i j -> b n (i j) c").long()


def color_classes(levels: Tensor, bits: int) -> Tensor:
    """(..., C) levels -> (...) classes: `sum(level[c] * (2**bits)**c)`, channel 0 least significant (frozen).

    The order must never change: heads travel.
    """
    weights = (2**bits) ** torch.arange(levels.shape[-1], device=levels.device)
    return (levels * weights).sum(-1)


def class_colors(classes: Tensor, bits: int, channels: int) -> Tensor:
    """(...) classes -> (..., C) colours in [0, 1]: the middle of each bin."""
    weights = (2**bits) ** torch.arange(channels, device=classes.device)
    levels = torch.div(classes.unsqueeze(-1), weights, rounding_mode="floor") % 2**bits
    return (levels.float() + 0.5) / 2**bits


def _edges(length: int, cells: int) -> list[tuple[int, int]]:
    """Where each of `cells` cells begins and ends, as in adaptive pooling: floor(i L / n), ceil((i + 1) L / n)."""
    return [(i * length // cells, -(-(i + 1) * length // cells)) for i in range(cells)]


def _require_uint8(images: Tensor) -> None:
    # Labels from normalised pixels put every patch into one extreme class and the loss goes to 0 (METHOD.md 1).
    if images.dtype != torch.uint8:
        raise ValueError(
            f"patch colours are made from raw uint8 pixels, got {images.dtype}; pass images before they are normalised"
        )


def _nearest_divisor(image_size: Size, patch_size: Size) -> Size:
    pairs = zip(image_size, patch_size, strict=True)
    return tuple(  # pyright: ignore
        min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: abs(d - patch)) for size, patch in pairs
    )


def _nearest_multiple(image_size: Size, patch_size: Size) -> Size:
    return tuple(max(p, round(s / p) * p) for s, p in zip(image_size, patch_size, strict=True))  # pyright: ignore


def _times(size: Size) -> str:
    return f"{size[0]}x{size[1]}"
