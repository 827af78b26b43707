"""k nearest neighbours on frozen features: what they say with nothing trained on top (METHOD.md 4)."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, MinLen
from torch import Tensor

from mpp.backbones import Layers, Readout
from mpp.data.sources import Source
from mpp.evaluation.scores import places_ahead, summary, tops_of

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
    "numbers of neighbours; more than there are train images becomes all of them"
    temperature: Annotated[float, Gt(0)] = 0.07
    "how fast a neighbour's vote falls with its distance"

    def faults(self) -> Iterator[tuple[str, str]]:
        yield from repeats(pool=self.pool, layers=self.layers, k=self.k)

    def check(self, split: "Split") -> None:
        """ValueError for what cannot be evaluated; reads only train_y, test_y, classes and name."""
        check_labels(split)

    def __call__(self, features: "Features") -> Iterator[dict[str, Any]]:
        """One row per pool, layer, k and metric. `seconds`: the search they share, without the features."""
        for pool, layer in features.readouts(self):
            split = features.get(self.data, pool, layer)
            self.check(split)
            check_features(split)
            yield from self._rows(split, {"pool": pool, "layer": layer})

    def _rows(self, split: "Split", where: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        started, images = time.perf_counter(), len(split.test_y)
        ks = sorted({min(k, len(split.train_y)) for k in self.k})
        hits = count_hits(split, ks, self.temperature)
        seconds = round(time.perf_counter() - started, 3)
        for (k, top), count in hits.items():
            yield {
                "evaluation": self.kind,
                "dataset": split.name,
                "setting": {"k": k, "temperature": self.temperature, **where},
                "metric": f"top{top}",
                **summary([count / images]),
                "images": images,
                "seconds": seconds,
            }


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


def check_labels(split: "Split") -> None:
    """ValueError unless there are two classes or more, each with train images, numbered by the labels."""
    classes, where = split.classes, f"evaluation on {split.name}"
    if len(classes) < 2:
        raise ValueError(f"{where}: expected 2 or more classes, got {len(classes)}; name labelled `data`")
    for part, labels in {"train": split.train_y, "test": split.test_y}.items():
        if len(labels) == 0:
            raise ValueError(f"{where}: the {part} split has no images")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= len(classes):
            raise ValueError(f"{where}: {part} labels must be 0..{len(classes) - 1}, got {low}..{high}")
    counts = torch.bincount(split.train_y, minlength=len(classes)).tolist()
    missing = [repr(name) for name, count in zip(classes, counts, strict=True) if count == 0]
    if missing:
        raise ValueError(f"{where}: {len(missing)} of {len(classes)} classes have no train image: {listed(missing)}")


def check_features(split: "Split") -> None:
    """ValueError where a feature is NaN or infinite: no neighbour and no fit means anything then."""
    for part, x in {"train": split.train_x, "test": split.test_x}.items():
        bad = sum(int((~rows.isfinite()).any(dim=1).sum()) for rows in x.split(8192))
        if bad:
            raise ValueError(
                f"evaluation on {split.name}: {bad} of {len(x)} {part} images have NaN or infinite features; "
                "the backbone has diverged, or overflows in this precision"
            )


def repeats(**fields: tuple[Any, ...] | str) -> Iterator[tuple[str, str]]:
    """Faults of a recipe section: (field, message) for every list that names a value twice."""
    for field, values in fields.items():
        listed = () if isinstance(values, str) else values  # a word, such as `all`, is no list
        twice = sorted({str(value) for value in listed if listed.count(value) > 1})
        if twice:
            yield field, f"names {', '.join(twice)} more than once"


def listed(names: list[str], most: int = 5) -> str:
    """The first few of many names, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
