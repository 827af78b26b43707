"""The job: supervised training of a classifier. Fine-tuning, from scratch and pretraining on labels are one thing."""

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from mpp.averaging import averaged
from mpp.backbones import build_backbone, choose_attention
from mpp.checkpoint import Checkpoint
from mpp.classify_recipe import FREE, SCRATCH, ClassifyConfig
from mpp.data.dataset import check_classes
from mpp.data.loader import FixedViews, TrainingViews
from mpp.data.order import Order
from mpp.data.sources import Subset, open_splits, require_labels, require_test_images
from mpp.evaluation.features import name_of
from mpp.evaluation.imagenet_real import Labels, check_imagenet_classes, numbered, read_real, real_score
from mpp.evaluation.scoring import Scored, score
from mpp.export import classifier_tensors, timm_config
from mpp.header import classification_header
from mpp.inspection import confusion
from mpp.job import Job
from mpp.kept_weights import KeptWeights
from mpp.metrics import commit
from mpp.optim import LearningRate
from mpp.predictions import check_out, open_unlabelled, told_unreadable, write_predictions
from mpp.runtime import Runtime, start
from mpp.tasks import Classification
from mpp.trainer import Event
from mpp.weights import load_into, load_strictly, objective_tensors
from mpp.words import plural

TOLD = ("top1", "top5", "mean_class_accuracy", "real_top1")
EVALUATIONS = ("classification", "imagenet_real")  # evaluations of this job: others may stand in the same file
LIVE = "state/live.safetensors"


def classify(config: ClassifyConfig) -> int:
    """Runs, or goes on with, the run in `config.out`. Returns the exit code: 0 done, 75 stopped by a signal.

    ValueError for whatever in recipe, data, weights or folder cannot work, before the first step.
    """
    return begin(config).go()


def begin(config: ClassifyConfig, is_part: bool = False) -> "Classifying":
    """Everything that can be refused, done; nothing is trained or written yet but the run folder's recipe.

    is_part: see `Job`.
    """
    train = config.train
    runtime = start(train.precision, train.threads, train.trackers, config.out, train.signals)
    return Classifying(config, runtime, is_part)


