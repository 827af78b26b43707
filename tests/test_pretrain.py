"""The job end to end on a few dozen pictures: it trains, resumes to the bit, refuses what it must."""

import json
import math
import os
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from mpp import pretrain as job
from mpp.checkpoint import Checkpoint, newest, save
from mpp.config import RecipeError, load_recipe
from mpp.data.order import Order
from mpp.data.sources import Splits, Subset
from mpp.exit_codes import EXIT_STOPPED
from mpp.pretrain import PretrainConfig

TINY = """
augment: {crop: {kind: shifted_crop, padding: 2}}
backbone: {kind: vit, patch_size: 8, image_size: 32, embed_dim: 32, depth: 2, num_heads: 2}
optim: {lr: 1.0e-3, warmup_steps: 2, weight_decay: 0.05}
train: {steps: 6, batch_size: 8, log_every: 2, threads: 1}
heldout: {images: 20, train_images: 40, pictures: 2}
"""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """44 photographs-like pictures in two classes: smooth gradients in many colours, of many sizes."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for number in range(44):
        h, w = rng.integers(34, 90, 2)
        corners = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)
        place = folder / ("ab"[number % 2])
        place.mkdir(exist_ok=True)
        Image.fromarray(corners).resize((int(w), int(h)), Image.Resampling.BICUBIC).save(place / f"{number}.png")
    return folder


@pytest.fixture
def recipe(tmp_path, pictures):
    """recipe("--train.steps=3") -> a checked PretrainConfig on the pictures, in a folder of its own."""
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)

    def make(*overrides: str, out: str = "run") -> PretrainConfig:
        given = {"data.kind": "folder", "data.path": pictures, "out": tmp_path / out} | {
            name: value for name, _, value in (word[2:].partition("=") for word in overrides)
        }
        return load_recipe(PretrainConfig, [str(file), *(f"--{name}={value}" for name, value in given.items())])

    return make


def pretrain(config: PretrainConfig) -> int:
    """A run in this process, as if it were a new one: accelerate remembers the first Accelerator's precision."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return job.pretrain(config)


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def exact(run: Path) -> list[dict]:
    """All metrics but the timings."""
    return [{k: v for k, v in row.items() if k not in ("images_per_second", "data_wait")} for row in lines(run)]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(run / "checkpoints" / f"{step:08}")
    names = ("model.safetensors", "objective.safetensors", "state/optimizer.safetensors")
    return {f"{name}/{key}": value for name in names for key, value in checkpoint.tensors(name).items()}


def assert_same_run(a: Path, b: Path, step: int) -> None:
    ours, theirs = weights(a, step), weights(b, step)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert exact(a) == exact(b)
    if (a / "trace.jsonl").exists():
        assert lines(a, "trace.jsonl") == lines(b, "trace.jsonl")


@pytest.mark.parametrize("target", ["mean_color", "downsized_color", "pixels"])
def test_each_target_trains(recipe, target):
    config = recipe(f"--target.kind={target}", "--train.steps=40", "--train.log_every=1", "--optim.lr=3e-3")
    assert pretrain(config) == 0
    losses = [row["loss"] for row in lines(config.out) if "loss" in row]
    assert len(losses) == 40 and np.mean(losses[-5:]) < 0.97 * np.mean(losses[:5])
    first, last = (row for row in lines(config.out) if "heldout_loss" in row)
    assert (first["step"], last["step"]) == (0, 40) and last["heldout_loss"] < first["heldout_loss"]
    if target != "pixels":
        assert first["heldout_loss"] == pytest.approx(math.log(512), abs=0.1)
    pictures = sorted(p.name for p in (config.out / "pictures").iterdir())
    assert pictures == ["reconstruction_00000000.png", "reconstruction_00000040.png"]


@pytest.mark.parametrize(("patch", "size"), [(4, 16), (8, 32), (14, 42), (16, 48)])
def test_each_patch_size_trains(recipe, patch, size):
    config = recipe(f"--backbone.patch_size={patch}", f"--backbone.image_size={size}", "--train.steps=3")
    assert pretrain(config) == 0


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("target", ["mean_color", "downsized_color", "pixels"])
def test_channels_and_non_square_images_train(recipe, channels, target):
    config = recipe(
        f"--data.channels={channels}", "--backbone.image_size=[48, 80]", f"--target.kind={target}", "--train.steps=3",
        *(["--target.bits=2"] if target != "pixels" else []),
    )  # fmt: skip
    assert pretrain(config) == 0
    assert [row["step"] for row in lines(config.out) if "loss" in row] == [2, 3]


