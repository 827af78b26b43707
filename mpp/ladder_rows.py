"""The ladder's rows: the ways to begin a fine-tuning, and the recipe of each fine-tuned run."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mpp.checkpoint import Checkpoint, is_valid, places, step_of
from mpp.classify_recipe import SCRATCH, ClassifyConfig
from mpp.data.budget import All, PerClass
from mpp.ladder_recipe import Budget, LadderConfig, in_order
from mpp.metrics import JsonLines
from mpp.patches import pair
from mpp.pretrain_recipe import PretrainConfig

MPP, LONGER, SUPERVISED = "mpp", "scratch, total compute", "supervised"
TITLES = {
    MPP: "fine-tuned from MPP",
    SCRATCH: "trained from scratch",
    LONGER: "trained from scratch, total compute",
    SUPERVISED: "fine-tuned from supervised",
}
DIVERGED = "diverged.txt"  # in the folder of a sweep's run: what went wrong


@dataclass(frozen=True)
class Start:
    """One way to begin a fine-tuning: its name, its weights, steps more than the recipe's."""

    name: str
    init: str
    more_steps: int = 0

    @property
    def title(self) -> str:
        """Its name in the table."""
        return TITLES[self.name]


@dataclass(frozen=True)
class Asked:
    """All that a ladder has been asked for, by whichever command and process: what its table shows."""

    steps: dict[Budget, int]
    """of the fine-tuning at each budget, fewest labels first"""
    seeds: int
    starts: dict[str, Start]

    def joined(self, later: "Asked") -> "Asked":
        steps = self.steps | later.steps
        starts = self.starts | later.starts
        return Asked(
            {budget: steps[budget] for budget in in_order(steps)},
            max(self.seeds, later.seeds),
            {name: starts[name] for name in TITLES if name in starts},
        )

    def document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    @classmethod
    def of(cls, document: dict[str, Any]) -> "Asked":
        """The inverse of `document`; nothing asked for where there is none."""
        steps: dict[Budget, int] = {}
        for budget, count in document.get("steps", {}).items():  # JSON has no other keys than strings
            steps["all" if budget == "all" else int(budget)] = count
        starts = {name: Start(**start) for name, start in document.get("starts", {}).items()}
        return cls(steps, document.get("seeds", 0), starts)


