"""Heads begin where the paper's begin."""

import math

import pytest
import torch

from mpp.heads import LinearHead, MLPHead


def test_a_linear_head_begins_at_zero_or_at_a_small_normal():
    assert not LinearHead().build(8, 3)(torch.randn(4, 8)).any()
    torch.manual_seed(0)
    weight = LinearHead(init_std=2e-5).build(512, 100).last.weight
    assert weight.std().item() == pytest.approx(2e-5 * 0.8796, rel=0.02) and weight.abs().max() <= 4e-5


def test_the_hidden_layer_is_tanh_with_lecun_s_variance_and_the_last_one_gives_the_bias():
    torch.manual_seed(0)
    head = MLPHead(bias=-10).build(400, 7)
    assert head.hidden.weight.std().item() == pytest.approx(1 / math.sqrt(400), rel=0.02)
    assert not head.hidden.bias.any() and torch.equal(head(torch.randn(2, 400)), torch.full((2, 7), -10.0))
    head.last.weight.data.fill_(1)
    x = torch.randn(2, 400)
    expected = (x @ head.hidden.weight.T).tanh().sum(1) - 10
    assert torch.allclose(head(x)[:, 0], expected, atol=1e-4)


def test_the_hidden_width_is_the_backbone_s_or_one_s_own():
    assert MLPHead().build(6, 2).hidden.out_features == 6
    assert MLPHead(hidden=10).build(6, 2).last.in_features == 10