def test_a_timm_model_trains_and_its_checkpoint_opens_in_plain_timm(recipe):
    config = recipe("--backbone.kind=timm", "--backbone.name=deit3_small_patch16_224", "--backbone.image_size=32",
                    "--backbone.arguments={depth: 1, embed_dim: 32, num_heads: 2}", "--train.steps=3")  # fmt: skip
    assert pretrain(config) == 0
    model = timm.create_model(f"local-dir:{config.out}/checkpoints/00000003", pretrained=True)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 32)


def test_the_checkpoint_opens_in_plain_timm_with_our_features_a_head_and_another_size(recipe):
    config = recipe("--data.channels=4", "--target.bits=2", "--backbone.pixel_mean=[.1,.2,.3,.4]")
    assert pretrain(config) == 0
    folder = f"local-dir:{config.out}/checkpoints/00000006"
    model = timm.create_model(folder, pretrained=True).eval()
    images = torch.randint(0, 256, (2, 4, 32, 32), dtype=torch.uint8)
    backbone = _backbone(config)
    assert model.pretrained_cfg["mean"] == [0.1, 0.2, 0.3, 0.4] and "license" not in model.pretrained_cfg
    with torch.no_grad():
        assert torch.allclose(model(backbone.normalize(images)), backbone.features(images)["mean", -1], atol=1e-5)
    classifier = timm.create_model(folder, pretrained=True, num_classes=10, img_size=48)
    assert classifier(torch.zeros(1, 4, 48, 48)).shape == (1, 10)


def _backbone(config):
    from mpp.backbones import build_backbone
    from mpp.weights import checkpoint_at, load_strictly

    backbone = build_backbone(config.backbone, config.data.channels, 0).eval()
    load_strictly(backbone.model, checkpoint_at(config.out).tensors("model.safetensors"), "test")
    return backbone


def test_evaluations_stand_beside_the_untrained_backbone(recipe):
    config = recipe("--data.kind=class_folders", "--data.heldout=0.25", "--train.eval_every=3",
                    "--evaluations=[{kind: fewshot, shots: [3]}, {kind: knn, k: [5]}]")  # fmt: skip
    assert pretrain(config) == 0
    rows = lines(config.out, "results.jsonl")
    assert [(r["backbone"], r["step"], r["evaluation"]) for r in rows] == [
        (which, step, kind)
        for which, step in (("untrained", 0), ("trained", 3), ("trained", 6))
        for kind in ("fewshot", "knn")
    ]
    assert all(0 <= r["value"] <= 1 and r["images"] == 11 and "commit" in r for r in rows)


def test_unlabelled_data_leaves_evaluations_out_and_named_unlabelled_data_is_refused(recipe, pictures, capsys):
    assert pretrain(recipe("--evaluations=[{kind: knn}]", "--train.steps=3")) == 0
    assert "knn is left out" in capsys.readouterr().out
    with pytest.raises(ValueError, match="needs labels"):
        pretrain(recipe(f"--evaluations=[{{kind: knn, data: {{kind: folder, path: '{pictures}'}}}}]", out="other"))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stop_at", [1, 3, 7])
def test_a_run_that_dies_and_is_started_again_equals_one_that_did_not(recipe, monkeypatch, accumulation, stop_at):
    """Steps 1 to 9 are in epochs 1 and 2 (43 pictures, batch 8); checkpoints every 2 steps, log windows of 3."""
    overrides = ("--train.steps=9", "--train.checkpoint_every=2", "--train.log_every=3", "--train.eval_every=4",
                 "--train.trace=true", f"--train.micro_batch_size={8 // accumulation}")  # fmt: skip
    twin, config = recipe(*overrides, out="twin"), recipe(*overrides)
    assert pretrain(twin) == 0
    with monkeypatch.context() as patch:
        _die_after(patch, stop_at)
        with pytest.raises(KeyboardInterrupt):
            pretrain(config)
    assert pretrain(config) == 0
    assert_same_run(config.out, twin.out, 9)


def _die_after(monkeypatch, step: int) -> None:
    """The next run ends at once after so many updates, with no chance to save: kill -9 without a second process."""
    from mpp.trainer import Trainer

    update = Trainer._update

    def dying(self, batches):
        if self.step == step:
            raise KeyboardInterrupt
        update(self, batches)

    monkeypatch.setattr(Trainer, "_update", dying)


