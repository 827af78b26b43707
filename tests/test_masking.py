"""Exact counts, no patch its own partner, nothing read from what was already corrupted."""

import pytest
import torch

from mpp.masking import Corruption, RandomMasking, corrupt, make_plan


def plan(batch=64, grid=(14, 14), seed=0, epoch=0, **corruption):
    ids = torch.arange(batch)
    return make_plan(RandomMasking(), Corruption(**corruption), grid, seed, torch.full_like(ids, epoch), ids)


@pytest.mark.parametrize(
    ("ratio", "grid", "expected"),
    [(0.5, (14, 14), 98), (0.5, (3, 3), 5), (0.15, (14, 14), 29), (0.5, (1, 2), 1), (0.6, (4, 4), 10)],
)
def test_exactly_the_stated_number_is_corrupted(ratio, grid, expected):
    assert RandomMasking(ratio=ratio).num_corrupted(grid) == expected


@pytest.mark.parametrize(("ratio", "grid"), [(0.01, (4, 4)), (0.99, (4, 4)), (0.5, (1, 1))])
def test_a_ratio_that_corrupts_none_or_all_is_refused(ratio, grid):
    with pytest.raises(ValueError, match="corrupts"):
        RandomMasking(ratio=ratio).num_corrupted(grid)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((0.8, 0.1), (78, 10, 10)),
        ((1.0, 0.0), (98, 0, 0)),
        ((0.0, 1.0), (0, 98, 0)),
        ((0.0, 0.0), (0, 0, 98)),
        ((0.5, 0.5), (49, 49, 0)),
    ],
)
def test_80_10_10_as_counts(shares, expected):
    assert Corruption(mask_token=shares[0], random_patch=shares[1]).counts(98) == expected


@pytest.mark.parametrize(("k", "expected"), [(7, (6, 1, 0)), (12, (10, 1, 1)), (4, (3, 0, 1)), (5, (4, 1, 0))])
def test_counts_are_rounded_half_up(k, expected):
    """floor(0.8 K + 0.5) masked, floor(0.1 K + 0.5) random, the rest kept (METHOD.md 1)."""
    assert Corruption(mask_token=0.8, random_patch=0.1).counts(k) == expected


def test_counts_always_add_up():
    for k in range(1, 200):
        for m, r in ((0.8, 0.1), (0.5, 0.5), (0.85, 0.15), (1.0, 0.0), (0.33, 0.33)):
            counts = Corruption(mask_token=m, random_patch=r).counts(k)
            assert sum(counts) == k and min(counts) >= 0


def test_shares_over_one_are_refused():
    assert [path for path, _ in Corruption(mask_token=0.8, random_patch=0.3).faults()] == ["mask_token"]
    assert not list(Corruption(mask_token=0.9, random_patch=0.1).faults())


def test_every_plan_is_a_permutation_and_kinds_do_not_overlap():
    p = plan()
    assert torch.equal(p.permutation.sort(1).values, torch.arange(196).expand(64, -1))
    assert (p.masked, p.random, p.kept) == (78, 10, 10)
    assert p.corrupted.shape == (64, 98) and p.visible.shape == (64, 98) and p.replaced.shape == (64, 88)


def test_masks_depend_on_seed_epoch_and_id_and_on_nothing_else():
    ids = torch.tensor([5, 900, 5])
    make = lambda seed, epochs, ids: make_plan(RandomMasking(), Corruption(), (4, 6), seed, epochs, ids)  # noqa: E731
    together = make(1, torch.tensor([0, 0, 3]), ids)
    alone = make(1, torch.tensor([0]), torch.tensor([900]))
    assert torch.equal(together.permutation[1], alone.permutation[0])
    assert torch.equal(together.partner[1], alone.partner[0])
    assert not torch.equal(together.permutation[0], together.permutation[2])
    assert not torch.equal(make(2, torch.tensor([0]), torch.tensor([900])).permutation, alone.permutation)


def test_every_patch_is_hidden_and_borrowed_about_equally_often():
    p = plan(batch=4000, grid=(4, 4))
    hidden = torch.bincount(p.corrupted.flatten(), minlength=16)
    assert hidden.min() > 1850 and hidden.max() < 2150  # 2000 +- 3 sigma of sqrt(4000/4)
    borrowed = torch.bincount(p.partner.flatten(), minlength=16)
    assert borrowed.min() > 170 and borrowed.max() < 340


@pytest.mark.parametrize("pool", ["image", "batch"])
@pytest.mark.parametrize("grid", [(1, 2), (3, 3), (14, 14)])
def test_a_random_patch_is_never_the_patch_itself(pool, grid):
    p = plan(batch=50, grid=grid, mask_token=0.0, random_patch=1.0, pool=pool)
    own = p.permutation[:, : p.random]
    if pool == "batch":
        own = own + torch.arange(50)[:, None] * grid[0] * grid[1]
        assert (p.partner // (grid[0] * grid[1]) != torch.arange(50)[:, None]).any()
    assert p.partner.shape == own.shape and not (p.partner == own).any()
    assert p.partner.min() >= 0 and p.partner.max() < grid[0] * grid[1] * (50 if pool == "batch" else 1)


@pytest.mark.parametrize("pool", ["image", "batch"])
def test_corruption_replaces_what_it_says_from_the_uncorrupted_sequence(pool):
    p = plan(batch=6, grid=(5, 5), mask_token=0.4, random_patch=0.4, pool=pool)
    tokens = torch.arange(6 * 25).float().view(6, 25, 1).expand(-1, -1, 8) + 1000
    out = corrupt(tokens, p, torch.full((8,), -1.0))
    flat = tokens.flatten(0, 1)
    for b in range(6):
        for place, patch in enumerate(p.permutation[b].tolist()):
            if place < p.masked:
                expected = torch.full((8,), -1.0)
            elif place < p.masked + p.random:
                partner = int(p.partner[b, place - p.masked])
                expected = flat[partner] if pool == "batch" else tokens[b, partner]
            else:
                expected = tokens[b, patch]
            assert torch.equal(out[b, patch], expected)
    # 10 masked of 13 corrupted here: some partner is itself masked, and its own embedding is what is borrowed.
    assert any(int(j) in p.permutation[b, : p.masked].tolist() for b in range(6) for j in p.partner[b] % 25)


def test_gradients_reach_the_mask_token_and_the_borrowed_patches():
    p = plan(batch=2, grid=(3, 3))
    tokens, token = torch.randn(2, 9, 4, requires_grad=True), torch.zeros(4, requires_grad=True)
    corrupt(tokens, p, token).sum().backward()
    assert token.grad is not None and torch.equal(token.grad, torch.full((4,), 2.0 * p.masked))
    assert tokens.grad is not None
    hidden = p.permutation[0, 0]
    borrowed = sum(int((p.partner[0] == hidden).sum()) for _ in [0])
    assert torch.equal(tokens.grad[0, hidden], torch.full((4,), float(borrowed)))
