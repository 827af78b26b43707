"""Positions on another grid: as scipy's and timm's, prefix untouched, grids not counts, every size exact."""

import warnings

import numpy as np
import pytest
import timm
import torch
from scipy.ndimage import zoom
from timm.layers.pos_embed import resample_abs_pos_embed

from mpp.architectures import Timm
from mpp.backbones import build_backbone
from mpp.positions import MODES, prefix_tokens, resample, stated_grid, to_grid

GRIDS = [
    ((4, 4), (6, 6)),
    ((14, 14), (24, 24)),
    ((14, 14), (86, 86)),
    ((3, 5), (7, 4)),
    ((2, 8), (4, 4)),
    ((1, 6), (5, 2)),
    ((6, 5), (1, 1)),
    ((9, 4), (1, 7)),
    ((16, 12), (5, 9)),
]


def positions_of(grid, prefix, width=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, prefix + grid[0] * grid[1], width, generator=generator).to(dtype)


@pytest.mark.parametrize(("old", "new"), GRIDS)
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_bilinear_corners_is_the_paper_s_zoom(old, new, prefix):
    positions = positions_of(old, prefix)
    ours = resample(positions, old, new, prefix, "bilinear-corners")
    grid = positions[0, prefix:].numpy().reshape(*old, 3)
    theirs = zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1, mode="nearest")
    assert theirs.shape == (*new, 3)
    assert np.abs(ours[0, prefix:].numpy().reshape(*new, 3) - theirs).max() < 1e-5
    assert torch.equal(ours[:, :prefix], positions[:, :prefix])


@pytest.mark.parametrize(("old", "new"), GRIDS)
@pytest.mark.parametrize("antialias", [True, False])
def test_bicubic_is_timm_s_with_and_without_antialias(old, new, antialias):
    positions = positions_of(old, 2)
    ours = resample(positions, old, new, 2, "bicubic-antialias" if antialias else "bicubic")
    theirs = resample_abs_pos_embed(positions, new, old, num_prefix_tokens=2, antialias=antialias)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("how", MODES)
