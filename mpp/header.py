"""What a run says of itself before its first step: data, model, patches, optimiser, batch, expected time."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpp.progress import duration, millions, seconds_per_pass

if TYPE_CHECKING:
    from mpp.pretrain import Pretraining


def header(job: "Pretraining", first_step: int) -> Iterator[tuple[str, str]]:
    """(what, in words): everything that one would ask before the first step."""
    task, train, optim, share, bone = job.task, job.config.train, job.config.optim, job.share, job.backbone
    masked, random, kept = job.config.corruption.counts(task.num_corrupted)
    (h, w), (p, q), (height, width) = bone.grid, bone.patch_size, bone.image_size
    images, total = len(job.data.train), job.total_steps
    yield "run", f"{job.files.path}" + (f": goes on at step {first_step:,}" if first_step else "")
    yield "data", f"{job.data.description}; {images:,} to train on, {len(job.data.heldout):,} held out"
    yield (
        "model",
        (
            f"{job.config.backbone.kind}, width {bone.embed_dim}, {bone.depth} blocks; {millions(task)} parameters, "
            f"{millions(bone)} of them backbone"
        ),
    )
    yield "patches", f"{h}x{w} = {h * w} of {p}x{q} pixels; image {height}x{width}, {bone.channels} channels"
    yield "corrupted", f"{task.num_corrupted} per image: {masked} masked, {random} random, {kept} kept"
    yield "target", f"{job.config.target.kind}, {task.head.out_features:,} outputs per patch"
    yield (
        "optimiser",
        (
            f"{optim.kind}, lr {optim.lr:g} (absolute), {optim.warmup_steps:,} steps of warm-up, {optim.schedule}, "
            f"betas {optim.betas[0]:g} {optim.betas[1]:g}, decay {optim.weight_decay:g}, clip {optim.clip}"
        ),
    )
    yield (
        "batch",
        f"{train.batch_size} = {share.world} process(es) x {share.accumulation} x {share.micro_batch_size} images",
    )
    yield (
        "length",
        (
            f"{images / train.batch_size:,.1f} steps per epoch, {total:,} steps = "
            f"{total * train.batch_size / images:,.1f} epochs"
        ),
    )
    yield (
        "device",
        f"{job.runtime.device}, {train.precision}, {job.runtime.threads} threads, {train.workers} workers",
    )
    if first_step < total:
        first = job.train_views.__getitems__(next(share.micro_batches(0, 1)))
        job.skips.add("train", first["skipped"])
        seconds = seconds_per_pass(task, first, job.runtime) * share.accumulation * (total - first_step)
        yield (
            "time",
            f"about {duration(seconds)} of training, by one timed pass"
            + (" (compiled it will be less)" if train.compile else ""),
        )
    if job.config.corruption.pool == "batch":
        yield "note", "random patches come from the micro-batch: results depend on how a batch is split"
    if bone.has_dropout:
        yield "note", "dropout is on: results depend on how a batch is split"
