"""k nearest neighbours on frozen features: what they say with nothing trained on top (METHOD.md 4)."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, MinLen
from torch import Tensor

from mpp.backbones import Layers, Readout
from mpp.data.sources import Source
from mpp.evaluation.checks import check_features, check_labels, repeats
from mpp.evaluation.scores import places_ahead, summary, tops_of
from mpp.evaluation.shots import Shots, check_shots, draw, possible

if TYPE_CHECKING:
    from mpp.evaluation.features import Features, Split


@dataclass(frozen=True, kw_only=True)
class KNN:
    """Weighted k-nearest-neighbour accuracy: cosine similarity, votes of exp(similarity / temperature).

    Source: Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination
    (arXiv 1805.01978), section 3.4.
    """

    kind: Literal["knn"] = "knn"
    data: Source | None = None
    "labelled images to evaluate on; null: those of the pretraining"
    pool: Annotated[tuple[Readout, ...], MinLen(1)] = ("mean",)
    "features, several in turn: mean of the patch tokens, class token, or both: one behind the other"
    layers: Annotated[Layers, MinLen(1)] = (-1,)
    "blocks after which features are taken; -1 is the last; all: every one"
    k: Annotated[tuple[Annotated[int, Ge(1)], ...], MinLen(1)] = (10, 20, 100, 200)
    "numbers of neighbours; where there are fewer train images, all of them: `neighbours` in the row"
    shots: Annotated[tuple[Shots, ...], MinLen(1)] = ("all",)
    "train images per class among which neighbours are sought; all: the full train split"
    seeds: Annotated[int, Ge(1)] = 1
    "draws of the train images; value, spread and interval are over them"
    temperature: Annotated[float, Gt(0)] = 0.07
    "how fast a neighbour's vote falls with its distance"

    def faults(self) -> Iterator[tuple[str, str]]:
        yield from repeats(pool=self.pool, layers=self.layers, k=self.k, shots=self.shots)

    def check(self, split: "Split") -> None:
        """ValueError for what cannot be evaluated; reads only train_y, test_y, classes and name."""
        check_labels(split)
        check_shots(split, self.shots)

    def __call__(self, features: "Features") -> Iterator[dict[str, Any]]:
        """One row per pool, layer, shots, k and metric. `seconds`: the search they share, without the features."""
        for pool, layer in features.readouts(self):
            split = features.get(self.data, pool, layer)
            check_labels(split)
            check_features(split)
            for shots in possible(split, self.shots):
                yield from self._rows(split, shots, {"pool": pool, "layer": layer})
        check_shots(split, self.shots)

    def _rows(self, split: "Split", shots: Shots, where: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        started, images = time.perf_counter(), len(split.test_y)
        seeds = 1 if shots == "all" else self.seeds  # every seed would take the same images
        found = [self._hits(split, draw(split.train_y, shots, seed)) for seed in range(seeds)]
        seconds = round(time.perf_counter() - started, 3)
        for k, top in ((k, top) for k in sorted(self.k) for top in tops_of(len(split.classes))):
            yield {
                "evaluation": self.kind,
                "dataset": split.name,
                "setting": {"k": k, "shots": shots, "temperature": self.temperature, **where},
                "metric": f"top{top}",
                **summary([hits.of(k, top) / images for hits in found]),
                "images": images,
                "neighbours": found[0].neighbours(k),
                "seconds": seconds,
            }

    def _hits(self, split: "Split", chosen: Tensor) -> "Hits":
        """Hits by neighbours among the chosen train images."""
        if len(chosen) < len(split.train_y):
            split = replace(split, train_x=split.train_x[chosen], train_y=split.train_y[chosen])
        ks = sorted({min(k, len(chosen)) for k in self.k})
        return Hits(count_hits(split, ks, self.temperature), len(chosen))


@dataclass(frozen=True)
class Hits:
    """What `count_hits` found among so many train images; where k is more than these, all are neighbours."""

    counts: dict[tuple[int, int], int]
    images: int

    def neighbours(self, k: int) -> int:
        return min(k, self.images)

    def of(self, k: int, top: int) -> int:
        return self.counts[self.neighbours(k), top]


def count_hits(split: "Split", ks: list[int], temperature: float, chunk: int = 1024) -> dict[tuple[int, int], int]:
    """(k, c) -> number of test images whose class is among the c with the most votes of their k neighbours.

    c is 1, and 5 where there are more than 5 classes. One search serves all `ks` (each at most N).
    `chunk` test images are searched at a time: that changes memory and time, never a digit.
    """
    classes = len(split.classes)
    tops = tops_of(classes)
    train = fixed_point(split.train_x)
    hits = {(k, top): 0 for k in ks for top in tops}
    for images, truth in zip(split.test_x.split(chunk), split.test_y.split(chunk), strict=True):
        similarity, neighbour = nearest(train, fixed_point(images), max(ks))
        labels = split.train_y[neighbour]
        for k in ks:
            votes = count_votes(similarity[:, :k], labels[:, :k], classes, temperature)
            for top in tops:
                hits[k, top] += int(is_hit(votes, truth, top).sum())
    return hits


# Similarities are computed in whole numbers. Rows of norm 1 in steps of 2**-26 have dot products, and partial
# sums of them, of at most about 2**52, so a float64 matrix product is exact: the same for any blocking, any
# number of threads, any device. Equal images get equal similarities, and "lowest index first" means what it
# says. (In plain floats two copies of an image differ in the last bit, by their place in the matrix.)
_STEPS = 2.0**26
# A search key is the similarity in steps of 2**-38, then the train index in 24 bits (16.7 million images):
# all keys of a query differ, so `topk`, which is not stable, has no ties to break.
_KEY_STEPS, _INDEX_BITS = 2.0**38, 24
_LAST_INDEX = 2**_INDEX_BITS - 1


def fixed_point(x: Tensor, block: int = 8192) -> Tensor:
    """(N, D) floats -> int32 (N, D): rows scaled to norm 1, in steps of 2**-26; a zero row stays zero."""
    return torch.cat([_fixed_point(rows) for rows in x.split(block)])


def _fixed_point(x: Tensor) -> Tensor:
    x = x.double()
    norm = x.norm(dim=1, keepdim=True)
    return (x / torch.where(norm > 0, norm, 1.0)).mul_(_STEPS).round_().int()


def nearest(train: Tensor, test: Tensor, k: int, chunk: int = 16384) -> tuple[Tensor, Tensor]:
    """The k most similar train rows of every test row, best first; equal similarity: lowest index first.

    train (N, D) and test (M, D) as `fixed_point` gives them, 1 <= k <= N. Returns cosine similarities in
    [-1, 1] (float64, (M, k)) and train indices (int64, (M, k)). Train is compared `chunk` rows at a time, so
    memory grows with M x chunk.
    """
    assert 1 <= k <= len(train) <= _LAST_INDEX, f"k {k} and {len(train)} train rows"
    test = test.double()
    best = torch.empty(len(test), 0, dtype=torch.int64, device=test.device)
    for start in range(0, len(train), chunk):
        keys = _search_keys(train[start : start + chunk], test, start)
        best = torch.cat([best, _largest(keys, k)], dim=1)
        best = _largest(best, k)
    return (best >> _INDEX_BITS).double() / _KEY_STEPS, _LAST_INDEX - (best & _LAST_INDEX)


def _largest(keys: Tensor, k: int) -> Tensor:
    return keys.topk(min(k, keys.shape[1])).values


def _search_keys(train: Tensor, test: Tensor, start: int) -> Tensor:
    """int64 (M, N): larger for a more similar train row, and for the earlier of two equally similar ones."""
    similarity = test @ train.double().T
    steps = similarity.mul_(_KEY_STEPS / _STEPS**2).round_().to(torch.int64)
    order = _LAST_INDEX - torch.arange(start, start + len(train), device=train.device)
    return steps.mul_(2**_INDEX_BITS).add_(order)


def count_votes(similarity: Tensor, labels: Tensor, classes: int, temperature: float) -> Tensor:
    """Votes of the neighbours per class: int64 (M, classes), 0 only where no neighbour is of that class.

    similarity (M, k), best first; labels int64 (M, k). A vote is exp((similarity - best) / temperature) in
    steps of 2**-40, whole so that it adds up alike in any order, and at least one step, so that it counts.
    """
    weight = ((similarity - similarity[:, :1]) / temperature).exp().mul(2.0**40).round().to(torch.int64)
    votes = torch.zeros(len(labels), classes, dtype=torch.int64, device=labels.device)
    return votes.scatter_add_(1, labels, weight.clamp_(min=1))


def is_hit(votes: Tensor, truth: Tensor, top: int) -> Tensor:
    """bool (M,): the true class has a vote and is among the first `top`; equal votes: lowest class first."""
    own = votes.gather(1, truth[:, None])[:, 0]
    return (own > 0) & (places_ahead(votes, truth) < top)
