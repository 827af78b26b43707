"""The job: frozen-feature evaluation of any weights, beside the same network untrained."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Gt, MinLen

from mpp.agreement import check_same_data, check_same_start
from mpp.architectures import BackboneSpec, ImageSize
from mpp.backbones import Backbone, build_backbone, choose_attention, create_backbone
from mpp.classify_recipe import ClassifyConfig
from mpp.config import RecipeError, load_recipe
from mpp.data.skipped import SkipList
from mpp.data.sources import Source, open_splits
from mpp.durable import check_can_write
from mpp.evaluation.classifier import StoredClassifier
from mpp.evaluation.features import Features, check
from mpp.evaluation.kinds import AnyEvaluation
from mpp.evaluation.knn import KNN
from mpp.exit_codes import EXIT_FAILED, EXIT_STOPPED
from mpp.metrics import JsonLines, commit, comparison
from mpp.positions import Resampling
from mpp.pretrain_recipe import PretrainConfig
from mpp.runtime import Runtime, start
from mpp.stored_classifier import stored_classifier
from mpp.weight_files import check_exists
from mpp.weights import checkpoint_at, load_backbone, load_into
from mpp.words import plural


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Frozen-feature evaluation."""

    out: Path | None = None
    """folder of results.jsonl; null = the run's own, runs/evaluate_<weights> for other weights"""
    data: Source | None = None
    """labelled images; null = those of the run"""
    image_size: ImageSize | None = None
    """pixels, or [height, width]; null = that of the weights"""
    backbone: BackboneSpec | None = None
    """the architecture of a bare file of weights, with its pixel statistics; other weights bring their own"""
    resampling: Resampling = "bilinear-corners"
    """how position embeddings are interpolated for another image_size"""
    baseline: Literal["none", "random"] = "none"
    """random: the same network with untrained weights in the same table"""
    evaluations: Annotated[tuple[AnyEvaluation, ...], MinLen(1)] = field(default_factory=lambda: (KNN(),))
    """what is measured"""
    threads: Annotated[int, Gt(0)] | None = None
    """CPU threads per process; null = cores / processes"""


def begin(weights: str, config: EvaluateConfig) -> "Evaluating":
    """Everything that can be refused, done. ValueError for whatever in weights, recipe or data cannot work."""
    return Evaluating(weights, config, start("fp32", config.threads))