def test_a_signal_finishes_the_step_saves_and_the_same_command_goes_on(recipe, monkeypatch):
    from mpp.trainer import Trainer

    overrides = ("--train.log_every=5", "--train.eval_every=4", "--train.checkpoint_every=4")
    config, twin = recipe(*overrides), recipe(*overrides, out="twin")
    assert pretrain(twin) == 0
    update = Trainer._update

    def signalled(self, batches):
        if self.step == 3:
            import signal

            signal.raise_signal(signal.SIGTERM)
        update(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", signalled)
        assert pretrain(config) == EXIT_STOPPED
    assert [row["step"] for row in lines(config.out)] == [0], "the evaluation of step 4 waits for the next start"
    assert [p.name for p in (config.out / "checkpoints").iterdir()] == ["00000004"]
    assert pretrain(config) == 0
    assert_same_run(config.out, twin.out, 6)


def test_a_finished_run_is_left_as_it_is(recipe):
    config = recipe()
    assert pretrain(config) == 0
    before = {p: p.read_bytes() for p in config.out.rglob("*") if p.is_file() and p.name != "train.log"}
    assert pretrain(config) == 0
    assert {p: p.read_bytes() for p in config.out.rglob("*") if p.is_file() and p.name != "train.log"} == before


@pytest.mark.parametrize(
    "override",
    [
        "--optim.lr=2e-3", "--train.steps=7", "--train.batch_size=4", "--train.seed=1", "--masking.ratio=0.4",
        "--target.bits=2", "--backbone.depth=1", "--backbone.image_size=48", "--augment.horizontal_flip=false",
        "--train.precision=bf16", "--corruption.random_patch=0.2", "--objective.path=general", "--data.channels=1",
        "--train.threads=2",
    ],
)  # fmt: skip
def test_going_on_with_a_recipe_that_learns_something_else_is_refused_by_name(recipe, override):
    assert pretrain(recipe("--train.steps=2", "--optim.warmup_steps=1")) == 0
    field = override[2:].partition("=")[0]
    with pytest.raises(ValueError, match=field):
        pretrain(recipe("--train.steps=2", "--optim.warmup_steps=1", override))


@pytest.mark.parametrize(
    "override",
    ["--train.log_every=1", "--train.keep_last=1", "--train.workers=1", "--train.micro_batch_size=4"],
)
def test_what_changes_nothing_may_change(recipe, override):
    assert pretrain(recipe()) == 0
    assert pretrain(recipe(override)) == 0


def test_other_data_under_the_same_recipe_is_refused(recipe, pictures, tmp_path):
    import shutil

    config = recipe()
    assert pretrain(config) == 0
    moved = tmp_path / "moved"
    shutil.copytree(pictures, moved)
    at = lambda path: replace(config, data=replace(config.data, path=path))  # noqa: E731
    assert pretrain(at(moved)) == 0  # the same files elsewhere are the same data
    (moved / "a" / "0.png").unlink()
    with pytest.raises(ValueError, match="44 images before, 43 now"):
        pretrain(at(moved))


def test_a_finished_run_is_extended_by_name(recipe):
    assert pretrain(recipe()) == 0
    longer = recipe("--train.extend.steps=4", "--train.extend.schedule=linear")
    assert pretrain(longer) == 0
    rows = [row for row in lines(longer.out) if "loss" in row]
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10]
    assert [row["lr"] for row in rows[-2:]] == pytest.approx([0.75e-3, 0.25e-3])
    with pytest.raises(ValueError, match=r"train\.extend"):
        pretrain(recipe())
    assert pretrain(recipe("--train.extend=[{steps: 4, schedule: linear}, {steps: 2}]")) == 0
    assert lines(longer.out)[-1]["step"] == 12


def test_an_unfinished_run_is_not_extended(recipe, monkeypatch):
    with monkeypatch.context() as patch:
        _die_after(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            pretrain(recipe("--train.checkpoint_every=2"))
    with pytest.raises(ValueError, match="at step 4 of 6"):
        pretrain(recipe("--train.checkpoint_every=2", "--train.extend.steps=4"))


def test_a_run_that_never_saved_begins_again(recipe, monkeypatch):
    twin, config = recipe(out="twin"), recipe()
    assert pretrain(twin) == 0
    with monkeypatch.context() as patch:
        _die_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            pretrain(config)
    assert pretrain(config) == 0
    assert_same_run(config.out, twin.out, 6)


@pytest.mark.parametrize("name", ["model.safetensors", "state/trainer.json", "config.json"])
@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:]])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(recipe, monkeypatch, capsys, name, damage):
    overrides = ("--train.checkpoint_every=2", "--train.keep_last=3", "--corruption.pool=batch")
    twin, config = recipe(*overrides, out="twin"), recipe(*overrides)
    assert pretrain(twin) == 0
    with monkeypatch.context() as patch:
        _die_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            pretrain(config)
    damaged = config.out / "checkpoints" / "00000004" / name
    damaged.write_bytes(damage(damaged.read_bytes()))
    assert pretrain(config) == 0
    shown = capsys.readouterr().out
    assert "00000004" in shown and name in shown and "goes on at step 2" in shown
    assert_same_run(config.out, twin.out, 6)