def test_every_size_from_16_to_2048_gives_its_exact_grid(how):
    """Also where size / patch * old / old would round down: the target is a size, never a factor."""
    positions = {prefix: positions_of((14, 14), prefix, width=1) for prefix in (0, 1)}
    for patch in (8, 14, 16, 32):
        for size in range(patch, 2049, patch):
            if size >= 16:
                new, prefix = (size // patch, 3), (size // patch) % 2
                assert resample(positions[prefix], (14, 14), new, prefix, how).shape == (1, prefix + new[0] * 3, 1)


@pytest.mark.parametrize("how", MODES)
def test_a_square_target_is_exact_up_to_large_grids(how):
    positions = positions_of((14, 14), 1, width=1)
    for side in (*range(1, 40), 127, 128, 146):
        assert resample(positions, (14, 14), (side, side), 1, how).shape[1] == 1 + side**2


def test_the_same_grid_is_the_same_tensor_and_another_grid_of_the_same_count_is_not():
    positions = positions_of((2, 8), 1)
    assert resample(positions, (2, 8), (2, 8), 1, "bicubic") is positions
    for how in MODES:
        moved = resample(positions, (2, 8), (4, 4), 1, how)
        assert moved.shape == positions.shape and not torch.allclose(moved, positions)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_stays_and_the_arithmetic_is_float32(dtype):
    positions = positions_of((4, 4), 1, dtype=dtype)
    moved = resample(positions, (4, 4), (6, 3), 1, "bilinear-corners")
    assert moved.dtype == dtype and torch.equal(moved[:, 0], positions[:, 0])
    exact = resample(positions.float(), (4, 4), (6, 3), 1, "bilinear-corners").to(dtype)
    assert torch.equal(moved[:, 1:], exact[:, 1:])


def test_a_wrong_grid_or_prefix_is_refused():
    with pytest.raises(ValueError, match="17 positions are not 0 prefix tokens and a grid of 4x4"):
        resample(positions_of((4, 4), 1), (4, 4), (6, 6), 0, "bicubic")


@pytest.mark.parametrize(
    ("tokens", "grid", "stated", "expected"),
    [
        (197, None, None, (1, (14, 14))),
        (196, None, None, (0, (14, 14))),
        (198, None, 2, (2, (14, 14))),
        (201, None, None, (5, (14, 14))),
        (17, (2, 8), None, (1, (2, 8))),
        (20, (2, 8), 4, (4, (2, 8))),
        (5, None, 1, (1, (2, 2))),
    ],
)
def test_what_is_stated_wins_and_the_rest_is_found(tokens, grid, stated, expected):
    assert prefix_tokens(tokens, grid, stated) == expected


@pytest.mark.parametrize(
    ("tokens", "grid", "stated", "message"),
    [
        (5, None, None, "1 \\+ 2x2, 4 \\+ 1x1: more than one"),
        (9, None, None, "0 \\+ 3x3, 5 \\+ 2x2"),
        (207, None, None, "207 positions are not 0 to 5 prefix tokens and a square grid"),
        (197, None, 0, "not 0 prefix tokens and a square grid"),
        (197, (14, 14), 0, "not 0 prefix tokens and a grid of 14x14"),
        (30, (4, 4), None, "not 0 to 5 prefix tokens and a grid of 4x4"),
        (1, None, 1, "1 positions"),
    ],
)
def test_ambiguous_and_impossible_counts_are_refused_with_the_candidates(tokens, grid, stated, message):
    with pytest.raises(ValueError, match=message):
        prefix_tokens(tokens, grid, stated)


def test_a_file_that_states_no_grid_is_square_or_as_the_model_and_never_guessed_between_the_two():
    assert stated_grid(17, 1, (4, 4)) == (4, 4)
    assert stated_grid(16, 1, (3, 5)) == (3, 5)
    assert stated_grid(37, 1, (4, 4)) == (6, 6)
    with pytest.raises(ValueError, match="1 \\+ 2x8 or \\+ 4x4"):
        stated_grid(17, 1, (2, 8))
    with pytest.raises(ValueError, match="16 positions are not 1 prefix tokens and a square grid"):
        stated_grid(16, 1, (4, 4))


def beit(image_size):
    arguments = {"depth": 1, "embed_dim": 12, "num_heads": 2}
    return build_backbone(Timm(name="beit_base_patch16_224", image_size=image_size, arguments=arguments), 3, 1)


def test_relative_position_bias_follows_timm_from_a_square_window():
    small, large = beit(64), beit((96, 48))
    torch.nn.init.normal_(small.model.blocks[0].attn.relative_position_bias_table)
    tensors = small.model.state_dict()
    moved, done = to_grid(large.model, tensors, small.grid, large.grid, "bilinear-corners")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = timm.models.beit.checkpoint_filter_fn(tensors, large.model)
    name = "blocks.0.attn.relative_position_bias_table"
    assert torch.equal(moved[name], theirs[name]) and done == ["relative position bias by timm's rule"]
    assert not torch.equal(moved[name][:9], tensors[name][:9])


def test_relative_position_bias_of_a_turned_window_has_the_same_shape_and_is_turned():
    """2x8 and 8x2: tables of one size. A bias that depends on rows alone must depend on rows alone afterwards."""
    wide, tall = beit((32, 128)), beit((128, 32))
    name = "blocks.0.attn.relative_position_bias_table"
    table = torch.zeros_like(wide.model.state_dict()[name])
    table[:-3] = torch.arange(-1.0, 2)[:, None].expand(3, 15).reshape(-1, 1)  # offsets of rows -1 .. 1, columns -7 .. 7
    table[-3:] = 7.0
    moved, _ = to_grid(tall.model, {name: table}, wide.grid, tall.grid, "bicubic")
    assert moved[name].shape == table.shape and not torch.equal(moved[name], table)
    turned = moved[name][:-3].reshape(15, 3, 2)
    assert torch.allclose(turned, turned[:, :1]) and turned[7, 0, 0] == 0
    assert torch.equal(moved[name][-3:], table[-3:])
