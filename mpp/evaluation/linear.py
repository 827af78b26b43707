"""Linear probe: softmax regression on cached frozen features, its setting chosen on a slice of train (METHOD.md 4)."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Lt, MinLen
from torch import Tensor

from mpp.backbones import Layers, Readout
from mpp.data.sources import Source
from mpp.evaluation.checks import check_features, check_labels, repeats
from mpp.evaluation.scores import at_edge, check_can_hold_back, check_learned, choose, hold_back, summary, tops_of
from mpp.evaluation.shots import Shots, check_shots, draw, possible
from mpp.evaluation.softmax_regression import BLOCK, LBFGS, SGD, Solver

if TYPE_CHECKING:
    from mpp.evaluation.features import Features, Split


@dataclass(frozen=True, kw_only=True)
class LinearProbe:
    """Accuracy of a linear classifier on cached frozen features, standardised by the train images' statistics.

    With more than one setting in the solver's sweep the best is chosen on a slice of train, and fitted again on all of
    it; test is looked at once, at the end.
    """

    kind: Literal["linear"] = "linear"
    data: Source | None = None
    """labelled images to evaluate on; null: those of the pretraining"""
    pool: Annotated[tuple[Readout, ...], MinLen(1)] = ("mean",)
    """features, several in turn: mean of the patch tokens, class token, or both: one behind the other"""
    layers: Annotated[Layers, MinLen(1)] = (-1,)
    """blocks after which features are taken; -1 is the last; all: every one"""
    shots: Annotated[tuple[Shots, ...], MinLen(1)] = ("all",)
    """train images per class; all: the full train split"""
    seeds: Annotated[int, Ge(1)] = 1
    """draws of images, slices and orders; value, spread and interval are over them"""
    validation: Annotated[float, Gt(0), Lt(1)] = 0.1
    """share of the train images of each class on which the setting is chosen"""
    solver: Solver = field(default_factory=LBFGS)
    """how the classifier is found, and what is swept"""

    def faults(self) -> Iterator[tuple[str, str]]:
        yield from repeats(pool=self.pool, layers=self.layers, shots=self.shots)
        if 1 in self.shots and len(self.solver.sweep[1]) > 1:
            yield "shots", "1 leaves no train image to choose a setting on; give the solver one value, or more shots"

    def check(self, split: "Split") -> None:
        """ValueError for what cannot be evaluated; reads only train_y, test_y, classes and name."""
        check_labels(split)
        check_shots(split, self.shots)
        if len(self.solver.sweep[1]) > 1:
            check_can_hold_back(split.train_y, split.name)

    def __call__(self, features: "Features") -> Iterator[dict[str, Any]]:
        """One row per pool, layer, shots and metric; `chosen`: per seed, what was chosen, by which score, and how
        the fit ended. `seconds`: all seeds and settings, without the features.
        """
        for pool, layer in features.readouts(self):
            split = features.get(self.data, pool, layer)
            check_labels(split)
            check_features(split)
            check_varies(split)
            for shots in possible(split, self.shots):
                yield from self._rows(features, split, shots, {"pool": pool, "layer": layer})
        self.check(split)

    def _rows(
        self, features: "Features", split: "Split", shots: Shots, where: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        started, images, tops = time.perf_counter(), len(split.test_y), tops_of(len(split.classes))
        name, values = self.solver.sweep
        chosen_by = {"validation": self.validation} if len(values) > 1 else {}
        setting = {"shots": shots, "solver": self.solver.kind, name: list(values), **chosen_by}
        setting |= {**self.solver.settings, **where}
        words = told({"shots": shots, "solver": self.solver.kind, **where})
        results = [self._probed(split, shots, seed, features.runtime.device) for seed in range(self._seeds(shots))]
        chosen = [one for _, one in results]
        seconds = round(time.perf_counter() - started, 3)
        if not all(one.get("converged", True) for one in chosen):
            limit = getattr(self.solver, "max_iterations", None)
            features.note(self.kind, split.name, f"{words}: not converged in {limit} iterations")
        if any(one["at_edge"] for one in chosen):
            best = ", ".join(dict.fromkeys(f"{one[name]:g}" for one in chosen))
            told_edge = f"{name} {best} is at the edge of its sweep; a wider one may find better"
            features.note(self.kind, split.name, f"{words}: {told_edge}")
        for place, top in enumerate(tops):
            yield {
                "evaluation": self.kind,
                "dataset": split.name,
                "setting": setting,
                "metric": f"top{top}",
                **summary([int(right[place]) / images for right, _ in results]),
                "images": images,
                "seconds": seconds,
                "chosen": chosen,
            }

    def _seeds(self, shots: Shots) -> int:
        """Every seed would give the same where nothing is drawn: neither images, nor a slice, nor an order."""
        drawn = shots != "all" or len(self.solver.sweep[1]) > 1 or isinstance(self.solver, SGD)
        return self.seeds if drawn else 1

    def _probed(self, split: "Split", shots: Shots, seed: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Hits on test for each top, and what was chosen on the way."""
        ids = draw(split.train_y, shots, seed)
        x, y, classes = split.train_x[ids], split.train_y[ids], len(split.classes)
        name, settings = self.solver.sweep
        best, score = 0, None
        if len(settings) > 1:
            held = hold_back(y, ids, self.validation, seed)
            fits = self.solver.fit(x[~held], y[~held], classes, settings, seed, device)
            scores = [fit.top1(x[held], y[held]) for fit in fits]
            best = choose(scores)
            score = scores[best]
        fit = self.solver.fit(x, y, classes, settings[best : best + 1], seed, device)[0]
        check_learned(fit.loss, classes, f"linear on {split.name}, {name} {settings[best]:g}")
        chosen = {name: settings[best], "validation": score, "at_edge": at_edge(best, len(settings))}
        chosen |= {"train_loss": fit.loss} | ({} if fit.converged is None else {"converged": fit.converged})
        return fit.hits(split.test_x, split.test_y, tops_of(classes)), chosen


def told(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items())


def check_varies(split: "Split") -> None:
    """ValueError where no feature differs between train images by more than float32's rounding."""
    x = split.train_x
    middle = x.double().mean(0)
    spread = torch.stack([(rows.double() - middle).abs().amax(0) for rows in x.split(BLOCK)]).amax(0)
    if not (spread > 1e-6 * middle.abs()).any():
        raise ValueError(
            f"evaluation on {split.name}: all {len(x)} train images have the same features; the backbone has "
            f"collapsed, or was given the same picture every time"
        )
