"""Classes of new images: by a finished run alone, equal to the run's own; refused where there is no classifier."""

import csv
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

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
    assert "4 images classified, 1 of them unreadable" in capsys.readouterr().out


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
