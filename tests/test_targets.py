"""The three targets of the paper, parametrised over the union: shapes, chance loss, perfect predictions."""

import math
from typing import get_args

import pytest
import torch

from mpp.patches import to_patches
from mpp.targets import DownsizedColor, MeanColor, Pixels, Target

TARGETS = get_args(get_args(Target)[0])


def pictures(channels=3, height=48, width=80):
    return torch.randint(
        0, 256, (4, channels, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("patch", [(4, 4), (8, 8), (16, 16), (8, 16)])
def test_shapes_types_and_determinism(kind, channels, patch):
    target, images = kind(), pictures(channels)
    patches = (48 // patch[0]) * (80 // patch[1])
    labels = target.labels(images, patch)
    outputs = torch.zeros(4, patches, target.num_outputs(channels, patch))
    losses = target.loss(outputs, labels)
    assert losses.shape == (4, patches) and losses.dtype == torch.float32 and losses.isfinite().all()
    correct = target.correct(outputs, labels)
    assert correct is None or (correct.shape == (4, patches) and correct.min() >= 0 and correct.max() <= 1)
    assert torch.equal(target.labels(images, patch), labels)
    for pixels in (target.predicted_pixels(outputs, channels, patch), target.true_pixels(images, patch)):
        assert pixels.shape == (4, patches, patch[0] * patch[1] * channels)
        assert pixels.min() >= 0 and pixels.max() <= 1


@pytest.mark.parametrize("target", [MeanColor(), DownsizedColor()])
def test_chance_loss_is_ln_512(target):
    labels = target.labels(pictures(), (8, 8))
    losses = target.loss(torch.zeros(*labels.shape[:2], target.num_outputs(3, (8, 8))), labels)
    assert losses.mean().item() == pytest.approx(math.log(512), abs=1e-5)


def test_the_16_losses_of_the_downsized_target_are_averaged_not_summed():
    target = DownsizedColor()
    labels = target.labels(pictures(), (16, 16))
    assert labels.shape == (4, 15, 16)
    outputs = torch.zeros(4, 15, 16, 512)
    outputs[..., :8, :].scatter_(-1, labels[..., :8, None], 100.0)  # the first 8 cells perfect, the rest by chance
    losses = target.loss(outputs.flatten(2), labels)
    assert losses.mean().item() == pytest.approx(math.log(512) / 2, abs=1e-4)
    assert target.correct(outputs.flatten(2), labels)[0, 0] >= 0.5


@pytest.mark.parametrize("target", [MeanColor(), MeanColor(bits=2), DownsizedColor(), DownsizedColor(size=2)])
def test_a_perfect_prediction_is_all_right_and_looks_like_the_truth(target):
    images = pictures()
    labels = target.labels(images, (8, 8))
    outputs = torch.nn.functional.one_hot(labels, target.num_classes(3)).float().flatten(2) * 50
    assert target.loss(outputs, labels).max() < 1e-4 and target.correct(outputs, labels).min() == 1
    assert torch.equal(target.predicted_pixels(outputs, 3, (8, 8)), target.true_pixels(images, (8, 8)))


def test_pixels_are_l2_in_zero_to_one():
    labels = Pixels().labels(pictures(), (8, 8))
    assert torch.equal(labels, to_patches(pictures(), (8, 8)).float() / 255)
    assert Pixels().loss(labels + 0.1, labels).mean().item() == pytest.approx(0.01, rel=1e-4)


def test_normalised_pixels_have_mean_0_and_unbiased_variance_1():
    labels = Pixels(normalize=True).labels(pictures(), (8, 8))
    assert labels.mean(-1).abs().max() < 1e-5
    assert (labels.var(-1, unbiased=True) - 1).abs().max() < 1e-3


def test_bits_are_bits_and_not_levels():
    assert [MeanColor(bits=b).num_classes(3) for b in (1, 2, 3, 4)] == [8, 64, 512, 4096]


def test_too_many_classes_are_refused_with_the_number():
    with pytest.raises(ValueError, match="262,144 classes"):
        MeanColor(bits=6).num_classes(3)