def test_trackers_get_every_number(recipe):
    config = recipe("--train.trackers=tensorboard", "--evaluations=[{kind: knn, k: [3]}]", "--data.kind=class_folders",
                    "--data.heldout=0.25")  # fmt: skip
    assert pretrain(config) == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(config.out / "mpp")).Reload()
    assert {"loss", "lr", "heldout_loss", "baseline_entropy"} <= set(events.Tags()["scalars"])
    assert [e.step for e in events.Scalars("loss")] == [2, 4, 6]


def test_epochs_are_turned_into_steps_and_checked_against_the_warm_up(recipe):
    config = recipe("--train.steps=null", "--train.epochs=1.5")
    assert pretrain(config) == 0
    assert lines(config.out)[-1]["step"] == math.ceil(1.5 * 43 / 8)
    with pytest.raises(ValueError, match=r"optim\.warmup_steps: 50"):
        pretrain(recipe("--train.steps=null", "--train.epochs=1", "--optim.warmup_steps=50", out="short"))


@pytest.mark.parametrize("override", ["--corruption.pool=batch", "--backbone.dropout=0.1"])
def test_where_the_split_of_a_batch_matters_it_may_not_change(recipe, override):
    assert pretrain(recipe(override)) == 0
    assert pretrain(recipe(override, "--train.micro_batch_size=4")) == 0  # finished: no batch is left to be split
    assert pretrain(recipe(override)) == 0
    with pytest.raises(ValueError, match="micro_batch_size: 8 -> 4"):
        pretrain(recipe(override, "--train.micro_batch_size=4", "--train.extend=[{steps: 2}]"))


def test_init_goes_on_from_other_weights_with_a_fresh_optimiser(recipe, capsys):
    first = recipe()
    assert pretrain(first) == 0
    second = recipe(f"--init={first.out}", "--target.bits=2", "--optim.lr=1e-12", "--train.steps=3", out="second")
    assert pretrain(second) == 0
    assert "(step 6); fresh: head.bias, head.weight" in capsys.readouterr().out
    ours, theirs = weights(second.out, 3), weights(first.out, 6)
    name = "model.safetensors/blocks.0.mlp.fc1.weight"
    assert torch.allclose(ours[name], theirs[name], atol=1e-7)
    with pytest.raises(ValueError, match="another architecture"):
        pretrain(recipe(f"--init={first.out}", "--backbone.depth=1", out="third"))
    with pytest.raises(ValueError, match="/nonexistent"):
        pretrain(recipe("--init=/nonexistent", out="fourth"))


def test_labels_without_information_stop_the_run_before_the_first_step(recipe, tmp_path):
    dark = tmp_path / "dark"
    dark.mkdir()
    for number in range(12):  # 16-bit pictures with values of 0 to 700 of 65535: one label everywhere
        values = np.random.default_rng(number).integers(0, 700, (32, 32)).astype(np.uint16)
        Image.fromarray(values).save(dark / f"{number}.png")
    with pytest.raises(ValueError, match=r"carry almost nothing.*data\.range"):
        pretrain(recipe(f"--data.path={dark}"))
    # What the message advises works with the same --out: a start that failed leaves nothing that would refuse it.
    assert pretrain(recipe(f"--data.path={dark}", "--data.range=[0, 700]")) == 0
    assert pretrain(recipe(f"--data.path={dark}", "--heldout.min_information=0", out="forced")) == 0


def test_bad_pictures_are_skipped_named_and_the_same_for_any_workers(recipe, pictures, tmp_path):
    import shutil

    mixed = tmp_path / "mixed"
    shutil.copytree(pictures, mixed)
    (mixed / "a" / "empty.jpg").write_bytes(b"")
    (mixed / "a" / "page.jpg").write_text("<html>404</html>")
    (mixed / ".hidden.png").write_bytes(b"")
    runs = [recipe(f"--data.path={mixed}", "--train.steps=12", f"--train.workers={w}", out=f"w{w}") for w in (0, 2)]
    for config in runs:
        assert pretrain(config) == 0
        assert sorted(Path(row["name"]).name for row in lines(config.out, "skipped.jsonl")) == [
            "empty.jpg",
            "page.jpg",
        ]
    assert exact(runs[0].out) == exact(runs[1].out)


