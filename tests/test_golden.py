"""A change that is not meant to alter the mathematics leaves these losses equal to the last printed digit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden" / "pretrain.txt"
RECIPE = """
data: {kind: folder, heldout: 0.1}
augment: {crop: {kind: random_resized_crop, scale: [0.2, 1.0]}}
backbone: {kind: vit, patch_size: 8, image_size: [32, 48], embed_dim: 48, depth: 3, num_heads: 3}
optim: {lr: 2.0e-3, betas: [0.9, 0.95], warmup_steps: 5, weight_decay: 0.05}
train: {steps: 24, batch_size: 16, micro_batch_size: 8, log_every: 2, threads: 1, seed: 3}
heldout: {images: 10, train_images: 60, pictures: 0}
"""
# One instruction set for all: other CPUs would sum in another order and differ in the last digits.
SAME_EVERYWHERE = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}


def losses(folder: Path) -> str:
    """The curve of a run on 100 generated pictures, as text."""
    rng = np.random.default_rng(0)
    (folder / "pictures").mkdir()
    for number in range(100):
        corners = rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)
        Image.fromarray(corners).resize((60, 40), Image.Resampling.BICUBIC).save(
            folder / "pictures" / f"{number:03}.png"
        )
    (folder / "golden.yaml").write_text(RECIPE)
    tool = [sys.executable, str(ROOT / "tools" / "pretrain_mpp.py"), str(folder / "golden.yaml")]
    words = [f"--data.path={folder / 'pictures'}", f"--out={folder / 'run'}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | SAME_EVERYWHERE
    done = subprocess.run([*tool, *words], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    names = (
        "loss",
        "accuracy",
        "grad_norm",
        "lr",
        "heldout_loss",
        "heldout_loss_masked",
        "baseline_entropy",
        "baseline_neighbour_loss",
    )
    return "".join(
        f"step {row['step']:2} {name} {row[name]:.4f}\n" for row in rows for name in names if row.get(name) is not None
    )


def test_the_loss_curve_is_the_golden_one(tmp_path):
    found = losses(tmp_path)
    assert found == GOLDEN.read_text(), (
        f"If the mathematics was meant to change: python {Path(__file__).name} > golden/pretrain.txt, and say in the "
        f"commit what changed and what a real run gained by it"
    )


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        print(losses(Path(place)), end="")
