"""Random numbers as functions: fixed for ever, uniform, independent."""

import torch

from mpp.chance import below, hashed, seed_of, uniform


def test_the_hash_is_frozen():
    # Every mask and crop ever made follows from these: a change here silently changes all results.
    assert hashed(1, 2, 3).item() == -3426316478316322125
    assert hashed(0).item() == -2152535657050944081
    assert hashed(-1, 1 << 63).item() == hashed((1 << 64) - 1, -(1 << 63)).item()


def test_splitmix_is_the_published_one():
    """hashed(x) is SplitMix64's output for state x: checked against plain Python integers."""
    mask = (1 << 64) - 1

    def splitmix(x: int) -> int:
        z = (x + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    for x in (0, 1, 12345, 1 << 40, mask):
        assert hashed(x).item() & mask == splitmix(x)
        assert hashed(x, 7).item() & mask == splitmix(splitmix(x) ^ 7)


def test_tensors_give_the_same_bits_as_integers():
    ids = torch.arange(50)
    together = hashed(3, ids[:, None], torch.arange(4))
    assert all(together[i, j] == hashed(3, i, j) for i in range(50) for j in range(4))


def test_uniform_is_uniform():
    draws = uniform(7, torch.arange(100_000))
    assert draws.min() >= 0 and draws.max() < 1
    counts = torch.histc(draws, bins=20, min=0, max=1)
    assert ((counts - 5000).square() / 5000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = .001


def test_below_reaches_every_value_about_equally():
    counts = torch.bincount(below(7, 11, torch.arange(70_000)), minlength=7)
    assert counts.min() > 9_600 and counts.max() < 10_400


def test_every_word_counts():
    words = [1, 2, 3, 4]
    base = hashed(*words).item()
    assert all(hashed(*words[:i], words[i] + 1, *words[i + 1 :]).item() != base for i in range(4))
    assert hashed(1, 2) != hashed(2, 1)
    assert seed_of(1, 2) == seed_of(1, 2) and 0 <= seed_of(5) < 1 << 63