def test_foreign_folders_are_not_written_into(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="not a run"):
        pretrain(recipe())


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["--backbone.patch_size=5"], "backbone.patch_size"),
        (["--optim.warmup_steps=6"], "optim.warmup_steps"),
        (["--train.micro_batch_size=3"], "train.micro_batch_size"),
        (["--masking.ratio=0.01"], "masking.ratio"),
        (["--target.bits=6"], "target"),
        (["--train.epochs=2"], "train.steps"),
        (["--corruption.random_patch=0.5"], "corruption"),
        (["--backbone.pixel_mean=[0.1, 0.2]"], "backbone.pixel_mean"),
        (["--evaluations=[{kind: knn, layers: [2]}]"], "evaluations.0.layers"),
        (["--evaluations=[{kind: knn, pool: [cls]}]", "--backbone.class_token=false"], "evaluations.0.pool"),
    ],
)
def test_faults_across_fields_are_found_before_any_data_is_read(recipe, overrides, path):
    with pytest.raises(RecipeError, match=path.replace(".", r"\.")):
        recipe(*overrides, "--data.path=/nonexistent")


def test_fp16_is_refused_on_a_cpu(recipe):
    with pytest.raises(ValueError, match="fp16"):
        pretrain(recipe("--train.precision=fp16"))


def test_bf16_trains(recipe):
    assert pretrain(recipe("--train.precision=bf16", "--train.steps=3")) == 0


def test_dropout_is_a_function_of_the_step(recipe, monkeypatch):
    overrides = ("--backbone.dropout=0.1", "--backbone.drop_path=0.1", "--train.checkpoint_every=2")
    twin, config = recipe(*overrides, out="twin"), recipe(*overrides)
    assert pretrain(twin) == 0
    with monkeypatch.context() as patch:
        _die_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            pretrain(config)
    assert pretrain(config) == 0
    assert_same_run(config.out, twin.out, 6)


def test_an_update_with_a_non_finite_gradient_is_left_out_and_counted(recipe, monkeypatch):
    from mpp.tasks import MaskedPatchPrediction

    forward, calls = MaskedPatchPrediction.forward, [0]

    def poisoned(self, batch):
        result = forward(self, batch)
        calls[0] += self.training and torch.is_grad_enabled()
        return result | {"loss": result["loss"] * float("nan")} if calls[0] in (5, 6) else result

    monkeypatch.setattr(MaskedPatchPrediction, "forward", poisoned)
    config = recipe("--train.log_every=6", "--train.trace=true")
    assert pretrain(config) == 0
    (record,) = (row for row in lines(config.out) if "loss" in row)
    assert record["skipped_updates"] == 2 and math.isfinite(record["loss"])
    unusual, trace = lines(config.out, "unusual_updates.jsonl"), lines(config.out, "trace.jsonl")
    assert len({row["step"] for row in unusual}) == 2
    for row in unusual:
        assert row["kind"] == "not finite" and row["process"] == 0 and not row["own_loss_is_finite"]
        assert row["ids"] == trace[row["step"] - 1]["ids"] and len(row["names"]) == len(row["ids"])
        assert all(name.endswith(".png") for name in row["names"])
    assert all(value.isfinite().all() for value in weights(config.out, 6).values())
    calls[0] = -1000

    monkeypatch.setattr(
        MaskedPatchPrediction,
        "forward",
        lambda self, batch: {"loss": forward(self, batch)["loss"] * float("nan"), "count": 64},
    )
    with pytest.raises(
        FloatingPointError,
        match=r"(?s)10 updates in a row, steps 1 to 10;.*process 0: loss nan, gradient not finite in .*unusual_up",
    ):
        pretrain(recipe("--train.steps=12", "--train.log_every=12", out="lost"))


def test_the_loss_does_not_depend_on_accumulation(recipe):
    runs = [recipe("--train.log_every=1", f"--train.micro_batch_size={m}", out=f"m{m}") for m in (8, 2)]
    for config in runs:
        assert pretrain(config) == 0
    a, b = ([row["loss"] for row in lines(config.out) if "loss" in row] for config in runs)
    assert a == pytest.approx(b, abs=1e-5)


def test_a_run_goes_on_when_the_weights_it_began_with_are_gone(recipe, tmp_path):
    source = recipe("--train.steps=3", out="source")
    assert pretrain(source) == 0
    config = recipe(f"--init={source.out}", "--train.steps=6", "--train.checkpoint_every=3")
    begun = job.begin(config)
    begun._after_update = lambda step: setattr(begun.runtime.stop, "requested", step == 4)
    assert begun.go() == EXIT_STOPPED
    source.out.rename(tmp_path / "moved")
    assert pretrain(config) == 0 and lines(config.out)[-1]["step"] == 6


def test_what_was_made_up_for_after_a_stop_is_not_made_twice(recipe):
    """Stopped before a due evaluation, evaluated at the next start, killed, started again: one row of each."""
    config = recipe("--train.eval_every=2", "--train.steps=6")
    begun = job.begin(config)
    begun._after_update = lambda step: setattr(begun.runtime.stop, "requested", step == 2)
    assert begun.go() == EXIT_STOPPED
    again = job.begin(config)
    again._after_update = killed_at(4)
    with pytest.raises(Killed):
        again.go()
    assert pretrain(config) == 0
    steps = [row["step"] for row in lines(config.out) if "heldout_loss" in row]
    assert steps == [0, 2, 4, 6]


