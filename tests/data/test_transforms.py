"""Views: right sizes from any picture, chance from the given numbers only, nothing lost at the edges."""

from typing import get_args

import pytest
import torch
import torchvision.transforms as torchvision

from mpp.data.transforms import Augment, CenterCrop, Crop, RandomResizedCrop, ShiftedCrop, fixed_view, resize

CROPS = get_args(get_args(Crop)[0])
IDS = torch.arange(64)


def picture(height, width, channels=3):
    return torch.randint(
        0, 256, (channels, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


@pytest.mark.parametrize("kind", CROPS)
@pytest.mark.parametrize("shape", [(32, 32), (48, 80), (100, 37), (1, 1), (1, 1500), (2, 3000), (3, 5)])
@pytest.mark.parametrize("size", [(32, 32), (48, 80)])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_every_picture_gives_a_view_of_the_right_size(kind, shape, size, channels):
    augment = Augment(crop=kind(), vertical_flip=True)
    for draws in augment.draws(0, torch.zeros_like(IDS[:4]), IDS[:4]):
        view = augment(picture(*shape, channels), size, draws)
        assert view.shape == (channels, *size) and view.dtype == torch.uint8


@pytest.mark.parametrize("kind", CROPS)
def test_views_depend_on_seed_epoch_and_id_alone(kind):
    augment, image = Augment(crop=kind()), picture(40, 40)
    zero = torch.zeros_like(IDS)
    together = augment.draws(1, zero, IDS)
    assert together[9] == augment.draws(1, zero[:1], IDS[9:10])[0]
    assert together[9] != augment.draws(1, zero[:1] + 1, IDS[9:10])[0]
    assert together[9] != augment.draws(2, zero[:1], IDS[9:10])[0]
    assert torch.equal(augment(image, (32, 32), together[9]), augment(image, (32, 32), together[9]))


def test_crops_cover_the_stated_areas_and_shapes():
    crop = RandomResizedCrop()
    draws = Augment(crop=crop).draws(0, torch.zeros(3000, dtype=torch.int64), torch.arange(3000))
    boxes = torch.tensor([crop.box(300, 400, d[:-2]) for d in draws]).double()
    top, left, height, width = boxes.T
    area, shape = height * width / 120_000, width / height
    torch.manual_seed(0)
    blank = torch.empty(1, 300, 400)
    theirs = [torchvision.RandomResizedCrop.get_params(blank, [0.05, 1.0], [3 / 4, 4 / 3]) for _ in range(3000)]
    their_area = torch.tensor([h * w / 120_000 for _, _, h, w in theirs], dtype=torch.float64)
    assert 0.045 < area.min() < 0.06 and area.max() > 0.9
    assert area.mean() == pytest.approx(their_area.mean().item(), abs=0.02) and area.std() == pytest.approx(
        their_area.std().item(), abs=0.02
    )
    assert shape.min() > 0.73 and shape.max() < 1.36 and (shape < 1).double().mean() == pytest.approx(0.41, abs=0.03)
    assert (top >= 0).all() and (left >= 0).all() and (top + height <= 300).all() and (left + width <= 400).all()
    assert ((left + width == 400) | (left == 0)).double().mean() < 0.1


def test_a_picture_too_long_for_the_aspect_ratios_gives_its_centre():
    crop = RandomResizedCrop(scale=(1.0, 1.0))
    assert crop.box(10, 1000, [0.5] * crop.num_draws) == (0, 493, 10, 13)


def test_half_of_the_views_are_mirrored():
    augment = Augment(crop=CenterCrop(), vertical_flip=True)
    image = picture(8, 8)
    views = [
        augment(image, (8, 8), d) for d in augment.draws(0, torch.zeros(2000, dtype=torch.int64), torch.arange(2000))
    ]
    kinds = [image, image.flip(2), image.flip(1), image.flip(1, 2)]
    counts = [sum(torch.equal(view, kind) for view in views) for kind in kinds]
    assert sum(counts) == 2000 and min(counts) > 430


def test_shifts_move_by_whole_pixels_and_reflect_at_the_edge():
    image = torch.arange(6, dtype=torch.uint8).expand(1, 6, 6)
    crop = ShiftedCrop(padding=2)
    rows = {tuple(crop(image, (6, 6), [0.5, d], "bicubic")[0, 0].tolist()) for d in (0.0, 0.3, 0.5, 0.7, 0.999)}
    assert rows == {
        (2, 1, 0, 1, 2, 3),
        (1, 0, 1, 2, 3, 4),
        (0, 1, 2, 3, 4, 5),
        (1, 2, 3, 4, 5, 4),
        (2, 3, 4, 5, 4, 3),
    }


def test_the_fixed_view_is_the_centre_and_leaves_a_fitting_picture_alone():
    image = picture(32, 32)
    assert fixed_view(image, (32, 32)) is image
    wide = torch.zeros(1, 10, 30, dtype=torch.uint8)
    wide[:, :, 10:20] = 200
    assert (fixed_view(wide, (10, 10)) == 200).all()
    assert (fixed_view(wide, (20, 20)).float() - 200).abs().max() <= 1


def test_shrinking_is_antialiased():
    stripes = torch.zeros(1, 64, 64, dtype=torch.uint8)
    stripes[:, :, ::2] = 255
    for interpolation in ("bicubic", "bilinear"):
        small = resize(stripes, (8, 8), interpolation).float()
        assert small.std() < 8 and small.mean() == pytest.approx(127.5, abs=3)


def test_ranges_written_backwards_are_refused():
    assert [path for path, _ in RandomResizedCrop(scale=(0.9, 0.1)).faults()] == ["scale"]
