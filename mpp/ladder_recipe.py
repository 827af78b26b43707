"""The recipe of the ladder: what is compared, at which budgets, and what every fine-tuning of it has in common."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt, MinLen

from mpp.architectures import ImageSize
from mpp.classify_recipe import ClassifyConfig
from mpp.data.sources import Source
from mpp.evaluation.checks import repeats
from mpp.evaluation.fewshot import FewShot
from mpp.evaluation.kinds import Evaluation
from mpp.evaluation.knn import KNN
from mpp.evaluation.linear import LinearProbe
from mpp.words import plural

Budget = Annotated[int, Ge(1)] | Literal["all"]
OWN = {  # where the ladder has a field of its own for what a fine-tuning names otherwise
    "out": "set out",
    "init": "set supervised for a start of other weights",
    "data": "set data",
    "labels": "set budgets, seeds and choose_on",
    "backbone": "set image_size, drop_path and dropout",
}


def in_order(budgets: Iterable[Budget]) -> list[Budget]:
    """Each once, fewest labels first."""
    return sorted(set(budgets), key=lambda budget: float("inf") if budget == "all" else budget)


def bare(evaluation: Evaluation) -> Evaluation:
    """A frozen score as `frozen` names it: without the ladder's budgets and seeds."""
    has_budgets = isinstance(evaluation, KNN | LinearProbe)
    return replace(evaluation, shots=("all",), seeds=1) if has_budgets else evaluation


@dataclass(frozen=True, kw_only=True)
class LadderConfig:
    """The ladder after pretraining: frozen features and fine-tuning at several label budgets."""

    out: Path | None = None
    """folder of the fine-tuned runs, the table and the picture; null = runs/ladder_<run>"""
    data: Source | None = None
    """labelled images; null = those of the pretraining run"""
    budgets: Annotated[tuple[Budget, ...], MinLen(1)] = (10, 50, 500, "all")
    """labelled training images per class"""
    seeds: Annotated[int, Gt(0)] = 3
    """draws of the labels, and seeds of the fine-tuning, for each budget"""
    image_size: ImageSize | None = None
    """pixels of the fine-tuning; null = those of the pretraining"""
    steps: tuple[Annotated[int, Gt(0)], ...] = ()
    """fine-tuning steps at each budget, one for each; none = finetune.train.steps at all"""
    frozen: tuple[Evaluation, ...] = field(default_factory=lambda: (KNN(k=(20,)), LinearProbe()))
    """frozen-feature scores beside few-shot, which comes by itself; kNN and linear at every budget and on all labels"""
    finetune: ClassifyConfig = field(default_factory=ClassifyConfig)
    """the fine-tuning, the same for every start; data, labels, backbone, init, out and seed are the ladder's"""
    drop_path: Annotated[float, Ge(0), Lt(1)] | None = None
    """stochastic depth of the fine-tuned backbone, for every start; null = that of the pretraining"""
    dropout: Annotated[float, Ge(0), Lt(1)] | None = None
    """dropout of the fine-tuned backbone, for every start; null = that of the pretraining"""
    learning_rates: tuple[Annotated[float, Gt(0)], ...] = ()
    """swept alike for every start, on seed 0 of the first budget, chosen on a slice of its labels; none: optim.lr"""
    choose_on: Annotated[float, Gt(0), Lt(1)] = 0.2
    """share of the first budget's labels that the sweep is judged on, where there are two learning_rates or more"""
    total_compute: bool = True
    """one more row from scratch, given the images that pretraining saw as further steps, at the rate of scratch"""
    supervised: str | None = None
    """weights of a supervised pretraining, for a row of their own"""

    def faults(self) -> Iterator[tuple[str, str]]:
        """What the ladder sets by itself, and what its rows could not be compared with."""
        unset = ClassifyConfig()
        for name in ("out", "init", "data", "labels", "backbone", "early_stopping", "real", "predict", "predictions"):
            if getattr(self.finetune, name) != getattr(unset, name):
                yield f"finetune.{name}", f"is the ladder's own in each of its runs; {OWN.get(name, 'leave it out')}"
        for place, one in enumerate(self.frozen):
            if isinstance(one, FewShot):
                yield f"frozen.{place}", "is few-shot, which comes by itself at every budget; leave it out"
            if one != bare(one):
                yield f"frozen.{place}.shots", "are the ladder's budgets, and seeds its seeds; leave both out"
        if self.finetune.train.extend:
            yield "finetune.train.extend", "would train some rows longer than the table says; set finetune.train.steps"
        if self.finetune.train.seed != unset.train.seed:
            yield "finetune.train.seed", "is the ladder's own in each of its runs; set seeds"
        if self.finetune.train.steps is None:
            yield "finetune.train.steps", "is null, and rows of equal length need a number of steps"
        if self.steps and len(self.steps) != len(self.budgets):
            told = f"{plural(len(self.steps), 'number')} for {plural(len(self.budgets), 'budget')}"
            yield "steps", f"{told}; give one for each, or none"
        yield from repeats(budgets=self.budgets, learning_rates=self.learning_rates, frozen=self.frozen)

    def evaluations(
        self, budgets: Sequence[Budget], seeds: int, before: Iterable[Evaluation] = ()
    ) -> tuple[Evaluation, ...]:
        """The frozen-feature scores, at every budget and on all; a probe that chooses needs two images of a class.

        before: such scores that other commands have asked for, as this method made them; they are asked for as well.
        """
        found: list[Any] = [FewShot(shots=tuple(budgets), seeds=seeds)]
        known = [bare(one) for one in before if not isinstance(one, FewShot)]
        for one in [*known, *(one for one in self.frozen if one not in known)]:
            if isinstance(one, KNN | LinearProbe):
                is_choosing = isinstance(one, LinearProbe) and len(one.solver.sweep[1]) > 1
                few = tuple(budget for budget in budgets if budget != "all" and (budget > 1 or not is_choosing))
                found.append(replace(one, shots=(*few, "all"), seeds=seeds))
            else:
                found.append(one)
        return tuple(found)

    def steps_of(self, budget: Budget) -> int:
        """Fine-tuning steps at a budget."""
        if self.steps:
            return self.steps[self.budgets.index(budget)]
        assert self.finetune.train.steps is not None, "the recipe's faults ask for steps"
        return self.finetune.train.steps
