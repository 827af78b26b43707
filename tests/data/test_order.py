"""The order is a permutation of every epoch, cut the same way for any number of processes."""

import pytest
import torch

from mpp.data.order import Order, Share, permuted


@pytest.mark.parametrize("length", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_every_epoch_shows_every_sample_once(length):
    epochs, indices = Order(length, seed=3).at(torch.arange(3 * length))
    assert torch.equal(epochs, torch.arange(3).repeat_interleave(length))
    for epoch in range(3):
        assert torch.equal(indices[epoch * length : (epoch + 1) * length].sort().values, torch.arange(length))


def test_epochs_and_seeds_are_shuffled_differently():
    order = Order(1000, seed=0)
    first, second = order.at(torch.arange(1000))[1], order.at(torch.arange(1000, 2000))[1]
    other = Order(1000, seed=1).at(torch.arange(1000))[1]
    for a, b in ((first, second), (first, other), (first, torch.arange(1000))):
        assert (a == b).sum() < 12  # about one of 1000 by chance
    assert abs(torch.corrcoef(torch.stack([first.double(), torch.arange(1000.0).double()]))[0, 1]) < 0.1


def test_pairs_of_neighbours_are_spread_evenly():
    """A weak round function would leave structure: count the signs of differences at lag 1 and 2."""
    indices = Order(10_000, seed=5).at(torch.arange(10_000))[1]
    for lag in (1, 2, 128):
        ups = (indices[lag:] > indices[:-lag]).float().mean().item()
        assert ups == pytest.approx(0.5, abs=0.02)


def test_one_sample_of_300_million_needs_no_memory():
    n = 300_000_000
    epochs, indices = Order(n, seed=0).at(torch.tensor([0, n - 1, n, 5 * n + 17]))
    assert epochs.tolist() == [0, 0, 1, 5] and indices.min() >= 0 and indices.max() < n


@pytest.mark.parametrize(("world", "micro"), [(1, 24), (1, 6), (2, 12), (2, 3), (3, 4), (4, 1)])
def test_processes_and_micro_batches_cut_the_same_batch(world, micro):
    """The global batch of a step is the same whoever reads it; so is the order within, rank by rank."""
    shares = [Share(24, micro, rank, world) for rank in range(world)]
    parts = [list(share.micro_batches(5, 7)) for share in shares]
    per_step = shares[0].accumulation
    for step in range(2):
        batch = [p for part in parts for m in part[step * per_step : (step + 1) * per_step] for p in m]
        assert batch == list(range((5 + step) * 24, (6 + step) * 24))


def test_going_on_is_arithmetic():
    share = Share(16, 8)
    assert list(share.micro_batches(3, 6)) == list(share.micro_batches(0, 6))[2 * 3 :]


def test_spares_are_a_permutation_of_their_own():
    order = Order(20, seed=0)
    spares = [order.spare(epoch=1, sample=7, attempt=k) for k in range(20)]
    assert sorted(spares) == list(range(20))
    assert spares != [order.spare(epoch=2, sample=7, attempt=k) for k in range(20)]
    assert torch.equal(permuted(torch.arange(9), 9, 1), permuted(torch.arange(9), 9, 1))