class Killed(Exception):
    pass


def killed_at(step):
    def after(now):
        if now == step:
            raise Killed

    return after


def test_a_run_that_never_saved_leaves_nothing_to_the_next_one(recipe, pictures, tmp_path):
    import shutil

    for name, bad in (("one", "0.png"), ("two", "z.png")):
        shutil.copytree(pictures / "a", tmp_path / name)
        (tmp_path / name / bad).write_bytes(b"no picture")
    first = recipe(f"--data.path={tmp_path / 'one'}", "--train.steps=200")
    begun = job.begin(first)
    begun._after_update = killed_at(1)
    with pytest.raises(Killed):
        begun.go()
    assert pretrain(recipe(f"--data.path={tmp_path / 'two'}", "--train.steps=20")) == 0
    assert {row["name"] for row in lines(first.out, "skipped.jsonl")} == {"z.png"}


def test_a_trained_run_without_its_checkpoints_is_not_overwritten_by_another_recipe(recipe, tmp_path):
    config = recipe("--train.steps=3")
    assert pretrain(config) == 0
    (config.out / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="optim.lr"):
        pretrain(recipe("--train.steps=3", "--optim.lr=0.5"))
    assert lines(config.out)[-1]["step"] == 3
    assert pretrain(config) == 0  # the same recipe begins anew


@pytest.mark.parametrize("content", [None, '{"data": '])
def test_an_unreadable_environment_is_named(recipe, content):
    config = recipe("--train.steps=3")
    assert pretrain(config) == 0
    (config.out / "environment.json").unlink()
    if content:
        (config.out / "environment.json").write_text(content)
    with pytest.raises(ValueError, match=r"environment\.json"):
        pretrain(config)


def test_a_spike_is_left_out_alike_by_a_run_that_was_stopped_and_went_on(recipe, monkeypatch):
    """Also where the optimiser does not heed found_inf."""
    from mpp.tasks import MaskedPatchPrediction

    forward = MaskedPatchPrediction.forward

    def loud(self, batch):
        result = forward(self, batch)
        is_it = self.training and bool(((batch["epoch"] == 5) & (batch["id"] == 3)).any())
        return result | {"loss": result["loss"] * (1e4 if is_it else 1)}

    monkeypatch.setattr(MaskedPatchPrediction, "forward", loud)
    for kind in ("", "--optim.kind=timm --optim.name=adamw --optim.lr=1e-3"):
        words = [*kind.split(), "--optim.skip_above=8", "--train.steps=40", "--train.log_every=40"]
        words += ["--train.checkpoint_every=10"]
        twin, config = recipe(*words, out=f"twin{len(kind)}"), recipe(*words, out=f"stopped{len(kind)}")
        assert pretrain(twin) == 0
        rows = lines(twin.out, "unusual_updates.jsonl")
        assert [row["kind"] for row in rows] == ["spike"] and rows[0]["gradient_norm"] > 100 * rows[0]["usual_norm"]
        (record,) = (row for row in lines(twin.out) if "loss" in row)
        assert record["skipped_updates"] == record["gradient_spikes"] == 1
        with monkeypatch.context() as patch:
            _die_after(patch, rows[0]["step"] + 1)
            with pytest.raises(KeyboardInterrupt):
                pretrain(config)
        assert pretrain(config) == 0
        assert_same_run(config.out, twin.out, 40)
        assert lines(config.out, "unusual_updates.jsonl") == rows


def test_a_limit_for_spikes_does_not_go_with_fp16(recipe):
    with pytest.raises(RecipeError, match=r"optim.skip_above: .*fp16"):
        recipe("--optim.skip_above=8", "--train.precision=fp16")


def test_numbers_that_are_not_finite_end_a_run_however_short_it_is(recipe):
    with pytest.raises(FloatingPointError, match="not finite"):
        pretrain(recipe("--optim.lr=1e30", "--train.steps=5", "--optim.warmup_steps=0", "--optim.clip=null"))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--backbone.pixel_std=0", "pixel_std"),
        ("--backbone.pixel_std=[0.5, -0.5, 0.5]", "pixel_std"),
        ("--train.seed=1180591620717411303424", "seed"),
    ],
)
def test_values_that_make_no_sense_are_refused(recipe, word, message):
    with pytest.raises(RecipeError, match=message):
        recipe(word)


