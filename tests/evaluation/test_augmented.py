"""Augmented linear probe: LARS as written in the paper, BatchNorm over the whole batch."""

import numpy as np
import torch
from torch import nn

from mpp.evaluation.augmented import AugmentedProbe
from mpp.evaluation.streamed import MicroBatch


class Frozen:
    """A backbone whose features are the pixels of a 1 x 4 picture."""

    embed_dim = 4

    def check_readout(self, pools, layers):
        pass

    def layers_of(self, layers):
        return layers

    def width(self, pool):
        return self.embed_dim

    def features(self, images, pools, layers):
        return {("mean", -1): images[:, 0, 0].float()}


class Alone:
    device = torch.device("cpu")

    def summed(self, values):
        return values


def batch(seed=0, images=12):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (images, 1, 1, 4), generator=random).byte(), torch.arange(images) % 3


def micro_batches(images, labels, size):
    rows = torch.arange(len(labels)).split(size)
    return [MicroBatch(images[r], labels[r], r) for r in rows]


def learner(rates=(2.0,), **fields):
    return AugmentedProbe(**fields).learner(Frozen(), Alone(), {("mean", -1): rates}, 3, 0)


def test_lars_is_the_papers_in_numpy():
    """Weight: step scaled by 0.001 |w| / |g| also without weight decay; bias: plain momentum."""
    heads = learner()
    layer = heads.layers["mean", -1][0]
    weight, bias = layer.weight.detach().double().numpy().copy(), layer.bias.detach().double().numpy().copy()
    speed = [np.zeros_like(weight), np.zeros_like(bias)]
    for step in range(3):
        images, labels = batch(step)
        x = images[:, 0, 0].double().numpy()
        x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-6)
        logits = x @ weight.T + bias
        slope = np.exp(logits) / np.exp(logits).sum(1, keepdims=True) - np.eye(3)[labels.numpy()]
        gradients = [slope.T @ x / 12, slope.mean(0)]
        gradients[0] *= 0.001 * np.linalg.norm(weight) / np.linalg.norm(gradients[0])
        speed = [0.9 * old + new for old, new in zip(speed, gradients, strict=True)]
        weight, bias = weight - 2.0 * 0.5 * speed[0], bias - 2.0 * 0.5 * speed[1]
        heads.learn(micro_batches(images, labels, 12), 12, 0.5)
    np.testing.assert_allclose(layer.weight.detach().numpy(), weight, atol=1e-6)
    np.testing.assert_allclose(layer.bias.detach().numpy(), bias, atol=1e-5)


def test_sgd_and_batchnorm_are_torchs_on_the_whole_batch_for_any_micro_batches():
    for size in (12, 5, 2):
        heads = learner(optimizer="sgd", weight_decay=0.1)
        twin = learner(optimizer="sgd").layers["mean", -1][0]
        norm = nn.BatchNorm1d(4, eps=1e-6, affine=False)
        groups = [{"params": [twin.weight], "weight_decay": 0.1}, {"params": [twin.bias]}]
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
        for step in range(3):
            images, labels = batch(step)
            loss = heads.learn(micro_batches(images, labels, size), 12, 0.5)["mean", -1]
            optimizer.zero_grad()
            expected = nn.functional.cross_entropy(twin(norm(images[:, 0, 0].float())), labels)
            expected.backward()
            optimizer.step()
            assert torch.allclose(loss, expected.detach(), atol=1e-6)
        images, _ = batch(9)
        with torch.no_grad():
            expected = twin(norm.eval()(images[:, 0, 0].float()))
        assert torch.allclose(heads.scores(images)["mean", -1][0], expected, atol=1e-5)


def test_all_rates_begin_alike_and_nothing_is_drawn_from_torchs_generator():
    before = torch.get_rng_state()
    first, second = learner((1.0, 2.0)).layers["mean", -1]
    assert torch.equal(first.weight, second.weight) and 0 < first.weight.std() < 0.03
    assert torch.equal(torch.get_rng_state(), before)


def test_faults_name_the_pool():
    assert list(AugmentedProbe(pool=("mean", "mean")).faults()) == [("pool", "names mean more than once")]
