"""A classifier over every image of a subset, each exactly once, with the same digits on any number of processes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mpp.data.loader import FixedViews, Skipped, chunks_of, fixed_batches
from mpp.evaluation.classification import Classification, check_scores
from mpp.runtime import Runtime

CHUNK = 64  # images per forward pass, fixed: digits must not depend on the number of processes
TOP = 5


@dataclass(frozen=True)
class Scored:
    """What a classifier said of N images.

    top: int64 (N, min(5, classes)), most probable class first, equal scores: lowest class first. probability: float32
    (N,) of the first. loss: mean cross-entropy of the true classes in nats over the readable images, null without
    labels. good: bool (N,), false where a picture could not be read. labels: int64 (N,) or null. skipped: of this
    process.
    """

    top: Tensor
    probability: Tensor
    loss: float | None
    good: Tensor
    labels: Tensor | None
    skipped: list[Skipped]

    def counts(self, classes: int) -> Classification:
        """The accounting of the readable images."""
        assert self.labels is not None, "images without labels have predictions only"
        return Classification.of_top(self.top[self.good], self.labels[self.good], classes)


@torch.no_grad()
def score(
    logits: Callable[[Tensor], Tensor], classes: int, views: FixedViews, runtime: Runtime, sigmoid: bool = False
) -> Scored:
    """logits: uint8 (B, C, H, W) on the device -> (B, classes). Call it on all processes.

    sigmoid: the classes were trained one by one: each has a probability of its own, and the loss is summed over them.
    """
    subset, count = views.pictures.subset, len(views.pictures.subset)
    known = subset.labels()
    labels = None if known is None else torch.from_numpy(known)
    top = torch.zeros(count, min(TOP, classes), dtype=torch.int64)
    probability, seen = torch.zeros(count), torch.zeros(count, dtype=torch.int64)
    losses = torch.zeros(-(-count // CHUNK), dtype=torch.float64)
    skipped = list[Skipped]()
    chunks = chunks_of(count, CHUNK, runtime.rank, runtime.world)
    for (number, _), batch in zip(chunks, fixed_batches(views, [places for _, places in chunks]), strict=True):
        skipped += batch["skipped"]
        places = batch["place"]
        if len(places):
            with runtime.accelerator.autocast():
                scores = logits(batch["image"].to(runtime.device)).float().cpu()
            check_scores(scores)
            order = scores.sort(dim=1, descending=True, stable=True).indices
            top[places], seen[places] = order[:, : top.shape[1]], 1
            exact = scores.double()
            chances = F.logsigmoid(exact) if sigmoid else exact.log_softmax(1)
            probability[places] = chances.gather(1, order[:, :1])[:, 0].exp().float()
            if labels is not None:
                own = -chances.gather(1, labels[places][:, None])[:, 0]
                # Of the others, -log(1 - p) is softplus of the logit.
                rest = F.softplus(exact).sum(1) - F.softplus(exact.gather(1, labels[places][:, None]))[:, 0]
                losses[number] = (own + rest if sigmoid else own).sum()
    missing = int(runtime.summed(torch.tensor(len(skipped))))
    top, probability, seen, losses = map(runtime.summed, (top, probability, seen, losses))
    assert int(seen.sum()) == count - missing and int(seen.max()) <= 1, "an image was not counted exactly once"
    loss = None if labels is None or not seen.any() else losses.sum().item() / int(seen.sum())
    return Scored(top, probability, loss, seen.bool(), labels, skipped)
