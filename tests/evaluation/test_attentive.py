"""Attentive probe: attention by hand, sums over micro-batches, all parameters trained and decayed as said."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mpp.evaluation.attentive import AttentiveHead, AttentiveProbe
from mpp.evaluation.streamed import MicroBatch


class Frozen:
    """A backbone of width 8."""

    embed_dim = 8

    def check_readout(self, pools, layers):
        pass

    def layers_of(self, layers):
        return layers

    def width(self, pool):
        return self.embed_dim

    def tokens(self, images, layers):
        tokens = images.float().view(len(images), -1, 8) / 255
        return [tokens * (1 + i) for i, _ in enumerate(layers)]


ALONE = SimpleNamespace(device=torch.device("cpu"), summed=lambda values: values)


def learner(rates=(0.01,), **fields):
    probe = AttentiveProbe(num_heads=2, **fields)
    return probe.learner(Frozen(), ALONE, dict.fromkeys(probe.places(Frozen()), rates), 3, 0)


def batch(seed=0, images=12):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (images, 1, 5, 8), generator=random).byte(), torch.arange(images) % 3


def micro_batches(images, labels, size):
    return [MicroBatch(images[rows], labels[rows], rows) for rows in torch.arange(len(labels)).split(size)]


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def test_a_head_is_attention_by_hand():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = AttentiveHead(8, 2, 3).double()
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter)
        tokens = torch.randn(4, 5, 8, dtype=torch.float64)
    p = {name: value.detach().numpy() for name, value in head.named_parameters()}
    q, k, v = (
        x @ w.T + b
        for x, w, b in zip(
            (p["query"], tokens.numpy(), tokens.numpy()),
            np.split(p["attention.in_proj_weight"], 3),
            np.split(p["attention.in_proj_bias"], 3),
            strict=True,
        )
    )
    pooled = np.concatenate(
        [
            np.einsum("bn,bnd->bd", softmax(k[..., part] @ q[part] / np.sqrt(4)), v[..., part])
            for part in (slice(0, 4), slice(4, 8))
        ],
        axis=1,
    )
    pooled = pooled @ p["attention.out_proj.weight"].T + p["attention.out_proj.bias"]
    normed = (pooled - pooled.mean(1, keepdims=True)) / np.sqrt(pooled.var(1, keepdims=True) + 1e-5)
    expected = (normed * p["norm.weight"] + p["norm.bias"]) @ p["linear.weight"].T + p["linear.bias"]
    np.testing.assert_allclose(head(tokens).detach().numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("size", [12, 5, 1])
def test_micro_batches_change_nothing_and_the_update_is_adamws_on_the_mean(size):
    heads, twin = learner(weight_decay=0.3), learner().heads[(-1,)][0]
    matrices, rest = ([p for p in twin.parameters() if (p.ndim > 1) is many] for many in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0}], 5e-3
    )
    for step in range(4):
        images, labels = batch(step)
        loss = heads.learn(micro_batches(images, labels, size), 12, 0.5)[(-1,)]
        optimizer.zero_grad()
        expected = torch.nn.functional.cross_entropy(twin(images[:, 0].float() / 255), labels)
        expected.backward()
        optimizer.step()
        assert torch.allclose(loss.float(), expected.detach(), atol=1e-5)
        assert step or float(loss) == pytest.approx(np.log(3), abs=1e-6)  # it begins knowing nothing


def test_every_parameter_is_trained_by_exactly_one_group():
    heads = learner((0.1, 0.01), layers=(0, -1))
    grouped = [id(p) for group in heads.optimizer.param_groups for p in group["params"]]
    owned = [id(p) for some in heads.heads.values() for head in some for p in head.parameters()]
    assert sorted(grouped) == sorted(owned) and len(set(grouped)) == len(grouped)
    before = [p.detach().clone() for p in heads.parameters]
    for step in range(3):
        heads.learn(micro_batches(*batch(step), 12), 12, 1.0)
    assert not any(torch.equal(old, new) for old, new in zip(before, heads.parameters, strict=True))


def test_heads_must_divide_the_width():
    assert [AttentiveProbe().heads_for(width) for width in (32, 192, 768)] == [1, 3, 12]
    with pytest.raises(ValueError, match="3 heads do not divide 8 features; try another num_heads"):
        AttentiveProbe(num_heads=3).heads_for(8)
