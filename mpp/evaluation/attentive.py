"""Attentive probe: one learned query looks over the frozen patch tokens, a linear layer reads what it saw."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, MinLen
from torch import Tensor, nn

from mpp.backbones import Backbone
from mpp.chance import Purpose, seed_of
from mpp.evaluation.streamed import MicroBatch, Place, Rates, Streamed
from mpp.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class AttentiveProbe(Streamed):
    """Accuracy of a classifier that pools the frozen patch tokens by attention; for models whose mean says little.

    Source: Context Autoencoder (arXiv 2202.03026), section 4 "attentive probing". Trained with AdamW on augmented
    views; tokens are never stored.
    """

    kind: Literal["attentive"] = "attentive"
    num_heads: Annotated[int, Ge(1)] | None = None
    """of the attention; null: one for every 64 features"""
    weight_decay: Annotated[float, Ge(0)] = 0.01
    """decoupled, multiplied by the learning rate; on matrices only"""
    learning_rates: Annotated[tuple[Annotated[float, Gt(0)], ...], MinLen(1)] = (3e-4, 1e-3, 3e-3)
    """for a batch of 256: multiplied by batch_size / 256"""
    epochs: Annotated[int, Ge(1)] = 20
    """passes over the train images"""
    warmup_epochs: Annotated[int, Ge(0)] = 1
    """of linear rise; then half a cosine to 0"""
    batch_size: Annotated[int, Ge(2)] = 256
    """images per update over all processes"""

    def places(self, backbone: Backbone) -> list[Place]:
        return [(layer,) for layer in backbone.layers_of(self.layers)]

    def setting(self, place: Place, backbone: Backbone) -> dict[str, Any]:
        heads = {"num_heads": self.heads_for(backbone.embed_dim), "weight_decay": self.weight_decay}
        return heads | self.common_setting | {"layer": place[0]}

    def learner(self, backbone: Backbone, runtime: Runtime, rates: Rates, classes: int, seed: int) -> "AttentiveHeads":
        backbone.check_readout((), self.layers)
        return AttentiveHeads(self, backbone, runtime, rates, classes, seed)

    def heads_for(self, width: int) -> int:
        """num_heads, or its default for this width. ValueError if the width does not divide."""
        heads = self.num_heads or max(1, width // 64)
        if width % heads:
            raise ValueError(f"attentive: {heads} heads do not divide {width} features; try another num_heads")
        return heads


class AttentiveHead(nn.Module):
    """One query attends over tokens with several heads; LayerNorm; linear, which begins at 0 (loss ln classes)."""

    def __init__(self, width: int, num_heads: int, classes: int):
        super().__init__()
        self.query = nn.Parameter(torch.empty(width))
        self.attention = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, classes)
        nn.init.normal_(self.query, std=0.02)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N, D) -> (B, classes)."""
        query = self.query.expand(len(tokens), 1, -1)
        pooled, _ = self.attention(query, tokens, tokens, need_weights=False)
        return self.linear(self.norm(pooled[:, 0]))


class AttentiveHeads:
    """A head for each layer and learning rate.

    Gradients are sums over images, added over micro-batches and processes in float64: what the number of processes
    changes is far below what float32 can show.
    """

    def __init__(
        self, probe: AttentiveProbe, backbone: Backbone, runtime: Runtime, rates: Rates, classes: int, seed: int
    ):
        self.probe, self.backbone, self.runtime, self.rates = probe, backbone, runtime, rates
        make = lambda: self._initial(classes, seed)  # noqa: E731
        self.heads = {place: [make() for _ in some] for place, some in rates.items()}
        self.groups, self.optimizer = self._optimizer()
        self.parameters = [p for heads in self.heads.values() for head in heads for p in head.parameters()]

    def learn(self, mine: Sequence[MicroBatch], batch_size: int, factor: float) -> dict[Place, Tensor]:
        counts = [len(heads) for heads in self.heads.values()]
        total = torch.zeros(sum(counts) + sum(p.numel() for p in self.parameters), dtype=torch.float64)
        total = total.to(self.runtime.device)
        for micro in mine:
            losses = self._losses(micro)
            gradients = torch.autograd.grad(losses.sum(), self.parameters)  # no weight is shared between losses
            total += torch.cat([losses.detach(), *(g.flatten() for g in gradients)])
        total = self.runtime.summed(total).to(self.runtime.device) / batch_size
        losses, *gradients = total.split([sum(counts), *(p.numel() for p in self.parameters)])
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype)
        for rate, group in self.groups:
            group["lr"] = rate * factor
        self.optimizer.step()
        return dict(zip(self.heads, losses.split(counts), strict=True))

    @torch.no_grad()
    def scores(self, images: Tensor) -> dict[Place, Tensor]:
        tokens = self._tokens(images)
        return {place: torch.stack([head(tokens[place]) for head in heads]) for place, heads in self.heads.items()}

    def _losses(self, micro: MicroBatch) -> Tensor:
        """Sums over the micro-batch, one for each layer and rate."""
        tokens = self._tokens(micro.images)
        return torch.stack(
            [
                nn.functional.cross_entropy(head(tokens[place]), micro.labels, reduction="sum")
                for place, heads in self.heads.items()
                for head in heads
            ]
        )

    @torch.no_grad()
    def _tokens(self, images: Tensor) -> dict[Place, Tensor]:
        """The patch tokens, (B, N, D), after each layer and the final norm."""
        layers = self.backbone.layers_of(self.probe.layers)
        tokens = self.backbone.tokens(images, layers)
        return {(layer,): found.float() for layer, found in zip(layers, tokens, strict=True)}

    def _initial(self, classes: int, seed: int) -> AttentiveHead:
        """The same for every rate: a function of the seed."""
        width = self.backbone.embed_dim
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(seed, Purpose.PROBE))
            return AttentiveHead(width, self.probe.heads_for(width), classes).to(self.runtime.device)

    def _optimizer(self) -> tuple[list[tuple[float, dict[str, Any]]], torch.optim.Optimizer]:
        """The optimiser, and its groups, matrices and the rest apart, each with the rate it belongs to."""
        pairs = []
        for place, heads in self.heads.items():
            for rate, head in zip(self.rates[place], heads, strict=True):
                matrices = [p for p in head.parameters() if p.ndim > 1]
                rest = [p for p in head.parameters() if p.ndim <= 1]
                pairs.append((rate, {"params": matrices, "weight_decay": self.probe.weight_decay}))
                pairs.append((rate, {"params": rest, "weight_decay": 0.0}))
        optimizer = torch.optim.AdamW([group for _, group in pairs], lr=0.0, fused=True)
        return list(zip([rate for rate, _ in pairs], optimizer.param_groups, strict=True)), optimizer