class Classifying(Job):
    """One supervised run."""

    free = FREE
    task: Classification

    def __init__(self, config: ClassifyConfig, runtime: Runtime, is_part: bool = False):
        super().__init__(config, runtime, is_part)
        train = config.train
        with runtime.accelerator.main_process_first():  # downloads and caches are made once
            splits = open_splits(config.data)
        require_labels(splits, "classification")
        require_test_images(splits)
        if config.mix:
            config.mix.check_micro_batch(self.share.micro_batch_size)
        self.train, self.validation = config.labels.split(splits.train)
        self.test, self.classes = splits.heldout, splits.train.classes or ()
        self.data_parts, self.data_description = (splits.train.dataset, splits.heldout.dataset), splits.description
        self.backbone = build_backbone(config.backbone, config.data.channels, train.seed)
        self.origin = None if self._has_saved() else self._initialize()
        choose_attention(self.backbone, runtime.device, train.precision)
        self.task = self._make_task()
        self.learning_rate = LearningRate(config.optim, self._planned_steps(len(self.train)), train.extend)
        self.optimizer, self.names = config.optim.build(self.task)
        self.real = self._read_real() if config.real else None
        data = config.data
        if config.predictions:
            check_out(config.predictions, "predictions")
        self.unlabelled = open_unlabelled(config.predict, data.channels, data.range) if config.predict else None
        size, order = self.backbone.image_size, Order(len(self.train), train.seed)
        self.train_views = TrainingViews(self._pictures(self.train), order, config.augment, size)
        self._open()
        if self.found is None and self.origin is None:  # its checkpoints were there, and none was whole
            self.origin = self._initialize()

    def _initialize(self) -> str:
        """The weights to begin with, into the backbone; a sentence on them."""
        config = self.config
        return SCRATCH if config.init == SCRATCH else load_into(self.backbone, config.init, config.resampling)

    def _make_task(self) -> Classification:
        config = self.config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.train.seed)
            head = config.head.build(self.backbone.embed_dim, len(self.classes))
        return Classification(
            self.backbone,
            head,
            self.classes,
            config.pool,
            config.loss,
            config.mix,
            config.frozen_blocks,
            config.train.seed,
        )

    def _read_real(self) -> Labels:
        """real.json, and what it needs of the data: refused now rather than after training."""
        check_imagenet_classes(self.classes)
        assert self.config.real is not None
        numbered(_names(self.test))
        labels = read_real(self.config.real)
        real_score(torch.zeros(len(self.test), dtype=torch.int64), _names(self.test), labels)  # names what is missing
        return labels

    def _make_trainer(self):
        trainer = super()._make_trainer()  # moves the task to its device, where its average belongs
        self.weights = KeptWeights(self.task, self.config.averaging)
        return trainer

    def _is_split_sensitive(self) -> bool:
        return self.config.mix is not None or super()._is_split_sensitive()

    def _header(self) -> Iterator[tuple[str, str]]:
        parts = (self.train, self.validation, self.test)
        yield from classification_header(self.config, parts, self.task, self.share, self.runtime, self.total_steps)
        yield "init", self.origin or "a checkpoint of this run"

    def _before_the_first_step(self) -> bool:
        return not self.runtime.stop.agreed()

    def _events(self) -> list[Event]:
        skipped, evaluate, save = super()._events()
        return [skipped, evaluate, Event("test", 0, self._test, last=True), save]

    def _after_update(self, step: int) -> None:
        self.weights.update(step)

    def _evaluate(self, step: int) -> None:
        """Loss and accuracy on the images kept back; where none are, on the test images, which choose nothing."""
        if self.validation is None:
            if not self.trainer.is_last(self.total_steps):  # then it is tested anyway
                with self.weights.judged():
                    self._measure(step, "test", self.test)
            return
        with self.weights.judged():
            accuracy = self._measure(step, "validation", self.validation)
            if self.config.early_stopping:
                self.weights.judge(accuracy, step)
        best = self.weights.best
        if self.config.early_stopping and best.without >= self.config.early_stopping.patience:
            self.runtime.log(f"no better than at step {best.step:,} for {best.without} evaluations: stopping")
            self.trainer.end_here()

    def _measure(self, step: int, split: str, subset: Subset) -> float:
        """A line of metrics.jsonl; top-1 accuracy."""
        scored = self._score(split, subset)
        counts = scored.counts(len(self.classes))
        record = {"step": step, f"{split}_loss": scored.loss, f"{split}_accuracy": counts.top1}
        self.files.metrics.write_new([record])
        self._track(record)
        self.runtime.log(f"step {step:,}: {split} loss {scored.loss:.4f}, accuracy {100 * counts.top1:.2f} %")
        return counts.top1

    def _score(self, where: str, subset: Subset) -> Scored:
        views = FixedViews(self._pictures(subset), self.backbone.image_size, self.config.view)
        self.task.eval()
        sigmoid = self.config.loss.kind == "sigmoid"
        scored = score(self.task.logits, len(self.classes), views, self.runtime, sigmoid)
        self.skips.add(where, scored.skipped)
        return scored

    def _test(self, step: int) -> None:
        """Rows of results.jsonl for the weights that are kept, and the picture of what is taken for what."""
        began = time.perf_counter()
        with self._kept():
            scored = self._score("test", self.test)
        counts, dataset, setting = scored.counts(len(self.classes)), name_of(self.config.data), self._setting(step)
        seconds = time.perf_counter() - began
        rows = [*counts.rows(dataset, setting, seconds), *counts.class_rows(dataset, setting, seconds, self.classes)]
        if self.real:
            rows.append(self._real_row(scored, setting, seconds))
        self._write_rows(step, rows)
        if self.runtime.is_main and not counts.is_large:
            path = self.files.path / "pictures" / "confusion.png"
            title = f"{self.files.path}: {dataset}, test; {len(self.train):,} labels, step {setting['kept_step']:,}"
            confusion.draw(counts.confusion.numpy(), self.classes, path, title)

    def _setting(self, step: int) -> dict[str, Any]:
        """What identifies the rows of a test."""
        config = self.config
        return {
            "init": config.init,
            "train_images": len(self.train),
            "image_size": self.backbone.image_size,
            "view": config.view.kind,
            "crop": config.view.crop,
            "pool": config.pool,
            "kept_step": self.weights.best.step or step,
        }

    def _real_row(self, scored: Scored, setting: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Accuracy by the labels of ImageNet-ReaL, of the pictures that could be read."""
        assert self.real is not None
        names = [name for name, good in zip(_names(self.test), scored.good.tolist(), strict=True) if good]
        real = real_score(scored.top[scored.good, 0], names, self.real, allow_missing=len(names) < len(self.test))
        return real.row(name_of(self.config.data), setting, seconds)

    def _write_rows(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        head = {"run": str(self.files.path), "step": step, "backbone": "trained"}
        self.files.results.write_new(head | row | {"commit": commit()} for row in rows)

    def _catch_up_with_real(self) -> None:
        """The row of ImageNet-ReaL for a run that was tested before its real.json was named."""
        step = self.trainer.step
        rows = self.files.results.read()
        if self.runtime.on_main(lambda: any(row["metric"] == "real_top1" and row["step"] == step for row in rows)):
            return
        began = time.perf_counter()
        with self._kept():
            scored = self._score("test", self.test)
        self.skips.flush()
        self._write_rows(step, [self._real_row(scored, self._setting(step), time.perf_counter() - began)])

    def _predict(self) -> None:
        """Classes of the new images; all processes read, one writes."""
        assert self.unlabelled is not None
        with self._kept():
            scored = self._score("predict", self.unlabelled)
        self.skips.flush()
        path = self.config.predictions or self.files.path / "predictions.csv"
        if self.runtime.is_main:
            write_predictions(path, self.unlabelled, scored, self.classes)
        unreadable = self.runtime.gather_objects(scored.skipped)
        for line in told_unreadable(unreadable):
            self.runtime.log(line)
        good = len(scored.good) - len(unreadable)
        self.runtime.log(f"{plural(good, 'image')} of {self.config.predict} classified: {path}")

    def _kept(self) -> AbstractContextManager[None]:
        """Inside, the weights that are tested and exported."""
        return self.weights.kept(self.trainer.is_last(self.total_steps))

    def _contents(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """A timm folder that classifies, where timm can; the head beside it; and what going on needs."""
        head, config = self.task.head, self.config
        tensors: dict[str, dict[str, Tensor]] = {}
        live = {name: tensor.detach().cpu().clone() for name, tensor in averaged(self.task).items()}
        beside, documents = self.weights.state()
        with self._kept():
            whole = classifier_tensors(self.backbone, head.last, config.pool) if head.hidden is None else None
            model = self.backbone.model.state_dict() if whole is None else whole
            tensors["model.safetensors"] = {name: t.detach().cpu().clone() for name, t in model.items()}
            tensors["objective.safetensors"] = {n: t.cpu().clone() for n, t in objective_tensors(self.task).items()}
            is_live = all(torch.equal(live[name], t.cpu()) for name, t in averaged(self.task).items())
        if not is_live:
            tensors[LIVE] = live
        return tensors | beside, documents | {
            "config.json": timm_config(
                self.backbone, self.classes if whole is not None else None, config.pool, config.view
            ),
            "objective.json": {"classes": list(self.classes), "pool": config.pool, "init": config.init}
            | {"range": config.data.range}
            | {name: asdict(getattr(config, name)) for name in ("head", "loss", "view")},
        }

    def _restore(self, found: Checkpoint) -> None:
        where = str(found.path)
        check_classes(found.document("objective.json")["classes"], self.classes, self.data_description)
        load_into(self.backbone, where)
        load_strictly(self.task.head, _under("head.", found.tensors("objective.safetensors")), where)
        if LIVE in found.files:
            live = averaged(self.task)
            for name, tensor in found.tensors(LIVE).items():
                live[name].data.copy_(tensor)
        self.weights.load(found)

    def _tell_the_end(self) -> None:
        run, log = self.files.path, self.tell
        if self.real:
            self._catch_up_with_real()
        log(f"\nfinished: step {self.trainer.step:,} in {run}; pictures in {run / 'pictures'}")
        if len(self.skips):
            log(f"{len(self.skips):,} pictures could not be used: {self.skips.file.path}")
        for row in self.files.results.read():
            if row["evaluation"] in EVALUATIONS and row["metric"] in TOLD and row["step"] == self.trainer.step:
                log(f"{row['dataset']} test, {row['metric']}: {100 * row['value']:.2f} % of {row['images']:,} images")
        if self.unlabelled:
            self._predict()
        folder = run / "checkpoints" / f"{self.trainer.step:08}"
        log("\nnext:")
        log(f"  open it in timm:         timm.create_model('local-dir:{folder}', pretrained=True)")
        log(f"  classify new images:     python tools/predict.py {run} --images DIR")
        if self.config.init != SCRATCH:
            log(f"  compare with scratch:    the same command with --init scratch --out {run}_scratch")
        if not self.config.early_stopping:
            log(f"  train this run longer:   the same command with {self._longer()}")


def _names(subset: Subset) -> list[str]:
    return [subset.dataset.name(int(id)) for id in subset.ids]


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
