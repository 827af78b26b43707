"""Position embeddings on another grid: 2-D resampling, prefix tokens untouched (METHOD.md 2)."""

import warnings
from math import isqrt
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mpp.patches import Size

Resampling = Literal["bilinear-corners", "bicubic", "bicubic-antialias"]

# bilinear-corners: the paper's code, scipy.ndimage.zoom(order=1); bicubic: MAE and BEiT; bicubic-antialias: timm.
MODES: dict[Resampling, dict[str, Any]] = {
    "bilinear-corners": {"mode": "bilinear", "align_corners": True},
    "bicubic": {"mode": "bicubic", "align_corners": False},
    "bicubic-antialias": {"mode": "bicubic", "align_corners": False, "antialias": True},
}
BIAS_TABLE = "relative_position_bias_table"
MOST_PREFIX_TOKENS = 5  # a class token and four registers


def resample(positions: Tensor, old: Size, new: Size, num_prefix_tokens: int, how: Resampling) -> Tensor:
    """(1, P + h*w, D) on the old grid -> (1, P + h'*w', D) on the new one, grids as (rows, columns).

    Computed in float32 and returned in the dtype that came; the P prefix tokens stay bit for bit, and so does
    everything where the grid stays. ValueError if the positions are not those of the old grid.
    """
    prefix_tokens(positions.shape[1], old, num_prefix_tokens)
    if old == new:  # grids, not counts: 2x8 is not 4x4
        return positions
    prefix, patches = positions[:, :num_prefix_tokens], positions[:, num_prefix_tokens:]
    image = patches.float().unflatten(1, old).permute(0, 3, 1, 2)
    moved = F.interpolate(image, size=new, **MODES[how])
    return torch.cat([prefix, moved.permute(0, 2, 3, 1).flatten(1, 2).to(positions.dtype)], 1)


def prefix_tokens(tokens: int, grid: Size | None, stated: int | None) -> tuple[int, Size]:
    """How `tokens` positions divide into prefix tokens and a grid: (prefix, (rows, columns)).

    What is known is believed and must agree. Without a grid the patches must form a square; without a stated number
    of prefix tokens 0 to 5 are tried. ValueError, with the candidates, if none fits or more than one.
    """
    counts = range(MOST_PREFIX_TOKENS + 1) if stated is None else [stated]
    found = [(n, grid or _square(tokens - n)) for n in counts if _fits(tokens - n, grid)]
    if len(found) == 1:
        return found[0]
    told = ", ".join(f"{n} + {h}x{w}" for n, (h, w) in found)
    expected = f"{'0 to 5' if stated is None else stated} prefix tokens and "
    expected += f"a grid of {grid[0]}x{grid[1]}" if grid else "a square grid"
    raise ValueError(
        f"{tokens} positions can be {told}: more than one reading; name a folder with a config.json that says which"
        if found
        else f"{tokens} positions are not {expected}; name the weights' own image size, or a folder with a config.json"
    )


def stated_grid(tokens: int, num_prefix_tokens: int, own: Size) -> Size:
    """The grid of a file that states none, for a model whose own grid is known: that one, or a square.

    ValueError if both are possible: 16 patches are 2x8 as well as 4x4.
    """
    patches = tokens - num_prefix_tokens
    square = _fits(patches, None)
    if not _fits(patches, own):
        return prefix_tokens(tokens, None, num_prefix_tokens)[1]
    if square and _square(patches) != own:
        side = _square(patches)[0]
        raise ValueError(
            f"{tokens} positions can be {num_prefix_tokens} + {own[0]}x{own[1]} or + {side}x{side}, and the "
            f"file does not say; name a folder with a config.json"
        )
    return own


def to_grid(
    model: Any, tensors: dict[str, Tensor], old: Size, new: Size, how: Resampling
) -> tuple[dict[str, Tensor], list[str]]:
    """Every tensor that belongs to the old grid on the new one, which is the model's; and what was done, in words.

    Absolute positions by `how`. Tables of relative position bias by timm's own rule, made for them: rows and columns
    of a table are offsets, and near ones must stay near. Rotary positions have no tensors on the grid.
    """
    if old == new:
        return tensors, []
    moved, done = dict(tensors), []
    if "pos_embed" in tensors:
        prefix = model.pos_embed.shape[1] - new[0] * new[1]
        moved["pos_embed"] = resample(tensors["pos_embed"], old, new, prefix, how)
        done.append(f"positions by {how}")
    tables = [name for name in tensors if name.endswith(BIAS_TABLE)]
    for name in tables:
        moved[name] = _resample_bias(model.get_submodule(name.rpartition(".")[0]), tensors[name], old)
    return moved, done + (["relative position bias by timm's rule"] if tables else [])


def _resample_bias(module: Any, table: Tensor, old: Size) -> Tensor:
    """A table (offsets, heads) on the module's own window. `old` is stated: 2x8 and 8x2 have tables of one shape."""
    from timm.layers.pos_embed_rel import resize_rel_pos_bias_table

    shape = module.relative_position_bias_table.shape
    # timm 1.0.20 takes every window for a square one, and does not know the argument.
    stated = {} if old[0] == old[1] else {"old_window_size": old}
    try:
        with warnings.catch_warnings():
            # timm indexes with lists where torch wants tuples; test_positions.py holds the values.
            warnings.filterwarnings("ignore", category=UserWarning, module=r"timm\.layers\.interpolate")
            return resize_rel_pos_bias_table(table, module.window_size, shape, **stated)
    except TypeError:
        raise ValueError(
            f"this version of timm resamples relative position bias of squares only, and this one is of "
            f"{old[0]}x{old[1]} patches; update timm"
        ) from None


def _fits(patches: int, grid: Size | None) -> bool:
    return patches > 0 and (patches == grid[0] * grid[1] if grid else isqrt(patches) ** 2 == patches)


def _square(patches: int) -> Size:
    return isqrt(patches), isqrt(patches)