class Rows:
    """What is fine-tuned, from which weights, for how long, and where; reads no image and trains nothing."""

    def __init__(self, recipe: PretrainConfig, config: LadderConfig, out: Path, checkpoint: Checkpoint):
        self.recipe, self.config, self.out, self.checkpoint = recipe, config, out, checkpoint
        self.weights = out / "weights"
        self.data = config.data or recipe.data
        self.backbone = replace(recipe.backbone, **self._backbone_fields())
        self.starts = list(self._starts())

    def _backbone_fields(self) -> dict[str, Any]:
        """What the fine-tuning's backbone has of its own. ValueError for a kind of backbone without such a field."""
        config, found = self.config, {}
        for name in ("image_size", "drop_path", "dropout"):
            if (value := getattr(config, name)) is not None:
                if not hasattr(self.recipe.backbone, name):
                    raise ValueError(f"{name}: a backbone of kind {self.recipe.backbone.kind} has none; leave it out")
                found[name] = value
        return found

    def _starts(self) -> Iterator[Start]:
        yield Start(MPP, str(self.weights))
        yield Start(SCRATCH, SCRATCH)
        if self.config.total_compute:
            yield Start(LONGER, SCRATCH, self._pretraining_steps())
        if self.config.supervised:
            yield Start(SUPERVISED, self.config.supervised)

    def _pretraining_steps(self) -> int:
        """Fine-tuning steps that cost what pretraining did: images seen, by tokens per image."""
        seen = self.checkpoint.step * self.recipe.train.batch_size
        before = self.checkpoint.document("config.json")["pretrained_cfg"]["input_size"][-2:]
        now = before if self.backbone.image_size is None else pair(self.backbone.image_size)
        share = before[0] * before[1] / (now[0] * now[1])
        return round(seen * share / self.config.finetune.train.batch_size)

    def places(self) -> Iterator[tuple[Start, Budget]]:
        """The cells of fine-tuned runs that are asked for."""
        for start in self.starts:
            for budget in self.config.budgets:
                yield start, budget

    def steps(self, start: Start, budget: Budget) -> int:
        """Fine-tuning steps of a row."""
        return self.config.steps_of(budget) + start.more_steps

    @property
    def asked(self) -> Asked:
        """What this command asks for."""
        steps: dict[Budget, int] = {budget: self.config.steps_of(budget) for budget in self.config.budgets}
        return Asked({}, 0, {}).joined(Asked(steps, self.config.seeds, {start.name: start for start in self.starts}))

    def row(self, start: Start, budget: Budget, seed: int, rate: float) -> ClassifyConfig:
        """The recipe of one entry of the table."""
        return self._made(start, budget, seed, rate, self.folder(start, budget, seed), 0.0)

    def folder(self, start: Start, budget: Budget, seed: int) -> Path:
        """Where the run of an entry lies."""
        return self.out / "runs" / f"{slug(start.name)}_{budget}_seed{seed}"

    def trial(self, start: Start, rate: float) -> ClassifyConfig:
        """The recipe of one learning rate of the sweep: judged on a part of the first budget's labels."""
        budget = self.config.budgets[0]
        out = self.out / "runs" / f"{slug(start.name)}_{budget}_seed0_choose_lr{rate!r}"
        return self._made(start, budget, 0, rate, out, self.config.choose_on)

    def rates(self, start: Start) -> tuple[float, ...]:
        """Learning rates that are tried; none for more steps from scratch, which take the rate of scratch."""
        swept = len(self.config.learning_rates) > 1 and not start.more_steps
        return tuple(sorted(self.config.learning_rates)) if swept else ()

    @property
    def plain_rate(self) -> float:
        """The learning rate where none is chosen."""
        return self.config.learning_rates[0] if len(self.config.learning_rates) == 1 else self.config.finetune.optim.lr

    def _made(
        self, start: Start, budget: Budget, seed: int, rate: float, out: Path, validation: float
    ) -> ClassifyConfig:
        base, labels = self.config.finetune, labels_of(budget, seed)
        return replace(
            base,
            out=out,
            init=start.init,
            data=self.data,
            labels=replace(labels, validation=validation) if validation else labels,
            backbone=self.backbone,
            optim=replace(base.optim, lr=rate),
            train=replace(base.train, seed=seed, steps=self.steps(start, budget)),
        )


def is_done(asked: ClassifyConfig) -> bool:
    """Whether a run has nothing left: its last checkpoint stands, and its accuracy."""
    run, steps = asked.out, asked.train.steps
    assert run is not None and steps is not None
    if not asked.labels.validation:
        measured = tested(run, steps) is not None
    elif (run / DIVERGED).exists():
        return True
    else:
        measured = judged(run) is not None
    saved = (place for place in places(run) if step_of(place) >= steps)
    return measured and any(is_valid(place, sizes_only=True) for place in saved)


def tested(run: Path, steps: int) -> float | None:
    """Test accuracy of a classification run at its end, None before."""
    found = [
        row["value"]
        for row in JsonLines(run / "results.jsonl").read()  # evaluate adds rows of its own kinds to the same file
        if (row["evaluation"], row["metric"], row["step"]) == ("classification", "top1", steps)
    ]
    return found[-1] if found else None


@dataclass(frozen=True, order=True)
class Judged:
    """What a learning rate gave on the images that were kept back; the better one is the larger."""

    accuracy: float
    minus_loss: float


def judged(run: Path | None) -> Judged | None:
    """The last measurement of a sweep's run; None before, and where it diverged."""
    assert run is not None
    if (run / DIVERGED).exists():
        return None
    rows = [row for row in JsonLines(run / "metrics.jsonl").read() if row.get("validation_accuracy") is not None]
    return Judged(rows[-1]["validation_accuracy"], -rows[-1]["validation_loss"]) if rows else None


def rate_of(run: Path) -> float:
    """The learning rate that a run was made with."""
    return float(yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))["optim"]["lr"])


def labels_of(budget: Budget, seed: int) -> All | PerClass:
    return All(seed=seed) if budget == "all" else PerClass(count=budget, seed=seed)


def slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")