def test_an_evaluation_without_an_answer_does_not_cost_the_run(recipe, pictures, monkeypatch):
    from mpp.evaluation.knn import KNN

    def fails(self, features):
        raise ValueError("7 of 35 train images have NaN or infinite features")
        yield

    monkeypatch.setattr(KNN, "__call__", fails)
    words = (
        "--data.kind=class_folders",
        "--data.heldout=0.2",
        "--train.steps=3",
        "--evaluations=[{kind: knn, k: [3]}, {kind: fewshot, shots: [2]}]",
    )
    config = recipe(*words)
    assert pretrain(config) == 0
    assert {row["evaluation"] for row in lines(config.out, "results.jsonl")} == {"fewshot"}
    assert "knn gave no score: 7 of 35" in (config.out / "train.log").read_text()


def test_too_many_unreadable_pictures_end_the_run_and_name_the_list(recipe, tmp_path, pictures):
    folder = tmp_path / "mixed"
    shutil.copytree(pictures, folder)
    for number in range(60):
        (folder / f"{number}.txt").write_text("a note beside the picture")
    words = (f"--data.path={folder}", "--data.heldout=0.1", "--train.steps=30", "--train.log_every=5")
    with pytest.raises(ValueError, match=r"training pictures read so far could not be used.*max_unreadable 0.5"):
        pretrain(recipe(*words, "--train.max_unreadable=0.5"))
    listed = lines(tmp_path / "run", "skipped.jsonl")
    assert 20 <= len(listed) < 60 and all(row["name"].endswith(".txt") for row in listed)
    assert pretrain(recipe(*words, "--train.max_unreadable=0.7", out="allowed")) == 0


def test_a_folder_has_one_writer(recipe, tmp_path, monkeypatch):
    import fcntl

    from mpp import lock

    config = recipe("--train.steps=3")
    config.out.mkdir()
    monkeypatch.setattr(lock.hold, "__defaults__", (0.3, False))
    with (config.out / ".lock").open("a+") as other:  # another open file is another owner, also in this process
        other.write("process 123 on elsewhere")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="in use by another run .process 123 on elsewhere"):
            pretrain(config)
    assert pretrain(config) == 0


def _full_at(monkeypatch, *steps: int) -> None:
    """The disk is full when these steps are saved."""
    import errno

    from mpp import checkpoint

    save = checkpoint.save

    def full(run, step, **given):
        if step in steps:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(run, step, **given)

    monkeypatch.setattr(checkpoint, "save", full)


def test_a_full_disk_is_told_and_tried_again_and_never_ends_as_if_it_were_saved(recipe, monkeypatch):
    words = ("--train.checkpoint_every=2", "--train.keep_last=9")
    with monkeypatch.context() as patch:
        _full_at(patch, 4)
        config = recipe(*words)
        assert pretrain(config) == 0
    assert sorted(path.name for path in (config.out / "checkpoints").iterdir()) == ["00000002", "00000006"]
    log = (config.out / "train.log").read_text()
    assert "no checkpoint of step 4: [Errno 28] No space left" in log and "again in 2 steps" in log
    for name, at, option in (("stop", 4, "stop"), ("end", 6, "retry")):
        run = recipe(*words, f"--train.save_errors={option}", out=name)
        with monkeypatch.context() as patch:
            _full_at(patch, at)
            with pytest.raises(OSError, match=f"no checkpoint of step {at}: .*Those before it stay; make room"):
                pretrain(run)
        assert newest(run.out)[0].step == at - 2
        assert pretrain(run) == 0
        assert_same_run(run.out, config.out, 6)


def test_a_stop_that_cannot_be_saved_says_so(recipe, monkeypatch):
    from mpp.trainer import Trainer

    update, config = Trainer._update, recipe("--train.checkpoint_every=2")

    def signalled(self, batches):
        update(self, batches)
        self.runtime.stop.requested |= self.step == 2

    monkeypatch.setattr(Trainer, "_update", signalled)
    _full_at(monkeypatch, 3)
    with pytest.raises(OSError, match="no checkpoint of step 3"):
        pretrain(config)
    assert newest(config.out)[0].step == 2


def test_a_disk_without_room_is_refused_before_the_first_step(recipe, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=300_000))
    with pytest.raises(ValueError, match=r"0.3 MB free, and the run's checkpoints need about"):
        pretrain(recipe())
    monkeypatch.undo()
    assert pretrain(recipe()) == 0  # what was left there is no hindrance


