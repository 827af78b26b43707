"""Cutting and joining, and colours per patch held against an independent computation."""

import numpy as np
import pytest
import torch

from mpp.patches import class_colors, color_classes, color_levels, grid_of, to_images, to_patches


def pictures(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("patch", [(4, 4), (8, 16)])
@pytest.mark.parametrize("channels", [1, 3, 4, 5])
def test_patches_join_to_the_picture_they_came_from(patch, channels):
    images = pictures(2, channels, 48, 80)
    patches = to_patches(images, patch)
    grid = grid_of((48, 80), patch)
    assert patches.shape == (2, grid[0] * grid[1], patch[0] * patch[1] * channels)
    assert torch.equal(to_images(patches, grid, patch), images)


def test_patches_lie_row_by_row():
    images = torch.zeros(1, 1, 8, 12, dtype=torch.uint8)
    images[0, 0, 0:4, 8:12] = 1
    assert to_patches(images, (4, 4)).any(-1)[0].tolist() == [False, False, True, False, False, False]


def numpy_classes(images: np.ndarray, patch: int, bits: int) -> np.ndarray:
    """A second way: floating-point means in float64, loops, and the paper's formula as it is written."""
    batch, channels, height, width = images.shape
    out = []
    for image in images:
        for top in range(0, height, patch):
            for left in range(0, width, patch):
                number = 0
                for c in range(channels):
                    mean = image[c, top : top + patch, left : left + patch].astype(np.float64).mean()
                    level = min(max(int(np.floor(mean * 2**bits / 256)), 0), 2**bits - 1)
                    number += level * (2**bits) ** c
                out.append(number)
    return np.array(out).reshape(batch, -1)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_labels_equal_an_independent_computation_on_1000_patches(bits):
    images = pictures(10, 3, 40, 40, seed=bits)
    # Random noise has means near 128 only: scale pictures so that every level occurs.
    scale = torch.linspace(0, 2, 10)[:, None, None, None]
    images = (images * scale).clamp(0, 255).to(torch.uint8)
    classes = color_classes(color_levels(images, (4, 4), bits), bits)[..., 0]
    assert classes.numel() == 1000
    assert np.array_equal(classes.numpy(), numpy_classes(images.numpy(), 4, bits))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_values_on_a_bin_edge_belong_to_the_upper_bin(bits):
    width = 256 // 2**bits
    values = sorted({v for edge in range(0, 257, width) for v in (edge - 1, edge, edge + 1) if 0 <= v <= 255})
    images = torch.stack([torch.full((3, 4, 4), v, dtype=torch.uint8) for v in values])
    levels = color_levels(images, (4, 4), bits)[:, 0, 0, 0]
    assert levels.tolist() == [v // width for v in values]
    assert (
        color_classes(color_levels(images, (4, 4), bits), bits)[:, 0, 0].tolist()
        == numpy_classes(images.numpy(), 4, bits)[:, 0].tolist()
    )


def test_a_mean_of_exactly_128_is_level_4_and_a_hair_less_is_3():
    exact, under = (
        torch.full((1, 1, 4, 4), 128, dtype=torch.uint8),
        torch.full((1, 1, 4, 4), 128, dtype=torch.uint8),
    )
    exact[0, 0, 0, 0], exact[0, 0, 0, 1] = 0, 255  # 127 less, 127 more ...
    exact[0, 0, 1, 1] = 129  # ... and one more: the mean is 128 exactly
    under[0, 0, 0, 0] = 127
    assert color_levels(exact, (4, 4), 3).item() == 4
    assert color_levels(under, (4, 4), 3).item() == 3


def test_channel_0_is_least_significant():
    image = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    image[0, 0] = 255
    assert color_classes(color_levels(image, (4, 4), 3), 3).item() == 7
    image[0, 2] = 255
    assert color_classes(color_levels(image, (4, 4), 3), 3).item() == 7 + 7 * 64


@pytest.mark.parametrize("patch", [4, 8, 14, 16, 2])
def test_cells_are_those_of_adaptive_average_pooling(patch):
    images = pictures(2, 3, 2 * patch, 3 * patch)
    levels = color_levels(images, (patch, patch), 8, (4, 4))  # 8 bits: the level is the floor of the mean
    blocks = to_patches(images, (patch, patch)).double().unflatten(-1, (patch, patch, 3)).permute(0, 1, 4, 2, 3)
    expected = torch.nn.functional.adaptive_avg_pool2d(blocks.flatten(0, 1), 4)
    expected = (expected + 1e-9).floor().unflatten(0, levels.shape[:2]).flatten(-2).transpose(-1, -2).long()
    assert torch.equal(levels, expected)


def test_colors_of_classes_lie_in_their_own_bin():
    classes = torch.arange(512)
    colors = class_colors(classes, 3, 3)
    images = (colors * 255).round().to(torch.uint8)[:, :, None, None].expand(-1, -1, 4, 4)
    assert torch.equal(color_classes(color_levels(images, (4, 4), 3), 3)[:, 0, 0], classes)


def test_normalised_pixels_are_refused():
    with pytest.raises(ValueError, match="raw uint8"):
        color_levels(torch.randn(1, 3, 8, 8), (4, 4), 3)


def test_a_patch_that_does_not_divide_is_refused_with_a_size_that_would_do():
    with pytest.raises(ValueError, match=r"16x16 does not divide the image size 100x90; .* 96x96"):
        grid_of((100, 90), (16, 16))