class Evaluating:
    """One evaluation of some weights."""

    def __init__(self, weights: str, config: EvaluateConfig, runtime: Runtime):
        check_same_start(runtime, config)
        check_exists(weights)
        self.weights, self.config, self.runtime = weights, config, runtime
        self.run = run_of(weights)
        self.recipe = None if self.run is None else recipe_of(self.run)
        self.out = config.out or self.run or Path("runs") / f"evaluate_{Path(weights.replace(':', '_')).name}"
        data = config.data or (self.recipe.data if self.recipe else None)
        if data is None:
            raise ValueError(
                "data: needed, as these weights bring no recipe; name labelled images: "
                "--data.kind class_folders --data.path DIR"
            )
        check_can_write(self.out, "out")
        self.data: Any = data
        channels = {source.channels for source in self._sources()}
        if len(channels) > 1:
            raise ValueError(f"evaluations: data of {sorted(channels)} channels; expected the same for all")
        with runtime.accelerator.main_process_first():
            self.opened = {repr(source): open_splits(source) for source in self._sources()}
            self.backbone = self._load(channels.pop())
        parts = [part.dataset for splits in self.opened.values() for part in (splits.train, splits.heldout)]
        check_same_data(runtime, parts)
        self.classifier = stored_classifier(weights, self.backbone)
        for evaluation in config.evaluations:
            splits = self.opened[repr(evaluation.data or self.data)]
            check(evaluation, splits, self.backbone)
            if isinstance(evaluation, StoredClassifier):
                evaluation.check_classifier(self.classifier, splits.train.classes or (), splits.description)

    def _load(self, channels: int) -> Backbone:
        """The backbone of the weights, or of the recipe where they are a bare file."""
        config, weights = self.config, self.weights
        if config.backbone is None:
            return load_backbone(weights, image_size=config.image_size, resampling=config.resampling, channels=channels)
        if not Path(weights).is_file():
            raise ValueError(f"backbone: {weights} brings its own architecture; leave it out")
        backbone = build_backbone(self._spec(config.backbone, config.image_size), channels, seed=0)
        load_into(backbone, weights, config.resampling)
        return backbone

    @staticmethod
    def _spec(spec: BackboneSpec, image_size: ImageSize | None) -> BackboneSpec:
        return spec if image_size is None else replace(spec, image_size=image_size)

    def go(self) -> int:
        """Rows of results.jsonl, written as each evaluation ends, and a table; 0, or 1 where one gave no answer."""
        say = self.runtime.log
        say(f"weights    {self.backbone.origin}")
        say(f"data       {self.opened[repr(self.data)].description}")
        file = JsonLines(self.out / "results.jsonl", self.runtime.is_main)
        if self.runtime.is_main:
            self.out.mkdir(parents=True, exist_ok=True)
        backbones = {"trained": self.backbone}
        if self.config.baseline == "random":
            backbones = {"untrained": self._untrained(), **backbones}
        rows, failed = [], 0
        left = len(backbones) * len(self.config.evaluations)
        for which, backbone in backbones.items():
            features = self._features(which, backbone)
            for evaluation in self.config.evaluations:
                left -= 1
                found: list[dict[str, Any]] = []
                try:
                    for row in self._rows(which, evaluation, features):
                        found.append(row)
                except (ValueError, FloatingPointError) as error:  # the others are not lost over it
                    say(f"{evaluation.kind} gave no {'other ' if found else ''}score for the {which} backbone: {error}")
                    failed += 1
                finally:
                    self._note(features)
                file.write_new(found)
                rows += found
                if self.runtime.stop.agreed() and left:
                    say(f"stopped; what was measured is in {file.path}, and the same command measures all again")
                    return EXIT_STOPPED
        say(f"\n{comparison(rows)}\n\n{plural(len(rows), 'row')} measured: {file.path}")
        return EXIT_FAILED if failed else 0

    def _sources(self) -> list[Any]:
        return [self.data, *(e.data for e in self.config.evaluations if e.data is not None)]

    def _features(self, which: str, backbone: Backbone) -> Features:
        """Features of one of the two backbones, shared by all evaluations."""
        backbone = backbone.to(self.runtime.device)
        choose_attention(backbone, self.runtime.device, "fp32")
        features = Features(backbone, self.runtime, self.config.evaluations, self.data, self.opened, which)
        features.classifier = self.classifier if which == "trained" else None
        return features

    def _rows(self, which: str, evaluation: Any, features: Features) -> Iterator[dict[str, Any]]:
        """An evaluation's rows with what only the job knows."""
        head = {"run": str(self.run or self.weights), "step": step_of(self.run, self.weights), "backbone": which}
        size = list(features.backbone.image_size)
        for row in evaluation(features):
            yield head | row | {"setting": row["setting"] | {"image_size": size}, "commit": commit()}

    def _note(self, features: Features) -> None:
        """What could not be read, to skipped.jsonl."""
        skips = SkipList(JsonLines(self.out / "skipped.jsonl", self.runtime.is_main), self.runtime.gather_objects)
        for where, skip in features.skipped:
            skips.add(where, [skip])
        features.skipped.clear()
        skips.flush()

    def _untrained(self) -> Backbone:
        """The network before its first step: of a run that began from nothing exactly that, else of seed 0."""
        own = self.backbone
        if self.recipe is not None:
            spec = replace(self.recipe.backbone, image_size=own.image_size)
            return build_backbone(spec, own.channels, self.recipe.train.seed)
        if self.config.backbone is not None:
            return build_backbone(self._spec(self.config.backbone, self.config.image_size), own.channels, seed=0)
        return create_backbone(own.name, own.arguments, own.channels, tuple(own.mean.tolist()), tuple(own.std.tolist()))


def run_of(weights: str) -> Path | None:
    """The run folder that a spec names by itself or by one of its checkpoints; None for other weights."""
    path = Path(weights)
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    return run if path.is_dir() and (run / "recipe.yaml").is_file() else None


def recipe_of(run: Path) -> PretrainConfig | ClassifyConfig:
    """The recipe that a run was made with, of whichever job. ValueError if it is neither's."""
    errors = []
    for kind in (PretrainConfig, ClassifyConfig):
        try:
            return load_recipe(kind, [str(run / "recipe.yaml")])
        except RecipeError as error:
            errors.append(str(error))
    raise ValueError(f"{run / 'recipe.yaml'} is no recipe of a run: {min(errors, key=len)}")


def step_of(run: Path | None, weights: str) -> int | None:
    """The training step of a run's weights."""
    return None if run is None else checkpoint_at(Path(weights)).step
