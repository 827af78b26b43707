"""Linear probe on augmented views: the protocol by which masked image models are compared (METHOD.md 4)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import torch
from annotated_types import Ge, Lt, MinLen
from torch import Tensor, nn

from mpp.backbones import Backbone, Readout
from mpp.chance import Purpose, seed_of
from mpp.evaluation.checks import repeats
from mpp.evaluation.streamed import MicroBatch, Place, Rates, Streamed
from mpp.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class AugmentedProbe(Streamed):
    """Accuracy of a linear classifier trained on augmented views, behind a BatchNorm without scale and shift.

    Source: Masked Autoencoders Are Scalable Vision Learners (arXiv 2111.06377), appendix A.1 "Linear probing".
    """

    kind: Literal["linear_augmented"] = "linear_augmented"
    pool: Annotated[tuple[Readout, ...], MinLen(1)] = ("mean",)  # pyright: ignore
    """features, several in turn: mean of the patch tokens, class token, or both: one behind the other"""
    optimizer: Literal["lars", "sgd"] = "lars"
    """lars: the step of the weight is scaled by |weight| / |gradient| / 1000, that of the bias is not"""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """added to the weight's gradient (L2); not on the bias"""

    def faults(self) -> Iterator[tuple[str, str]]:
        yield from super().faults()
        yield from repeats(pool=self.pool)

    def places(self, backbone: Backbone) -> list[Place]:
        return [(pool, layer) for pool in self.pool for layer in backbone.layers_of(self.layers)]

    def setting(self, place: Place, backbone: Backbone) -> dict[str, Any]:
        decay = {"weight_decay": self.weight_decay, "momentum": self.momentum}
        return {"optimizer": self.optimizer, **decay, **self.common_setting, "pool": place[0], "layer": place[1]}

    def learner(self, backbone: Backbone, runtime: Runtime, rates: Rates, classes: int, seed: int) -> "LinearHeads":
        backbone.check_readout(self.pool, self.layers)
        return LinearHeads(self, backbone, runtime, rates, classes, seed)


class LinearHeads:
    """A BatchNorm for each place, and behind it a linear layer for each learning rate.

    Every process gets the features of the whole batch (each row filled by one of them, so their sum is exact) and does
    the same with them: statistics are those of the batch, and no digit depends on the number of processes.
    """

    def __init__(
        self, probe: AugmentedProbe, backbone: Backbone, runtime: Runtime, rates: Rates, classes: int, seed: int
    ):
        self.probe, self.backbone, self.runtime, self.rates = probe, backbone, runtime, rates
        device = runtime.device
        self.layers = {
            place: [_initial(backbone.width(place[0]), classes, seed).to(device) for _ in some]
            for place, some in rates.items()
        }
        self.norms = {
            place: nn.BatchNorm1d(backbone.width(place[0]), eps=1e-6, affine=False).to(device) for place in rates
        }
        self.groups, self.optimizer = self._optimizer()

    def learn(self, mine: Sequence[MicroBatch], batch_size: int, factor: float) -> dict[Place, Tensor]:
        features, labels = self._gathered(mine, batch_size)
        losses = {}
        for place, layers in self.layers.items():
            x = self.norms[place].train()(features[place])
            losses[place] = torch.stack([nn.functional.cross_entropy(layer(x), labels) for layer in layers])
        # No weight is shared: the gradient of the sum is that of each loss alone.
        torch.cat(list(losses.values())).sum().backward()
        for rate, group in self.groups:
            group["lr"] = rate * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {place: values.detach() for place, values in losses.items()}

    @torch.no_grad()
    def scores(self, images: Tensor) -> dict[Place, Tensor]:
        features = self._features(images)
        return {
            place: torch.stack([layer(self.norms[place].eval()(features[place])) for layer in layers])
            for place, layers in self.layers.items()
        }

    @torch.no_grad()
    def _features(self, images: Tensor) -> dict[Place, Tensor]:
        layers = self.backbone.layers_of(self.probe.layers)
        return cast(dict[Place, Tensor], self.backbone.features(images, self.probe.pool, layers))

    def _gathered(self, mine: Sequence[MicroBatch], batch_size: int) -> tuple[dict[Place, Tensor], Tensor]:
        """Features (B, D) for each place and labels (B,) of the whole batch."""
        device = self.runtime.device
        features = {
            place: torch.zeros(batch_size, self.backbone.width(place[0]), device=device) for place in self.layers
        }
        labels = torch.zeros(batch_size, dtype=torch.int64, device=device)
        for micro in mine:
            rows = micro.rows.to(device)
            labels[rows] = micro.labels
            for place, values in self._features(micro.images).items():
                features[place][rows] = values.float()
        whole = {place: self.runtime.summed(values).to(device) for place, values in features.items()}
        return whole, self.runtime.summed(labels).to(device)

    def _optimizer(self) -> tuple[list[tuple[float, dict[str, Any]]], torch.optim.Optimizer]:
        """The optimiser, and its groups, weights and biases apart, each with the rate it belongs to."""
        probe, pairs = self.probe, []
        for place, layers in self.layers.items():
            for rate, layer in zip(self.rates[place], layers, strict=True):
                pairs.append((rate, {"params": [layer.weight], "weight_decay": probe.weight_decay}))
                pairs.append((rate, {"params": [layer.bias], "weight_decay": 0.0}))
        groups = [group for _, group in pairs]
        if probe.optimizer == "lars":
            from timm.optim.lars import Lars

            for group in groups:
                # Without it timm's Lars does not adapt where there is no weight decay, and is plain SGD.
                group["always_adapt"] = group["params"][0].ndim > 1
            optimizer: torch.optim.Optimizer = Lars(groups, lr=0.0, momentum=probe.momentum)  # pyright: ignore
        else:
            optimizer = torch.optim.SGD(groups, lr=0.0, momentum=probe.momentum)
        return list(zip([rate for rate, _ in pairs], optimizer.param_groups, strict=True)), optimizer


def _initial(width: int, classes: int, seed: int) -> nn.Linear:
    """Small normal weights, as LARS scales its steps by their size; the same for every rate: a function of the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, Purpose.PROBE))
        layer = nn.Linear(width, classes)
        nn.init.trunc_normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.bias)
    return layer
