"""Learning rates as functions of the step; which parameters decay."""

import math

import pytest
import torch

from mpp.architectures import ViT
from mpp.backbones import build_backbone
from mpp.masking import Corruption, RandomMasking
from mpp.optim import AdamW, Extend, LearningRate, parameter_groups
from mpp.targets import MeanColor
from mpp.tasks import MaskedPatchPrediction


def test_warm_up_rises_to_the_peak_and_cosine_falls_to_zero():
    lr = LearningRate(AdamW(lr=1.0, warmup_steps=10), 110)
    assert [lr(0), lr(4), lr(9), lr(10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert lr(60) == pytest.approx(0.5) and lr(35) == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))
    assert 0 < lr(109) < 1e-3 and lr(110) == 0


def test_linear_and_constant():
    linear = LearningRate(AdamW(lr=1.0, schedule="linear", final_lr=0.2), 100)
    assert [linear(0), linear(50), linear(100)] == pytest.approx([1.0, 0.6, 0.2])
    constant = LearningRate(AdamW(lr=1.0, schedule="constant", warmup_steps=2), 100)
    assert [constant(0), constant(1), constant(99)] == [0.5, 1.0, 1.0]


def test_extensions_follow_each_other():
    lr = LearningRate(AdamW(lr=1.0), 10, (Extend(steps=5), Extend(steps=4, schedule="linear", lr=0.5)))
    assert lr.total_steps == 19
    assert [lr(9), lr(10), lr(14), lr(15), lr(17)] == pytest.approx(
        [LearningRate(AdamW(lr=1.0), 10)(9), 1, 1, 0.5, 0.25]
    )


def test_biases_norms_positions_and_tokens_do_not_decay_and_every_parameter_is_covered_once():
    spec = ViT(size="tiny", embed_dim=32, depth=2, num_heads=2, patch_size=8, image_size=32, register_tokens=1)
    task = MaskedPatchPrediction(build_backbone(spec, 3, 0), RandomMasking(), Corruption(), MeanColor())
    (decay, decayed), (zero, rest) = parameter_groups(task, 0.05)
    assert (decay, zero) == (0.05, 0.0)
    assert sorted([*decayed, *rest]) == sorted(name for name, _ in task.named_parameters())
    assert all(name.endswith("weight") and p.ndim >= 2 for name, p in decayed.items())
    assert {
        "mask_token",
        "backbone.model.pos_embed",
        "backbone.model.cls_token",
        "backbone.model.reg_token",
    } <= set(rest)
    assert "head.weight" in decayed and "backbone.model.patch_embed.proj.weight" in decayed and "head.bias" in rest


def test_decay_is_decoupled():
    """With zero gradients Adam's moments stay zero, so that only lr * decay shrinks the weights."""
    layer = torch.nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    optimizer, names = AdamW(lr=0.1, weight_decay=0.5).build(layer)
    assert names == ["weight", "bias"]
    layer(torch.zeros(1, 3)).sum().mul(0).backward()
    optimizer.step()
    assert torch.allclose(layer.weight, before * (1 - 0.1 * 0.5))
