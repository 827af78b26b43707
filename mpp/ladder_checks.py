"""What a ladder refuses before its first row: data, weights, frozen scores and rows that cannot work."""

from collections.abc import Collection, Mapping

from mpp.backbones import Backbone, build_backbone
from mpp.classify_recipe import FREE, ClassifyConfig
from mpp.config import differences, load_recipe
from mpp.data.sources import Splits, Subset, open_splits, require_labels, require_test_images
from mpp.evaluation.features import check
from mpp.job import share_of
from mpp.ladder_rows import Rows, labels_of
from mpp.pinned import fingerprint
from mpp.runtime import check_precision, check_trackers, default_device
from mpp.tasks import frozen_modules
from mpp.weights import Misfit, load_into


def check_labels(rows: Rows, splits: Splits) -> None:
    """ValueError for data without labels or test images, or with too few images of a class."""
    require_labels(splits, "a ladder")
    require_test_images(splits)
    for budget in rows.config.budgets:
        try:
            labels_of(budget, 0).split(splits.train)
        except ValueError as error:
            raise ValueError(f"budgets: {budget}: {error}") from None


def check_weights(rows: Rows, name: str, spec: str, splits: Splits) -> str:
    """A hash of a start's weights. ValueError for those that do not fit the rows' backbone, or what reads its features:
    now, not after the rows before them."""
    asked = rows.config.finetune
    backbone = build_backbone(rows.backbone, rows.data.channels, seed=0)
    try:
        load_into(backbone, spec, asked.resampling)
    except Misfit as error:
        raise ValueError(f"{name}: {error.message}; every row has the backbone of the pretraining run") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    backbone.check_readout((asked.pool,), (-1,))
    frozen_modules(backbone, asked.frozen_blocks)
    _check_frozen(rows, backbone, splits)
    return fingerprint(spec)


def _check_frozen(rows: Rows, backbone: Backbone, splits: Splits) -> None:
    """ValueError for frozen scores that these features or labels do not allow."""
    opened = {repr(rows.data): splits}
    for evaluation in rows.config.evaluations(tuple(rows.config.budgets), rows.config.seeds):
        source = evaluation.data or rows.data
        try:
            if repr(source) not in opened:
                opened[repr(source)] = open_splits(source)
            check(evaluation, opened[repr(source)], backbone)
        except ValueError as error:
            raise ValueError(f"frozen: {evaluation.kind}: {error}") from None


def check_rows(rows: Rows, train: Subset) -> None:
    """ValueError for what a row would refuse, or for rows that stand there and were made otherwise."""
    config = rows.config
    check_trackers(config.finetune.train.trackers)
    check_precision(config.finetune.train.precision, default_device())
    swept = any(rows.rates(start) for start in rows.starts)
    for start, budget in rows.places():
        for seed in range(config.seeds):
            # A rate that is swept is compared once it is chosen.
            _check_row(rows, rows.row(start, budget, seed, rows.plain_rate), {"optim.lr"} if swept else set())
    for start in rows.starts:
        for trial in (rows.trial(start, rate) for rate in rows.rates(start)):
            try:
                trial.labels.split(train)
            except ValueError as error:
                raise ValueError(f"choose_on: {config.choose_on:g} of the first budget: {error}") from None
            _check_row(rows, trial)


def check_rates(rows: Rows, rates: Mapping[str, float]) -> None:
    """ValueError for rows that were made at other rates than those chosen, by the names of the starts."""
    for start, budget in rows.places():
        for seed in range(rows.config.seeds):
            _check_row(rows, rows.row(start, budget, seed, rates[start.name]))


def _check_row(rows: Rows, asked: ClassifyConfig, free: Collection[str] = ()) -> None:
    for name, message in asked.faults():
        raise ValueError(f"finetune.{name}: {message}")
    try:
        share = share_of(asked.train, 0, 1)
        if asked.mix:
            asked.mix.check_micro_batch(share.micro_batch_size)
    except ValueError as error:
        raise ValueError(f"finetune.{error}") from None
    assert asked.out is not None
    if (recipe := asked.out / "recipe.yaml").exists():
        stored = load_recipe(ClassifyConfig, [str(recipe)])
        if changes := differences(stored, asked, FREE | {"init"} | set(free)):  # init is pinned by its hash
            raise ValueError(
                f"{rows.out} has rows of another recipe ({asked.out.name}): {'; '.join(changes)}. Take the changes "
                f"back, or begin another ladder with --out"
            )
