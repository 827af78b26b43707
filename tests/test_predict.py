"""Classes of new images: by a finished run alone, equal to the run's own; refused where there is no classifier."""

import csv
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mpp import classify, predict
from mpp.classify_recipe import ClassifyConfig
from mpp.config import RecipeError, load_recipe
from mpp.predict import PredictConfig

RECIPE = """
backbone: {kind: vit, patch_size: 8, image_size: 32, embed_dim: 32, depth: 1, num_heads: 2}
augment: {crop: {kind: shifted_crop, padding: 2}}
view: {kind: squeeze, crop: 1.0}
loss: {kind: sigmoid}
optim: {kind: adamw, lr: 3.0e-3, warmup_steps: 2}
train: {steps: 20, batch_size: 8, threads: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_classes) -> Path:
    """A finished run whose training data is gone, its predictions of `new`, and `new` with a broken file."""
    folder = tmp_path_factory.mktemp("predict")
    write_classes(folder / "data", train=20, test=5)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "new" / "deep").mkdir(parents=True)
    for name in "abc":
        shutil.copy(folder / "data" / "test" / name / "1.png", folder / "new" / "deep" / f"{name}.png")
    (folder / "new" / "broken.png").write_bytes(b"no picture at all")
    words = ["--data.kind=class_folders", f"--data.path={folder / 'data'}", f"--out={folder / 'run'}"]
    config = load_recipe(ClassifyConfig, [str(folder / "recipe.yaml"), *words])
    assert classify.classify(replace(config, predict=folder / "new")) == 0
    shutil.rmtree(folder / "data")
    return folder


def asked(*words) -> PredictConfig:
    return load_recipe(PredictConfig, ["--threads=1", *words])


def test_a_run_alone_predicts_what_it_predicted_with_its_data(folder, tmp_path, capsys):
    out = tmp_path / "below" / "classes.csv"
    assert predict.begin(str(folder / "run"), asked(f"--images={folder / 'new'}", f"--out={out}")).go() == 0
    assert out.read_text() == (folder / "run" / "predictions.csv").read_text()
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert {row["file"]: row["class"] for row in rows} == {
        "broken.png": "", "deep/a.png": "a", "deep/b.png": "b", "deep/c.png": "c",
    }  # fmt: skip
    told = capsys.readouterr().out
    assert "3 images classified" in told and "1 image could not be read" in told and "  broken.png: " in told


def test_a_checkpoint_writes_beside_its_run_and_another_view_is_another_score(folder):
    newest = next((folder / "run" / "checkpoints").iterdir())
    before = (folder / "run" / "predictions.csv").read_text()
    assert predict.begin(str(newest), asked(f"--images={folder / 'new'}", "--view.crop=0.5")).go() == 0
    assert (folder / "run" / "predictions.csv").read_text() != before


def test_what_cannot_be_predicted_is_refused(folder, tmp_path):
    with pytest.raises(RecipeError, match="images: names no folder"):
        asked()
    with pytest.raises(ValueError, match="nowhere"):
        predict.begin(str(folder / "run"), asked("--images=nowhere"))
    with pytest.raises(ValueError, match="nowhere"):
        predict.begin("nowhere", asked(f"--images={folder / 'new'}"))
    backbone = tmp_path / "timm"
    backbone.mkdir()
    newest = next((folder / "run" / "checkpoints").iterdir())
    for name in ("config.json", "model.safetensors"):
        shutil.copy(newest / name, backbone / name)
    with pytest.raises(ValueError, match="holds no classifier; name a run"):
        predict.begin(str(backbone), asked(f"--images={folder / 'new'}"))


def test_the_run_s_own_black_and_white_hold_for_new_images(tmp_path):
    """16-bit images in a narrow range: with another one all of them would look alike."""
    shades = {"dark": 1000, "mid": 1100, "light": 1200}
    for split, count in (("train", 12), ("test", 4)):
        for name, shade in shades.items():
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = np.full((32, 32), shade, dtype=np.uint16) + np.arange(i, i + 32, dtype=np.uint16) % 8
                Image.fromarray(pixels).save(tmp_path / "data" / split / name / f"{i}.png")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = ["--data.kind=class_folders", f"--data.path={tmp_path / 'data'}", f"--out={tmp_path / 'run'}"]
    words += ["--data.range=[900, 1300]", "--data.channels=1", "--loss.kind=softmax", "--train.steps=40"]
    assert classify.classify(load_recipe(ClassifyConfig, [str(tmp_path / "recipe.yaml"), *words])) == 0
    for words, right in (((), 12), (("--range=[0, 65535]",), 4)):
        out = tmp_path / "p.csv"
        job = predict.begin(
            str(tmp_path / "run"), asked(f"--images={tmp_path / 'data' / 'test'}", f"--out={out}", *words)
        )
        assert job.go() == 0
        rows = list(csv.DictReader(out.read_text().splitlines()))
        assert sum(row["file"].split("/")[0] == row["class"] for row in rows) == right


def test_a_signal_leaves_nothing_half_written_and_no_readable_image_is_a_failure(folder, tmp_path):
    out = tmp_path / "classes.csv"
    job = predict.begin(str(folder / "run"), asked(f"--images={folder / 'new'}", f"--out={out}"))
    job.runtime.stop.requested = True
    assert job.go() == 75 and not out.exists()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.png").write_bytes(b"no picture")
    assert predict.begin(str(folder / "run"), asked(f"--images={tmp_path / 'bad'}", f"--out={out}")).go() == 1
    assert out.read_text().splitlines()[1] == "x.png,,,,"
    with pytest.raises(ValueError, match=r"out: .* is a folder; name a file"):
        predict.begin(str(folder / "run"), asked(f"--images={folder / 'new'}", f"--out={tmp_path}"))
    with pytest.raises(ValueError, match=r"out: .*classes.csv cannot be a folder"):
        predict.begin(str(folder / "run"), asked(f"--images={folder / 'new'}", f"--out={out / 'deeper.csv'}"))
