"""Which sample comes when: a keyed permutation of each epoch, computed in O(1) memory and never stored.

Global position p of a run (0, 1, 2 ... without end) is sample `permutation(epoch)[p % n]` of epoch `p // n`. Batches
are cut from this one endless sequence, so they may lie across the border of two epochs and no sample is ever dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mpp.chance import Purpose, Word, hashed

ROUNDS = 6  # Luby-Rackoff needs 4; more for the small domains of small data sets


@dataclass(frozen=True)
class Order:
    """The order of `length` samples under a seed."""

    length: int
    seed: int

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Global positions int64 (B,) -> (epochs, indices), both int64 (B,), index in 0 .. length - 1."""
        epochs = positions // self.length
        return epochs, permuted(positions % self.length, self.length, self.seed, Purpose.ORDER, epochs)

    def spare(self, epoch: int, sample: int, attempt: int) -> int:
        """What stands in for an unreadable sample: entry `attempt` of a permutation of its own."""
        words = (self.seed, Purpose.SPARE, epoch, sample)
        return int(permuted(torch.tensor([attempt % self.length]), self.length, *words))


@dataclass(frozen=True)
class Share:
    """One process's part of every step: `rank` of `world`, in `accumulation` micro-batches of equal size.

    A batch is `batch_size` consecutive positions; each process takes a consecutive stretch of it.
    """

    batch_size: int
    micro_batch_size: int
    rank: int = 0
    world: int = 1

    @property
    def accumulation(self) -> int:
        return self.batch_size // (self.micro_batch_size * self.world)

    def micro_batches(self, first_step: int, last_step: int) -> Iterator[list[int]]:
        """Global positions of each micro-batch from `first_step` up to, not including, `last_step`."""
        for step in range(first_step, last_step):
            begin = step * self.batch_size + self.rank * self.accumulation * self.micro_batch_size
            for micro in range(self.accumulation):
                at = begin + micro * self.micro_batch_size
                yield list(range(at, at + self.micro_batch_size))


def permuted(positions: Tensor, length: int, *key: Word) -> Tensor:
    """A keyed bijection of 0 .. length - 1: a Feistel network on the next even power of two, walked until inside."""
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    key_hash = hashed(*key).expand(positions.shape)
    result = _feistel(positions, half, key_hash)
    while (outside := result >= length).any():
        result = result.masked_scatter(outside, _feistel(result[outside], half, key_hash[outside]))
    return result


def _feistel(values: Tensor, half: int, key: Tensor) -> Tensor:
    mask = (1 << half) - 1
    left, right = values >> half, values & mask
    for turn in range(ROUNDS):
        left, right = right, left ^ (hashed(turn, key, right) & mask)
    return (left << half) | right