def test_changed_data_are_refused_with_counts_and_may_be_allowed(recipe, tmp_path, pictures, monkeypatch):
    folder = tmp_path / "changing"
    shutil.copytree(pictures, folder)
    words = (f"--data.path={folder}", "--train.steps=8", "--train.checkpoint_every=2")
    with monkeypatch.context() as patch:
        _die_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            pretrain(recipe(*words))
    for path in folder.glob("a/*"):  # times are no change, nor is another name of the root
        os.utime(path, (0, 0))
    folder.rename(tmp_path / "renamed")
    words = (f"--data.path={tmp_path / 'renamed'}", *words[1:])
    (tmp_path / "renamed" / "a" / "0.png").unlink()
    with pytest.raises(ValueError, match="44 images before, 43 now; names or sizes differ .*allow_changed_data"):
        pretrain(recipe(*words))
    assert pretrain(recipe(*words, "--train.allow_changed_data=true")) == 0
    log = (tmp_path / "run" / "train.log").read_text()
    assert "data changed: 44 images before, 43 now; from here on epochs are of those" in log
    assert pretrain(recipe(*words)) == 0  # it has learned from these now


def test_starts_that_get_nowhere_are_told(recipe, monkeypatch):
    config = recipe("--train.checkpoint_every=4")
    for _ in range(4):
        with monkeypatch.context() as patch:
            _die_after(patch, 2)
            with pytest.raises(KeyboardInterrupt):
                pretrain(config)
    assert "start number 4 from step 0, and none of them saved" in (config.out / "train.log").read_text()
    assert pretrain(config) == pretrain(config) == 0
    assert [row["from_step"] for row in lines(config.out, "starts.jsonl")] == [0] * 5


class Virtual:
    """As many pictures as one likes, made when they are read."""

    classes, description = None, "virtual"

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read(self, ids) -> list[np.ndarray]:
        return [np.random.default_rng(int(id)).integers(0, 256, (36, 34, 3), dtype=np.uint8) for id in ids]

    def labels(self) -> None:
        return None

    def name(self, id: int) -> str:
        return str(id)

    def fingerprint(self) -> str:
        return str(self.count)


def test_a_run_goes_on_at_step_a_million_of_300_million_images(recipe, monkeypatch):
    count, step, batch = 300_000_000, 1_000_000, 8
    monkeypatch.setattr(job, "open_splits", lambda source: Splits(Subset(Virtual(count)), Subset(Virtual(30))))
    config = recipe(f"--train.steps={step + 2}", "--train.trace=true", "--train.eval_every=0")
    begun = job.begin(config)
    begun._after_update = lambda _: setattr(begun.runtime.stop, "requested", True)
    assert begun.go() == EXIT_STOPPED
    saved, _ = newest(config.out)
    files = {name: saved.tensors(name) for name in saved.files if name.endswith(".safetensors")}
    documents = {name: saved.document(name) for name in saved.files if name.endswith(".json")}
    documents["state/trainer.json"]["trainer"]["step"] = step
    save(config.out, step, files, documents, saved.facts)
    tracemalloc.start()
    assert pretrain(config) == 0
    assert tracemalloc.get_traced_memory()[1] < 50_000_000  # an int64 for each image would be 2,400
    tracemalloc.stop()
    positions = torch.arange(step * batch, (step + 2) * batch)
    seen = [id for row in lines(config.out, "trace.jsonl") if row["step"] > step for id in row["ids"]]
    assert seen == Order(count, seed=0).at(positions)[1].tolist()


def test_checkpoints_at_multiples_are_kept(recipe):
    config = recipe("--train.checkpoint_every=1", "--train.keep_last=1", "--train.keep_every=2")
    assert pretrain(config) == 0
    assert sorted(int(path.name) for path in (config.out / "checkpoints").iterdir()) == [2, 4, 6]
    with pytest.raises(RecipeError, match="keep_every: 3 is no multiple of checkpoint_every 2"):
        recipe("--train.checkpoint_every=2", "--train.keep_every=3")


def test_the_advice_on_extending_a_run_works_each_time(recipe):
    config = recipe("--train.steps=3")
    assert pretrain(config) == 0
    for total in (6, 12):
        advice = (config.out / "train.log").read_text().splitlines()[-1].partition("the same command with ")[2]
        option, _, value = advice.partition(" ")
        assert pretrain(recipe("--train.steps=3", f"{option}={value.strip(chr(39))}")) == 0
        assert lines(config.out)[-1]["step"] == total
    with pytest.raises(ValueError, match=r'extended by --train.extend .\[{"steps": 3}, {"steps": 6}\]'):
        pretrain(config)


def test_few_held_out_pictures_are_remarked(recipe):
    config = recipe("--train.steps=3")
    assert pretrain(config) == 0
    assert "few pictures are held out (1)" in (config.out / "train.log").read_text()


def test_the_bar_reaches_the_last_step(recipe, monkeypatch):
    from mpp.progress import Progress

    ticks = []
    monkeypatch.setattr(Progress, "tick", lambda self, step: ticks.append(step))
    assert pretrain(recipe("--train.steps=3")) == 0
    assert ticks == [1, 2, 3]
