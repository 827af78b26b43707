"""Supervised training end to end: it learns, starts where it must, resumes to the bit, refuses what it must."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from mpp import classify as job
from mpp import pretrain as pretraining
from mpp.checkpoint import Checkpoint
from mpp.classify import ClassifyConfig
from mpp.config import RecipeError, load_recipe
from mpp.exit_codes import EXIT_STOPPED
from mpp.pretrain_recipe import PretrainConfig

BACKBONE = "backbone: {kind: vit, patch_size: 8, image_size: 32, embed_dim: 32, depth: 2, num_heads: 2}\n"
TINY = (
    BACKBONE
    + """
augment: {crop: {kind: shifted_crop, padding: 2}}
view: {crop: 1.0}
optim: {kind: adamw, lr: 3.0e-3, warmup_steps: 2, weight_decay: 0.05}
train: {steps: 6, batch_size: 8, log_every: 1, threads: 1}
"""
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory, write_classes) -> Path:
    """Three classes told apart by brightness, so that a few steps learn them: 20 train and 5 test pictures of each."""
    return write_classes(tmp_path_factory.mktemp("classes"), train=20, test=5, names=("dark", "grey", "light"))


@pytest.fixture
def recipe(tmp_path, pictures):
    """recipe("--train.steps=3") -> a checked ClassifyConfig on the pictures, in a folder of its own."""
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)

    def make(*overrides: str, out: str = "run") -> ClassifyConfig:
        given = {"data.kind": "class_folders", "data.path": pictures, "out": tmp_path / out} | {
            name: value for name, _, value in (word[2:].partition("=") for word in overrides)
        }
        return load_recipe(ClassifyConfig, [str(file), *(f"--{name}={value}" for name, value in given.items())])

    return make


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, pictures) -> Path:
    """A run of masked patch prediction of the same backbone."""
    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "recipe.yaml").write_text(
        BACKBONE + "optim: {lr: 1.0e-3, warmup_steps: 1}\ntrain: {steps: 3, batch_size: 8, threads: 1}\n"
        "heldout: {images: 10, train_images: 20, pictures: 0, min_information: 0}\n"
    )
    words = [str(folder / "recipe.yaml"), "--data.kind=class_folders", f"--data.path={pictures}"]
    assert pretraining.pretrain(load_recipe(PretrainConfig, [*words, f"--out={folder / 'run'}"])) == 0
    return folder / "run"


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def score(run: Path, metric: str = "top1") -> float:
    (row,) = (row for row in lines(run, "results.jsonl") if row["metric"] == metric)
    return row["value"]


def exact(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    timings = ("images_per_second", "data_wait", "seconds", "run")
    return [{k: v for k, v in row.items() if k not in timings} for row in lines(run, name)]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(run / "checkpoints" / f"{step:08}")
    names = [name for name in checkpoint.files if name.endswith(".safetensors")]
    return {f"{name}/{key}": value for name in names for key, value in checkpoint.tensors(name).items()}


def assert_same_run(a: Path, b: Path, step: int) -> None:
    ours, theirs = weights(a, step), weights(b, step)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert exact(a) == exact(b) and exact(a, "results.jsonl") == exact(b, "results.jsonl")


class Stopped(Exception):
    pass


def test_it_learns_what_can_be_learned(recipe):
    config = recipe("--train.steps=60")
    assert job.classify(config) == 0
    assert score(config.out) == 1.0 and score(config.out, "mean_class_accuracy") == 1.0
    assert (config.out / "pictures" / "confusion.png").stat().st_size > 1000


@pytest.mark.parametrize("init", ["scratch", "run"])
def test_a_zero_initialised_head_starts_at_ln_classes(recipe, pretrained, init):
    config = recipe(f"--init={'scratch' if init == 'scratch' else pretrained}", "--train.steps=3")
    assert job.classify(config) == 0
    assert lines(config.out)[0]["loss"] == pytest.approx(math.log(3), abs=1e-6)


def test_the_paper_s_sigmoid_head_starts_at_its_bias(recipe):
    config = recipe("--head.kind=mlp", "--head.bias=-10", "--loss.kind=sigmoid", "--train.steps=3")
    assert job.classify(config) == 0
    one, other = math.log1p(math.exp(-10)), math.log1p(math.exp(10))
    assert lines(config.out)[0]["loss"] == pytest.approx(2 * one + other, rel=1e-5)


def test_init_brings_the_weights_and_another_resolution_resamples_positions(recipe, pretrained):
    config = recipe(f"--init={pretrained}", "--train.steps=1", "--optim.lr=1e-12", "--optim.warmup_steps=0",
                    "--backbone.image_size=[48, 32]")  # fmt: skip
    begun = job.begin(config)
    assert "4x4 -> 6x4" in begun.origin
    theirs = Checkpoint(pretrained / "checkpoints" / "00000003").tensors("model.safetensors")
    ours = begun.backbone.model.state_dict()
    assert torch.equal(ours["blocks.1.mlp.fc1.weight"], theirs["blocks.1.mlp.fc1.weight"])
    assert ours["pos_embed"].shape == (1, 25, 32)
    assert begun.go() == 0


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--averaging.decay=0.9",),
        ("--labels.validation=0.2", "--train.eval_every=3", "--early_stopping.patience=50", "--averaging.decay=0.5"),
        ("--optim.kind=sgd", "--optim.layer_decay=0.7", "--mix.mixup=0.8", "--backbone.drop_path=0.1"),
        ("--optim.kind=timm", "--optim.name=lamb", "--optim.lr=1e-2"),
    ],
    ids=["plain", "average", "early", "regularised", "timm"],
)
def test_a_run_that_stopped_goes_on_to_the_same_bits(recipe, words, monkeypatch):
    words = (*words, "--train.steps=9", "--train.checkpoint_every=4")
    whole, broken = recipe(*words, out="whole"), recipe(*words, out="broken")
    assert job.classify(whole) == 0
    begun = job.begin(broken)
    observe = begun._observe

    def stop_at_seven(step, batch):
        if step == 6:
            raise Stopped
        observe(step, batch)

    monkeypatch.setattr(begun, "_observe", stop_at_seven)
    with pytest.raises(Stopped):
        begun.go()
    assert job.classify(broken) == 0
    assert_same_run(whole.out, broken.out, 9)


def test_early_stopping_keeps_the_best_and_a_finished_run_stays_finished(recipe):
    config = recipe("--labels.validation=9", "--train.steps=200", "--train.eval_every=5", "--early_stopping.patience=2")
    assert job.classify(config) == 0
    found = [(row["step"], row["validation_accuracy"]) for row in lines(config.out) if "validation_accuracy" in row]
    best = max(value for _, value in found)
    first = next(step for step, value in found if value == best)
    assert found[-1][0] == first + 10 < 200  # two evaluations without a new best
    (kept,) = (row for row in lines(config.out, "results.jsonl") if row["metric"] == "top1")
    assert kept["setting"]["kept_step"] == first and kept["step"] == found[-1][0]
    folder = config.out / "checkpoints" / f"{found[-1][0]:08}"
    before = (folder / "manifest.json").read_bytes()
    assert job.classify(config) == 0 and (folder / "manifest.json").read_bytes() == before
    assert len([row for row in lines(config.out, "results.jsonl") if row["metric"] == "top1"]) == 1


def test_a_signal_saves_and_the_same_command_goes_on(recipe, monkeypatch):
    words = ("--train.steps=8", "--averaging.decay=0.9")
    whole, broken = recipe(*words, out="whole"), recipe(*words, out="broken")
    assert job.classify(whole) == 0
    begun = job.begin(broken)
    after = begun._after_update

    def signalled(step):
        after(step)
        begun.runtime.stop.requested = step == 5

    monkeypatch.setattr(begun, "_after_update", signalled)
    assert begun.go() == EXIT_STOPPED
    assert job.classify(broken) == 0
    assert_same_run(whole.out, broken.out, 8)


def test_the_exported_model_classifies_in_plain_timm(recipe, pictures):
    config = recipe("--train.steps=40", "--averaging.decay=0.8")
    assert job.classify(config) == 0
    model = timm.create_model(f"local-dir:{config.out / 'checkpoints' / '00000040'}", pretrained=True).eval()
    assert model.pretrained_cfg["label_names"] == ["dark", "grey", "light"]
    light = np.asarray(Image.open(pictures / "test" / "light" / "0.png"))[1:33, 4:36]
    pixels = torch.from_numpy(light.copy()).permute(2, 0, 1)[None] / 255
    assert model((pixels - 0.5) / 0.5).argmax(1).item() == 2


def test_new_images_are_predicted_also_by_a_finished_run(recipe, pictures, tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    for name in ("dark", "light"):
        (new / f"{name}.png").write_bytes((pictures / "test" / name / "1.png").read_bytes())
    (new / "broken.png").write_bytes(b"no picture at all")
    config = recipe("--train.steps=40")
    assert job.classify(config) == 0
    assert job.classify(replace(config, predict=new)) == 0
    with (config.out / "predictions.csv").open() as file:
        found = {row["file"]: row for row in csv.DictReader(file)}
    assert {name: row["class"] for name, row in found.items()} == {
        "broken.png": "", "dark.png": "dark", "light.png": "light",
    }  # fmt: skip
    assert 1 / 3 < float(found["dark.png"]["probability"]) <= 1


def test_frozen_blocks_stay_and_the_rest_moves(recipe):
    config = recipe("--frozen_blocks=1", "--train.steps=3")
    begun = job.begin(config)
    before = {name: p.detach().clone() for name, p in begun.task.named_parameters()}
    assert begun.go() == 0
    moved = {name for name, p in begun.task.named_parameters() if not torch.equal(p, before[name])}
    frozen = {"patch_embed", "pos_embed", "cls_token", "blocks.0"}
    assert moved and not any(name.startswith(f"backbone.model.{part}") for name in moved for part in frozen)
    assert {"backbone.model.blocks.1.mlp.fc1.weight", "backbone.model.norm.weight", "head.last.weight"} <= moved


def test_a_frozen_backbone_trains_its_head_only(recipe):
    begun = job.begin(recipe("--frozen_blocks=all", "--train.steps=3", "--backbone.dropout=0.5"))
    learning = [name for name, p in begun.task.named_parameters() if p.requires_grad]
    assert learning == ["head.last.weight", "head.last.bias"]
    assert not begun.task.train().backbone.model.training and begun.go() == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--init=nowhere",), "nowhere"),
        (("--init=RUN", "--backbone.embed_dim=64"), r"\(--backbone.embed_dim 32\)"),
        (("--init=RUN", "--backbone.pixel_mean=0.4"), "pixel_mean"),
        (("--labels.kind=per_class", "--labels.count=21"), "21"),
        (("--labels.kind=vtab_1k",), "1,000"),
        (("--real=nowhere.json",), "1,000 classes"),
        (("--predict=nowhere",), "nowhere"),
        (("--mix.mixup=0.8", "--train.micro_batch_size=1"), "mix"),
        (("--augment.rand_augment=rand-m9", "--data.channels=1"), "rand_augment"),
    ],
)
def test_what_cannot_work_is_refused_by_name_before_the_first_step(recipe, pretrained, words, message):
    config = recipe(*(word.replace("RUN", str(pretrained)) for word in words))
    with pytest.raises(ValueError, match=message):
        job.begin(config)
    assert not config.out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--early_stopping.patience=2", "--train.eval_every=2"), "labels.validation"),
        (("--early_stopping.patience=2", "--labels.validation=0.2"), "eval_every"),
        (("--pool=cls", "--backbone.class_token=false"), "class token"),
        (("--predictions=x.csv",), "predict is null"),
        (("--optim.warmup_steps=6",), r"warmup_steps.*try 0"),
    ],
)
def test_recipes_that_contradict_themselves_are_refused(recipe, words, message):
    with pytest.raises(RecipeError, match=message):
        recipe(*words)


def test_a_class_that_train_lacks_is_refused_by_name(recipe, pictures, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(pictures, copy)
    for file in (copy / "train" / "grey").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="grey"):
        job.begin(recipe(f"--data.path={copy}"))
    shutil.rmtree(copy / "train" / "grey")
    with pytest.raises(ValueError, match="grey|classes"):
        job.begin(recipe(f"--data.path={copy}"))


def test_the_stored_classifier_scores_other_images_only_if_their_classes_are_its_own(recipe, pictures, tmp_path):
    import shutil

    from mpp import evaluate
    from mpp.evaluate import EvaluateConfig

    config = recipe("--train.steps=40", "--head.kind=mlp", "--averaging.decay=0.8")
    assert job.classify(config) == 0

    def scored(data: Path, out: str) -> dict:
        words = ["--evaluations=[{kind: classifier}]", "--baseline=random", "--threads=1"]
        words += ["--data.kind=class_folders", f"--data.path={data}", f"--out={tmp_path / out}"]
        assert evaluate.begin(str(config.out), load_recipe(EvaluateConfig, words)).go() == 0
        return {row["metric"]: row["value"] for row in lines(tmp_path / out, "results.jsonl")}

    assert scored(pictures, "same")["top1"] == score(config.out) == 1.0
    other = tmp_path / "other"
    shutil.copytree(pictures, other)
    for split in ("train", "test"):
        (other / split / "grey").rename(other / split / "medium")
    with pytest.raises(ValueError, match="missing 'grey'; extra 'medium'"):
        scored(other, "other")


def test_weights_without_a_classifier_cannot_classify(pretrained, pictures):
    from mpp import evaluate
    from mpp.evaluate import EvaluateConfig

    words = ["--evaluations=[{kind: classifier}]", "--threads=1"]
    with pytest.raises(ValueError, match="hold no classifier"):
        evaluate.begin(str(pretrained), load_recipe(EvaluateConfig, words))


def test_sigmoid_scores_are_its_own_probabilities_and_its_own_loss(recipe, pictures, tmp_path):
    words = ("--loss.kind=sigmoid", "--head.bias=-10", "--optim.lr=1e-9", "--train.steps=3", "--train.eval_every=1")
    config = recipe(*words, f"--predict={pictures / 'test' / 'dark'}")
    assert job.classify(config) == 0
    with (config.out / "predictions.csv").open() as file:
        assert {row["probability"] for row in csv.DictReader(file)} == {f"{1 / (1 + math.exp(10)):.4f}"}
    one, other = math.log1p(math.exp(-10)), math.log1p(math.exp(10))
    tested = [row["test_loss"] for row in lines(config.out) if "test_loss" in row]
    assert tested == pytest.approx([2 * one + other] * 2, rel=1e-5)


def test_real_json_named_after_the_run_was_finished_is_scored_then_and_once(recipe, pictures, tmp_path, monkeypatch):
    import shutil

    from mpp.evaluation.imagenet_real import real_score

    copy, truth = tmp_path / "copy", {}
    shutil.copytree(pictures, copy)
    for number, file in enumerate(sorted((copy / "test").rglob("*.png")), 1):
        truth[number] = [["dark", "grey", "light"].index(file.parent.name)]
        file.rename(file.with_name(f"ILSVRC2012_val_{number:08}.png"))
    (tmp_path / "real.json").write_text(json.dumps([truth.get(number, []) for number in range(1, 50_001)]))
    monkeypatch.setattr(job, "check_imagenet_classes", lambda classes: None)  # three classes, and 15 of 50,000 images
    monkeypatch.setattr(job, "real_score", lambda *given, **_: real_score(*given, allow_missing=True))
    config = recipe(f"--data.path={copy}")
    assert job.classify(config) == 0
    assert not [row for row in lines(config.out, "results.jsonl") if row["metric"] == "real_top1"]
    for _ in range(2):
        assert job.classify(replace(config, real=tmp_path / "real.json")) == 0
        found = [row for row in lines(config.out, "results.jsonl") if row["metric"] == "real_top1"]
        assert len(found) == 1 and found[0]["images"] == 15 and found[0]["value"] == score(config.out)


def test_a_finished_run_predicts_whatever_the_split_of_its_batches_was(recipe, pictures, tmp_path):
    config = recipe("--backbone.dropout=0.1")
    assert job.classify(config) == 0
    folder = pictures / "test" / "dark"
    again = recipe("--backbone.dropout=0.1", "--train.micro_batch_size=4", f"--predict={folder}")
    assert job.classify(again) == 0
    assert len(list(csv.DictReader((config.out / "predictions.csv").read_text().splitlines()))) == 5


def test_what_the_header_warns_of(recipe, pictures, capsys):
    words = ("--averaging.decay=0.9999", f"--data.path={pictures / 'train'}", "--data.heldout=0.2", "--train.steps=3")
    assert job.classify(recipe(*words)) == 0
    told = capsys.readouterr().out
    assert "averaging.decay 0.9999 remembers longer than 3 steps" in told
    assert "no test split, so 12 train images are tested on" in told
    assert job.classify(recipe("--averaging.decay=0.5", out="short")) == 0
    told = capsys.readouterr().out
    assert "remembers longer" not in told and "no test split" not in told


def test_a_run_that_was_ended_early_is_finished_also_where_batches_would_be_split_otherwise(recipe):
    words = ("--labels.validation=9", "--train.steps=200", "--train.eval_every=5", "--early_stopping.patience=1")
    words += ("--mix.mixup=0.2", "--optim.lr=1e-9", "--optim.warmup_steps=1")
    assert job.begin(recipe(*words)).go() == 0
    again = job.begin(recipe(*words, "--train.micro_batch_size=4"))
    assert again.go() == 0 and again.trainer.step < 200
