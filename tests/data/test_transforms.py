"""Views: right sizes from any picture, chance from the given numbers only, nothing lost at the edges."""

import random
from typing import get_args

import numpy as np
import pytest
import torch
import torchvision.transforms as torchvision
from PIL import Image
from timm.data.auto_augment import rand_augment_transform

from mpp.config import RecipeError, dump_recipe, load_recipe
from mpp.data.loader import Pictures, TrainingViews, training_batches
from mpp.data.order import Order, Share
from mpp.data.sources import Subset
from mpp.data.transforms import (
    Augment,
    CenterCrop,
    Crop,
    RandomResizedCrop,
    ShiftedCrop,
    fixed_view,
    generators_from,
    rand_augment_faults,
    resize,
)

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
    # Noise, not stripes: sampling stripes of an even period at their middle gives grey without any filter.
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 64, 64), dtype=np.uint8))
    for interpolation, filter in (("bicubic", Image.Resampling.BICUBIC), ("bilinear", Image.Resampling.BILINEAR)):
        small = resize(noise, (8, 8), interpolation)[0].int()
        pillow = np.asarray(Image.fromarray(noise[0].numpy()).resize((8, 8), filter)).astype(int)
        assert (small - torch.from_numpy(pillow)).abs().max() <= 2


def test_ranges_written_backwards_are_refused():
    assert [path for path, _ in RandomResizedCrop(scale=(0.9, 0.1)).faults()] == ["scale"]


MAE = "rand-m9-mstd0.5-inc1"
FULL = Augment(rand_augment=MAE, color_jitter=0.4, random_erasing=0.5)
OPTIONS = [
    Augment(crop=CenterCrop(), horizontal_flip=False, **option)
    for option in ({"rand_augment": MAE}, {"color_jitter": (0.4, 0.4, 0.4, 0.1)}, {"random_erasing": 0.5})
]


def drawn(augment, count, seed=0):
    return augment.draws(seed, torch.zeros(count, dtype=torch.int64), torch.arange(count))


class Photographs:
    """24 pictures of noise in four sizes."""

    classes, description = None, "noise"

    def __len__(self):
        return 24

    def read(self, ids):
        return [np.random.default_rng(int(id)).integers(0, 256, (12 + id % 4, 14, 3), dtype=np.uint8) for id in ids]

    def labels(self):
        return None

    def name(self, id):
        return str(id)


def batches(workers=0, first=0, micro=8):
    views = TrainingViews(Pictures(Subset(Photographs()), 3, None), Order(24, seed=3), FULL, (16, 16))
    return list(training_batches(views, Share(8, micro), first, 6, workers))


def by_place(read):
    return {
        (int(epoch), int(id)): image
        for batch in read
        for epoch, id, image in zip(batch["epoch"], batch["id"], batch["image"], strict=True)
    }


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_augmented_views_do_not_depend_on_workers_batches_or_a_resume():
    whole = by_place(batches())
    assert len(whole) == 48
    assert equal(whole, by_place(batches(workers=2)))
    assert equal(whole, by_place(batches(micro=2)))
    late = by_place(batches(first=4))
    assert len(late) == 16 and equal(late, {key: whole[key] for key in late})
    assert not any(torch.equal(whole[0, id], whole[1, id]) for id in range(24))  # another epoch, another view


def test_augmented_views_do_not_depend_on_the_order_of_reading_nor_on_global_seeds():
    image, rows = picture(24, 24), drawn(FULL, 12)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    forth = [FULL(image, (16, 16), row) for row in rows]
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    back = [FULL(image, (16, 16), row) for row in reversed(rows)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forth, back, strict=True))
    assert len({view.numpy().tobytes() for view in forth}) == 12


