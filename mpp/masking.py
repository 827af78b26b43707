"""Which patches are hidden (masking) and what stands in their place (corruption).

Both end in a `Plan`: one permutation of the patches per image. The first `masked` of them get the mask token, the
next `random` another patch's embedding, the next `kept` stay as they are; all these are predicted, the rest is not.
Counts are the same for every image, so everything downstream is slices and gathers of static shape.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from mpp.chance import Purpose, below, hashed


@dataclass(frozen=True)
class Plan:
    """What happens to each patch of each image.

    permutation: int64 (B, N), the corrupted patches first. partner: int64 (B, random), an index into the patches of
    the same image (`pool: image`) or of the whole micro-batch (`pool: batch`, row-major B*N).
    """

    permutation: Tensor
    partner: Tensor
    masked: int
    random: int
    kept: int
    across_images: bool = False

    @property
    def num_corrupted(self) -> int:
        return self.masked + self.random + self.kept

    @property
    def corrupted(self) -> Tensor:
        """int64 (B, K): the patches that are predicted."""
        return self.permutation[:, : self.num_corrupted]

    @property
    def visible(self) -> Tensor:
        """int64 (B, N - K): the patches that are seen as they are and not predicted."""
        return self.permutation[:, self.num_corrupted :]

    @property
    def replaced(self) -> Tensor:
        """int64 (B, masked + random): the patches whose embedding is taken away."""
        return self.permutation[:, : self.masked + self.random]

    def to(self, device: torch.device | str) -> "Plan":
        return replace(self, permutation=self.permutation.to(device), partner=self.partner.to(device))

    def parts(self) -> dict[str, slice]:
        """Where the three kinds of corruption lie among the K corrupted patches."""
        first, second = self.masked, self.masked + self.random
        return {
            "masked": slice(0, first),
            "random": slice(first, second),
            "kept": slice(second, second + self.kept),
        }


@dataclass(frozen=True, kw_only=True)
class RandomMasking:
    """Patches drawn without replacement, every one as likely as any other (paper, appendix B.1.2)."""

    kind: Literal["random"] = "random"
    ratio: Annotated[float, Gt(0), Lt(1)] = 0.5
    """share of the patches that is corrupted and predicted; the class token never counts"""

    def num_corrupted(self, grid: tuple[int, int]) -> int:
        """floor(ratio * N + 0.5), at least 1 and at most N - 1, else ValueError."""
        patches = grid[0] * grid[1]
        count = math.floor(self.ratio * patches + 0.5)
        if not 1 <= count <= patches - 1:
            raise ValueError(
                f"a ratio of {self.ratio} corrupts {count} of {patches} patches, expected 1 to {patches - 1}; "
                f"try a ratio near 0.5, a larger image or smaller patches"
            )
        return count

    def __call__(self, grid: tuple[int, int], keys: Tensor) -> Tensor:
        """int64 keys (B, N) -> permutation of the patches (B, N), the corrupted ones first and in random order."""
        return keys.argsort(dim=1, stable=True)


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """What stands in the place of a corrupted patch embedding; the rest of the patches is left as it is."""

    mask_token: Annotated[float, Ge(0), Le(1)] = 0.8
    """share of the corrupted patches replaced by the learnable [mask] embedding"""
    random_patch: Annotated[float, Ge(0), Le(1)] = 0.1
    """share replaced by a random other patch's embedding"""
    pool: Literal["image", "batch"] = "image"
    """where a random other patch comes from; with `batch` results depend on how a batch is split"""

    def faults(self) -> Iterator[tuple[str, str]]:
        total = self.mask_token + self.random_patch
        if total > 1 + 1e-9:
            yield (
                "mask_token",
                f"mask_token + random_patch is {total:g}, expected at most 1 (the rest is kept)",
            )

    def counts(self, corrupted: int) -> tuple[int, int, int]:
        """K -> (masked, random, kept), rounded half up and adding up to K (METHOD.md 1)."""
        masked = math.floor(self.mask_token * corrupted + 0.5)
        random = min(math.floor(self.random_patch * corrupted + 0.5), corrupted - masked)
        return masked, random, corrupted - masked - random


Masking = RandomMasking


def make_plan(
    masking: Masking, corruption: Corruption, grid: tuple[int, int], seed: int, epochs: Tensor, ids: Tensor
) -> Plan:
    """The plan of a batch, a pure function of (seed, epoch, sample id) for each image.

    epochs, ids: int64 (B,) on any device; the plan lies there too.
    """
    patches = grid[0] * grid[1]
    masked, random, kept = corruption.counts(masking.num_corrupted(grid))
    place = torch.arange(patches, device=ids.device)
    epochs, ids = epochs[:, None], ids[:, None]
    permutation = masking(grid, hashed(seed, Purpose.MASK, epochs, ids, place))
    own = permutation[:, masked : masked + random]
    across_images = corruption.pool == "batch"
    pool = patches
    if across_images:
        own = own + torch.arange(len(ids), device=ids.device)[:, None] * patches
        pool = patches * len(ids)
    # A step of 1 .. pool - 1 around the ring reaches every patch but the own one, each as likely.
    step = 1 + below(pool - 1, seed, Purpose.PARTNER, epochs, ids, place[:random])
    return Plan(permutation, (own + step) % pool, masked, random, kept, across_images)


def corrupt(tokens: Tensor, plan: Plan, mask_token: Tensor) -> Tensor:
    """Patch embeddings (B, N, D) -> the same with the plan's replacements, before positions are added.

    Random patches are read from the uncorrupted embeddings, whatever the plan does to their own places.
    """
    batch, _, width = tokens.shape
    masks = mask_token.to(tokens.dtype).expand(batch, plan.masked, width)
    replacements = torch.cat([masks, partners(tokens, plan)], dim=1)
    return tokens.scatter(1, plan.replaced[..., None].expand(-1, -1, width), replacements)


def partners(tokens: Tensor, plan: Plan) -> Tensor:
    """Embeddings, or pixels, of the random other patches: (B, N, D) -> (B, random, D)."""
    if plan.across_images:
        return tokens.flatten(0, 1)[plan.partner]
    return gather(tokens, plan.partner)


def gather(values: Tensor, index: Tensor) -> Tensor:
    """values (B, N, ...), index int64 (B, K) -> (B, K, ...)."""
    tail = values.shape[2:]
    return values.gather(1, index.reshape(*index.shape, *[1] * len(tail)).expand(*index.shape, *tail))
