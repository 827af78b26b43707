"""A folder of odd and broken pictures among good ones: the run finishes, and names exactly what it had to skip."""

import csv
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mpp.config import load_recipe
from mpp.pretrain import PretrainConfig, pretrain

RECIPE = """
data: {kind: folder, heldout: 0.1}
augment: {crop: {kind: random_resized_crop, scale: [0.3, 1.0]}}
backbone: {kind: vit, patch_size: 8, image_size: 32, embed_dim: 32, depth: 2, num_heads: 2}
train: {steps: 36, batch_size: 8, log_every: 12, threads: 1}
heldout: {images: 1000, train_images: 300, pictures: 0}
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_jsonl_agrees_with_the_index(tmp_path, shared, workers):
    folder = tmp_path / "pictures"
    with tarfile.open(shared / "odd_images" / "odd_images.tar") as tar:
        tar.extractall(folder, filter="data")
    rng = np.random.default_rng(0)
    (folder / "good").mkdir()
    for number in range(200):
        corners = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)
        picture = Image.fromarray(corners).resize((48, 40), Image.Resampling.BICUBIC)
        picture.save(folder / "good" / f"{number}.png")
    (tmp_path / "odd.yaml").write_text(RECIPE)
    argv = [
        str(tmp_path / "odd.yaml"),
        f"--data.path={folder}",
        f"--out={tmp_path / 'run'}",
        f"--train.workers={workers}",
    ]
    config = load_recipe(PretrainConfig, argv)
    assert pretrain(config) == 0  # 36 steps of 8 are 288 places: more than one epoch of the 270 that train

    rows = [json.loads(line) for line in (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()]
    names = [row["name"].removeprefix("files/") for row in rows]
    assert len(set(names)) == len(names) and all(row["reason"] for row in rows)
    with (shared / "odd_images" / "index.tsv").open(encoding="utf-8", newline="") as file:
        index = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    listed = {row["file"].replace("\\t", "\t").replace("\\n", "\n"): row["expected"] for row in index}
    listed = {name: expected for name, expected in listed.items() if not Path(name).name.startswith(".")}
    must = {name for name, expected in listed.items() if expected == "skip"}
    must_not = {name for name, expected in listed.items() if expected == "decode"}
    assert len(must) == 20 and len(must_not) == 54
    assert must <= set(names) and not must_not & set(names) and set(names) <= set(listed)