def states():
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def test_the_generators_of_everybody_else_go_on_as_if_nothing_had_been():
    random.gauss(0, 1), np.random.normal()  # both now hold a second number back
    before = states()
    for row in drawn(FULL, 5):
        FULL(picture(20, 20), (16, 16), row)
    assert states() == before
    with pytest.raises(KeyError), generators_from(0.3):
        torch.rand(3), random.random(), np.random.rand()
        raise KeyError
    assert states() == before


def test_generators_start_from_the_whole_draw():
    def numbers(draw):
        with generators_from(draw):
            return random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))

    assert numbers(0.25) == numbers(0.25)
    for other in (0.5, 0.25 + 2**-53, 0.25 + 2**-20):
        assert all(a != b for a, b in zip(numbers(0.25), numbers(other), strict=True))


def test_switching_an_option_on_changes_nothing_in_the_others():
    image = picture(40, 40)
    plain = Augment(random_erasing=0.5)
    assert [row[: len(drawn(Augment(), 1)[0])] for row in drawn(FULL, 8)] == drawn(Augment(), 8)
    for a, b in zip(drawn(FULL, 20), drawn(plain, 20), strict=True):
        assert a == b
        untouched = (plain(image, (32, 32), b) == Augment()(image, (32, 32), b)).all(0)
        erased = (FULL(image, (32, 32), a) == plain(image, (32, 32), b)).all(0)
        assert erased[~untouched].all()  # the same rectangle with the same noise in it


def test_the_draws_of_every_option_depend_on_seed_epoch_and_id():
    def last(seed, epoch, id):
        return tuple(FULL.draws(seed, torch.tensor([epoch]), torch.tensor([id]))[0][-3:])

    rows = [last(0, 0, 0), last(1, 0, 0), last(0, 1, 0), last(0, 0, 1)]
    assert last(0, 0, 0) == rows[0] and len({draw for row in rows for draw in row}) == 12


@pytest.mark.parametrize("augment", OPTIONS)
def test_every_option_does_something_to_some_view_and_keeps_shape_and_dtype(augment):
    image = picture(32, 32)
    views = [augment(image, (32, 32), row) for row in drawn(augment, 20)]
    assert all(view.shape == (3, 32, 32) and view.dtype == torch.uint8 for view in views)
    assert sum(not torch.equal(view, image) for view in views) > 5


def test_rand_augment_is_timms():
    augment, image = OPTIONS[0], picture(32, 32)
    theirs = rand_augment_transform(MAE, {"img_mean": (128, 128, 128), "interpolation": Image.Resampling.BICUBIC})
    for row in drawn(augment, 30):
        with generators_from(row[2]):
            try:
                right = np.array(theirs(Image.fromarray(image.permute(1, 2, 0).numpy())))
            except ValueError as error:  # timm's posterize to no bits, which Pillow 13 refuses
                assert "bits" in str(error)
                continue
        assert np.array_equal(augment(image, (32, 32), row).permute(1, 2, 0).numpy(), right)


@pytest.mark.parametrize("text", ["rand-m10-n15-p1.0-inc1", "rand-m0-n15-p1.0", "rand-m30-mmax30-n5-tweights-p1"])
def test_the_strongest_and_the_weakest_rand_augment_run(text):
    augment = Augment(rand_augment=text)
    for row in drawn(augment, 10):
        assert augment(picture(16, 16), (16, 16), row).dtype == torch.uint8


