"""Mixing and smoothing: images and labels by the same share, drawn from (seed, epoch, id), equal to a hand's sums."""

import numpy as np
import pytest
import scipy.stats
import torch
from timm.data.mixup import Mixup, mixup_target, rand_bbox

from mpp.config import RecipeError, load_recipe
from mpp.mixing import Mix, beta, soft_targets

SIZE = (12, 16)


def batch(count, size=SIZE, seed=0):
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8, generator=random)
    return images, torch.arange(count) % 4, torch.zeros(count, dtype=torch.int64), torch.arange(count) + 100


def kept(mix, count, size=SIZE, seed=0, epoch=0):
    return mix.kept(seed, torch.full((count,), epoch), torch.arange(count), *size)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_smoothed_targets_are_timms(smoothing):
    labels = torch.tensor([0, 3, 1])
    assert torch.allclose(soft_targets(labels, 5, smoothing), mixup_target(labels, 5, 1.0, smoothing), atol=1e-7)
    assert soft_targets(labels, 5, smoothing).dtype == torch.float32


def test_a_smoothed_target_by_hand():
    assert soft_targets(torch.tensor([1]), 4, 0.2).tolist() == [pytest.approx([0.05, 0.85, 0.05, 0.05])]


@pytest.mark.parametrize("mix", [Mix(), Mix(cutmix=0), Mix(mixup=0), Mix(probability=0.5)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("count", [2, 7])
def test_images_and_targets_are_mixed_by_hand(mix, dtype, count):
    images, labels, epochs, ids = batch(count)
    mixed, targets = mix(images.to(dtype), labels, epochs, ids, 5, 4, 0.1)
    share = mix.kept(5, epochs, ids, *SIZE).numpy()
    pixels, one_hot = images.numpy().astype(float), np.eye(4)[labels.numpy()] * 0.9 + 0.025
    for i in range(count):
        other = (i + 1) % count
        right = share[i] * pixels[i] + (1 - share[i]) * pixels[other]
        assert np.abs(mixed[i].numpy() - right).max() < 1e-3
        lam = share[i].mean()
        assert np.abs(targets[i].numpy() - (lam * one_hot[i] + (1 - lam) * one_hot[other])).max() < 1e-6
    assert mixed.dtype == targets.dtype == torch.float32 and mixed.min() >= 0 and mixed.max() <= 255
    assert torch.allclose(targets.sum(1), torch.ones(count))


def test_cutmix_pixels_are_one_image_or_the_other_to_the_last_bit_and_the_label_goes_by_their_number():
    images, labels, epochs, ids = batch(40)
    mixed, targets = Mix(mixup=0)(images, labels, epochs, ids, 0, 40, 0.0)
    own, other = images.float(), images.float().roll(-1, 0)
    labels = torch.arange(40)
    _, targets = Mix(mixup=0)(images, labels, epochs, ids, 0, 40, 0.0)
    assert ((mixed == own) | (mixed == other)).all()
    pasted = (mixed != own).any(1).double().mean((1, 2))  # two random pixels of three bytes hardly ever agree
    assert torch.allclose(targets[labels, (labels + 1) % 40].double(), pasted, atol=1e-6)
    assert pasted.min() < 0.05 and pasted.max() > 0.6


def test_the_images_given_are_left_as_they_were():
    images, *rest = batch(4)
    before = images.float()
    Mix()(before, *rest, 0, 4, 0.0)
    assert torch.equal(before, images.float())


def test_chance_is_a_function_of_seed_epoch_and_id():
    mix = Mix()
    assert torch.equal(kept(mix, 20)[7:9], mix.kept(0, torch.zeros(2).long(), torch.tensor([7, 8]), *SIZE))
    assert not torch.equal(kept(mix, 20), kept(mix, 20, epoch=1)) and not torch.equal(
        kept(mix, 20), kept(mix, 20, seed=1)
    )
    assert len({share.numpy().tobytes() for share in kept(mix, 20)}) == 20


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.4, 0.8, 1.0, 1.5, 2.0, 10.0, 100.0])
def test_beta_is_scipys_inverse(alpha):
    draws = torch.linspace(0, 1, 4001, dtype=torch.float64)[1:-1]
    assert np.abs(beta(alpha, draws).numpy() - scipy.stats.beta.ppf(draws.numpy(), alpha, alpha)).max() < 1e-6
    tails = torch.tensor([0.0, 1e-16, 1e-9, 1 - 2**-53], dtype=torch.float64)
    assert np.abs(beta(alpha, tails).numpy() - scipy.stats.beta.ppf(tails.numpy(), alpha, alpha))[1:3].max() < 2e-5
    assert ((beta(alpha, tails) >= 0) & (beta(alpha, tails) <= 1)).all()


