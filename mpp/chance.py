"""Random numbers as pure functions of integers: (seed, epoch, sample id, purpose) in, the same bits on every device.

A counter-based hash (SplitMix64's finaliser, Steele et al. 2014) is folded over the words. No generator, no state:
nothing to save for a resume, nothing that depends on workers or processes.
"""

from enum import IntEnum

import torch
from torch import Tensor

Word = int | Tensor


class Purpose(IntEnum):
    """What a draw is for. The numbers are part of every result ever made: never change them, only add."""

    ORDER = 1
    SPARE = 2
    CROP = 3
    FLIP = 4
    MASK = 5
    PARTNER = 6
    HELDOUT = 7
    DROPOUT = 8
    FEWSHOT = 1001
    PROBE = 1002
    BUDGET = 1003
    VALIDATION = 1004
    AUGMENT = 1005
    MIX = 1006


def hashed(*words: Word) -> Tensor:
    """Hash of integer words, broadcast against each other -> int64, all 64 bits well mixed."""
    state: Tensor = torch.zeros((), dtype=torch.int64)
    for word in words:
        word = word.to(torch.int64) if isinstance(word, Tensor) else torch.tensor(_signed(int(word)))
        # A 0-dim CPU tensor mixes with tensors of any device, so constants need no device of their own.
        state = _mix((state ^ word) + _GOLDEN)
    return state


def uniform(*words: Word) -> Tensor:
    """float64 in [0, 1), 53 random bits."""
    return _shifted(hashed(*words), 11).to(torch.float64) * 2.0**-53


def below(limit: int, *words: Word) -> Tensor:
    """int64 in [0, limit); the bias of the modulo is under limit / 2**63."""
    return _shifted(hashed(*words), 1) % limit


def seed_of(*words: int) -> int:
    """One non-negative 63-bit seed for a library that insists on a generator."""
    return int(_shifted(hashed(*words), 1))


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's is arithmetic on signed integers, and int64 is its only wide one."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The two's complement reading of the low 64 bits."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >= 1 << 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