def test_erasing_leaves_the_rest_to_the_last_bit_and_fills_rectangles_with_noise():
    augment, image = OPTIONS[2], torch.full((3, 64, 64), 10, dtype=torch.uint8)
    changed = [augment(image, (64, 64), row) for row in drawn(augment, 400)]
    masks = [(view != 10).any(0) for view in changed]
    erased = [(view, mask) for view, mask in zip(changed, masks, strict=True) if mask.any()]
    assert len(erased) == pytest.approx(200, abs=40)
    areas, noise = [], []
    for view, mask in erased:
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        box = view[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        areas.append(box[0].numel() / 64**2)
        noise.append(box.flatten())
        assert (view.sum() - box.sum()) == 10 * (view.numel() - box.numel())
    assert min(areas) > 0.015 and max(areas) < 0.35 and np.mean(areas) == pytest.approx(0.177, abs=0.03)
    values = torch.cat(noise).double()
    right = (127.5 + 63.75 * torch.randn(10**6, generator=torch.Generator().manual_seed(0))).clamp(0, 255).double()
    assert values.mean() == pytest.approx(right.mean().item(), abs=1) and values.std() == pytest.approx(
        right.std().item(), abs=1
    )


def test_colour_jitter_stays_within_its_strength():
    augment = Augment(crop=CenterCrop(), horizontal_flip=False, color_jitter=(0.4, 0.0, 0.0))
    grey = torch.full((3, 8, 8), 100, dtype=torch.uint8)
    levels = torch.tensor([augment(grey, (8, 8), row)[0, 0, 0].item() for row in drawn(augment, 300)])
    assert levels.min() == pytest.approx(60, abs=2) and levels.max() == pytest.approx(140, abs=2)


def test_options_that_need_colours_are_refused_by_name_for_other_channels():
    for channels, augment, name in (
        (1, Augment(rand_augment=MAE), "augment.rand_augment works on RGB.*channels is 1"),
        (4, Augment(rand_augment=MAE), "augment.rand_augment"),
        (5, Augment(color_jitter=0.4), "augment.color_jitter"),
    ):
        with pytest.raises(ValueError, match=name):
            augment.check_channels(channels)
    FULL.check_channels(3)
    Augment(color_jitter=0.4, random_erasing=0.5).check_channels(1)
    Augment(random_erasing=0.5).check_channels(5)


@pytest.mark.parametrize("text", [MAE, "rand", "rand-m7-n3-p0.5-t3aw", "rand-mstd101-mmax30-m20", "rand-p1-tweights"])
def test_a_rand_augment_text_that_timm_reads_has_no_fault(text):
    assert not list(rand_augment_faults(text))
    rand_augment_transform(text, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m9-mstd0.5", "expected 'rand'"),
        ("rand-m9-increase", "'increase'"),  # timm skips it
        ("rand-tstrong", "'tstrong'"),  # timm takes another set
        ("rand-m9.5", "'m9.5'"),
        ("rand-p1.5", "'p1.5'"),
        ("rand-n0", "'n0'"),
        ("rand-w0", "'w0'"),
        ("rand-m9-", "''"),
        ("rand-m9-m8", "'m' twice"),
        ("rand-m15", "over the largest, 10"),  # timm lowers it
    ],
)
def test_a_rand_augment_text_that_timm_would_misread_is_a_fault(text, message):
    assert [path for path, _ in Augment(rand_augment=text).faults()] == ["rand_augment"]
    assert message in next(rand_augment_faults(text))


@pytest.mark.parametrize("jitter", ["0.4", "[0.4, 0.4, 0.4]", "[0.4, 0.2, 0.4, 0.1]", "null"])
def test_a_recipe_can_say_it_all(tmp_path, jitter):
    augment = load_recipe(Augment, [f"--rand_augment={MAE}", f"--color_jitter={jitter}", "--random_erasing=0.25"])
    recipe = tmp_path / "r.yaml"
    recipe.write_text(dump_recipe(augment))
    assert load_recipe(Augment, [str(recipe)]) == augment and augment.random_erasing == 0.25


@pytest.mark.parametrize("word", ["--color_jitter=[0.4, 0.4]", "--color_jitter=-1", "--color_jitter=[0, 0, 0, 0.6]",
                                  "--random_erasing=1.5", "--rand_augment=m9"])  # fmt: skip
def test_a_recipe_with_impossible_augmentation_is_refused(word):
    with pytest.raises(RecipeError, match=word[2:].partition("=")[0]):
        load_recipe(Augment, [word])