def test_shares_of_mixup_cutmix_and_neither_are_as_asked():
    shares = kept(Mix(probability=0.8, switch_probability=0.25), 4000, (16, 16))
    flat = shares.flatten(1)
    blended = ((flat > 0) & (flat < 1)).any(1)
    whole = (flat == 1).all(1)
    cut = ~blended & ~whole
    assert blended.double().mean() == pytest.approx(0.6, abs=0.03)
    assert 0.13 < cut.double().mean() < 0.23 and 0.18 < whole.double().mean() < 0.28  # a rectangle may be empty
    assert flat[blended][:, 0].mean() == pytest.approx(0.5, abs=0.02)
    assert flat[blended][:, 0].var() == pytest.approx(1 / (4 * (2 * 0.8 + 1)), abs=0.01)


def test_rectangles_are_distributed_as_timms():
    ours = 1 - kept(Mix(mixup=0), 4000, (20, 30))
    np.random.seed(0)
    theirs = [rand_bbox((20, 30), lam) for lam in np.random.uniform(size=4000)]
    area = np.array([(yh - yl) * (xh - xl) / 600 for yl, yh, xl, xh in theirs])
    assert ours.mean() == pytest.approx(area.mean(), abs=0.015)
    assert ours.mean((1, 2)).std() == pytest.approx(area.std(), abs=0.015)
    heights = ours.any(2).sum(1).double()
    assert heights.mean() == pytest.approx(np.mean([yh - yl for yl, yh, _, _ in theirs]), abs=0.3)
    first = ours.any(2).double().argmax(1)[heights > 0].double().mean()
    assert first == pytest.approx(np.mean([yl for yl, yh, xl, xh in theirs if yh > yl and xh > xl]), abs=0.3)


def test_a_fixed_share_gives_timms_picture(monkeypatch):
    """With timm's partner (the batch reversed; of two images that is ours) and its lambda, its pixels and targets."""
    images, labels, epochs, ids = batch(2)
    mix = Mix(cutmix=0)
    lam = mix.kept(0, epochs, ids, *SIZE)[:, 0, 0].numpy()
    timm = Mixup(mixup_alpha=0.8, cutmix_alpha=0, mode="elem", label_smoothing=0.1, num_classes=4)
    monkeypatch.setattr(timm, "_params_per_elem", lambda count: (lam.astype(np.float32), np.zeros(count, dtype=bool)))
    right, right_targets = timm(images.float(), labels)
    mixed, targets = mix(images, labels, epochs, ids, 0, 4, 0.1)
    assert torch.allclose(mixed, right, atol=1e-3) and torch.allclose(targets, right_targets, atol=1e-6)


def test_a_micro_batch_of_one_image_is_refused():
    with pytest.raises(ValueError, match="micro_batch_size 2"):
        Mix()(*batch(1), 0, 4, 0.0)


def test_a_section_that_mixes_nothing_is_refused():
    with pytest.raises(RecipeError, match="both 0"):
        load_recipe(Mix, ["--mixup=0", "--cutmix=0"])
    assert load_recipe(Mix, ["--cutmix=0"]) == Mix(cutmix=0)
