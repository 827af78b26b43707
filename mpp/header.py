"""What a run says of itself before its first step: data, model, patches, optimiser, batch, expected time."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpp.data.order import Share
from mpp.data.sources import Splits, Subset
from mpp.progress import duration, millions
from mpp.runtime import Runtime
from mpp.words import plural

Line = tuple[str, str]
FEW = 50  # held-out pictures under which the yardsticks are noise


def pretraining_header(
    config: Any, data: Splits, task: Any, share: Share, runtime: Runtime, steps: int
) -> Iterator[Line]:
    """(what, in words): everything that one would ask of a pretraining run, and what it would not think to ask."""
    yield "data", f"{data.description}; {len(data.train):,} to train on, {len(data.heldout):,} held out"
    yield from of_task(config, task)
    yield from of_training(config, len(data.train), share, steps)
    yield of_device(config, runtime)
    if len(data.heldout) < FEW:
        yield (
            "note",
            f"few pictures are held out ({len(data.heldout):,}): best constant and nearest patch say little then; "
            f"--data.heldout 0.1 keeps more",
        )
    if config.corruption.pool == "batch":
        yield "note", "random patches come from the micro-batch: results depend on how a batch is split"
    if task.backbone.has_dropout:
        yield "note", "dropout is on: results depend on how a batch is split"


def classification_header(
    config: Any, parts: tuple[Subset, Subset | None, Subset], task: Any, share: Share, runtime: Runtime, steps: int
) -> Iterator[Line]:
    """The same of a supervised run; parts: images to train on, to choose by, and to test on."""
    train, validation, test = parts
    counts = np.bincount(train.labels(), minlength=len(task.classes))  # pyright: ignore
    choose = f"{len(validation):,} to choose by" if validation else "none to choose by"
    yield "data", f"{train.dataset.description}; {len(train):,} to train on, {choose}, {len(test):,} to test on"
    each = f"{counts.min():,}" + (f" to {counts.max():,}" if counts.max() > counts.min() else "")
    yield "classes", f"{len(task.classes):,}, {each} training images of each"
    yield from of_backbone(config, task)
    frozen = "" if not config.frozen_blocks else f"; frozen blocks: {config.frozen_blocks}"
    yield "head", f"{config.head.kind} on the {config.pool} of the tokens, {config.loss.kind} loss{frozen}"
    yield from of_training(config, len(train), share, steps)
    yield of_device(config, runtime)
    if config.averaging and config.averaging.is_too_long_for(steps):
        yield (
            "note",
            f"averaging.decay {config.averaging.decay:g} remembers longer than {steps:,} steps: what is tested is to "
            f"more than a tenth the weights of the beginning; try averaging.warmup true, or a lower decay",
        )
    if test.dataset is train.dataset:
        yield (
            "note",
            f"the data has no test split, so {len(test):,} train images are tested on; "
            f"--data.heldout 0.2 keeps a fifth of train for it",
        )
    if config.mix:
        yield "note", "images are mixed within a micro-batch: results depend on how a batch is split"
    if task.backbone.has_dropout:
        yield "note", "dropout is on: results depend on how a batch is split"


def of_task(config: Any, task: Any) -> Iterator[Line]:
    """Model, patches, what is corrupted and what is predicted."""
    masked, random, kept = config.corruption.counts(task.num_corrupted)
    yield from of_backbone(config, task)
    yield "corrupted", f"{task.num_corrupted} per image: {masked} masked, {random} random, {kept} kept"
    yield "target", f"{config.target.kind}, {task.head.out_features:,} outputs per patch"


def of_backbone(config: Any, task: Any) -> Iterator[Line]:
    """Model and patches."""
    bone = task.backbone
    (h, w), (p, q), (height, width) = bone.grid, bone.patch_size, bone.image_size
    parameters = f"{millions(task)} parameters, {millions(bone)} of them backbone"
    yield "model", f"{config.backbone.kind}, width {bone.embed_dim}, {bone.depth} blocks; {parameters}"
    yield "patches", f"{h}x{w} = {h * w} of {p}x{q} pixels; image {height}x{width}, {plural(bone.channels, 'channel')}"


def of_device(config: Any, runtime: Runtime) -> Line:
    threads = f"{plural(runtime.threads, 'thread')}, {plural(config.train.workers, 'worker')}"
    return "device", f"{runtime.device}, {config.train.precision}, {threads}"


def of_training(config: Any, images: int, share: Share, steps: int) -> Iterator[Line]:
    """Optimiser, batch and length."""
    optim, batch = config.optim, share.batch_size
    rate = f"lr {optim.lr:g} (absolute), {optim.warmup_steps:,} steps of warm-up, {optim.schedule}"
    layers = "" if optim.layer_decay is None else f", layer decay {optim.layer_decay:g}"
    yield (
        "optimiser",
        f"{optim.kind}, {rate}, {optim.settings}, decay {optim.weight_decay:g}{layers}, clip {optim.clip}",
    )
    processes = plural(share.world, "process", "processes")
    yield "batch", f"{batch} = {processes} x {share.accumulation} x {share.micro_batch_size} images"
    yield "length", f"{images / batch:,.1f} steps per epoch, {steps:,} steps = {steps * batch / images:,.1f} epochs"


def of_time(seconds: float, compiled: bool) -> Line:
    """What the steps will take, from the seconds of one timed pass."""
    return "time", f"about {duration(seconds)} of training" + (", less once compiled" if compiled else "")
