"""What a run says of itself before its first step: data, model, patches, optimiser, batch, expected time."""

from collections.abc import Iterator
from typing import Any

from mpp.data.order import Share
from mpp.data.sources import Splits
from mpp.progress import duration, millions
from mpp.runtime import Runtime

Line = tuple[str, str]


def header(config: Any, data: Splits, task: Any, share: Share, runtime: Runtime, steps: int) -> Iterator[Line]:
    """(what, in words): everything that one would ask of a pretraining run, and what it would not think to ask."""
    yield "data", f"{data.description}; {len(data.train):,} to train on, {len(data.heldout):,} held out"
    yield from of_task(config, task)
    yield from of_training(config, len(data.train), share, steps)
    threads = f"{runtime.threads} threads, {config.train.workers} workers"
    yield "device", f"{runtime.device}, {config.train.precision}, {threads}"
    if config.corruption.pool == "batch":
        yield "note", "random patches come from the micro-batch: results depend on how a batch is split"
    if task.backbone.has_dropout:
        yield "note", "dropout is on: results depend on how a batch is split"


def of_task(config: Any, task: Any) -> Iterator[Line]:
    """Model, patches, what is corrupted and what is predicted."""
    bone = task.backbone
    masked, random, kept = config.corruption.counts(task.num_corrupted)
    (h, w), (p, q), (height, width) = bone.grid, bone.patch_size, bone.image_size
    parameters = f"{millions(task)} parameters, {millions(bone)} of them backbone"
    yield "model", f"{config.backbone.kind}, width {bone.embed_dim}, {bone.depth} blocks; {parameters}"
    yield "patches", f"{h}x{w} = {h * w} of {p}x{q} pixels; image {height}x{width}, {bone.channels} channels"
    yield "corrupted", f"{task.num_corrupted} per image: {masked} masked, {random} random, {kept} kept"
    yield "target", f"{config.target.kind}, {task.head.out_features:,} outputs per patch"


def of_training(config: Any, images: int, share: Share, steps: int) -> Iterator[Line]:
    """Optimiser, batch and length."""
    optim, batch = config.optim, share.batch_size
    rate = f"lr {optim.lr:g} (absolute), {optim.warmup_steps:,} steps of warm-up, {optim.schedule}"
    moments = f"betas {optim.betas[0]:g} {optim.betas[1]:g}, decay {optim.weight_decay:g}, clip {optim.clip}"
    yield "optimiser", f"{optim.kind}, {rate}, {moments}"
    yield "batch", f"{batch} = {share.world} process(es) x {share.accumulation} x {share.micro_batch_size} images"
    yield "length", f"{images / batch:,.1f} steps per epoch, {steps:,} steps = {steps * batch / images:,.1f} epochs"


def of_time(seconds: float, compiled: bool) -> Line:
    """What the steps will take, from the seconds of one timed pass."""
    return "time", f"about {duration(seconds)} of training" + (", less once compiled" if compiled else "")
