"""F5, F17, F18, F21, F28: damaged checkpoints, hostile files; little shared memory, few open files."""

import os
import pickle
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image

from mpp.checkpoint import places

MEASURED = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print("at most", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, "kB", file=sys.stderr)
sys.exit(code)
"""


def kilobytes(ended) -> int:
    return int(ended.errors.rsplit("at most ", 1)[1].split()[0])


def test_f5_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(kit, twin):
    kit.run("damaged", "--train.keep_last=9", faults=[{"place": "update", "step": 18, "action": "kill"}])
    checkpoints = kit.folder / "damaged" / "checkpoints"
    weights = checkpoints / "00000015" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    ended = kit.run("damaged", "--train.keep_last=9")
    assert ended.code == 0 and "goes on at step 10" in ended.out, ended.text
    assert "00000015" in ended.out and "model.safetensors" in ended.out
    kit.assert_twins("damaged", twin)


def test_f5_without_any_valid_checkpoint_nothing_starts_from_scratch(kit):
    kit.run("hopeless", faults=[{"place": "update", "step": 13, "action": "kill"}])
    for place in places(kit.folder / "hopeless"):
        (place / "manifest.json").write_bytes(b"")
    before = sorted((kit.folder / "hopeless").rglob("*"))
    ended = kit.run("hopeless")
    assert ended.code == 2 and "00000010" in ended.errors and "00000005" in ended.errors, ended.text
    assert sorted((kit.folder / "hopeless").rglob("*")) == before


def png(width: int, height: int, data: bytes) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_f18_f21_bombs_and_a_picture_of_280_megapixels_cost_no_memory(kit, tmp_path):
    """Those over 150 megapixels are skipped by their header, honest ones too."""
    shutil.copytree(kit.folder / "pictures", folder := tmp_path / "pictures")
    shutil.copy(kit.folder / "tiny.yaml", tmp_path)
    bombed = type(kit)(tmp_path)
    (folder / "a" / "bomb.png").write_bytes(png(20_000, 20_000, zlib.compress(bytes(20_001 * 20_000), 9)))
    (folder / "b" / "bomb.gif").write_bytes(b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b",")
    Image.new("L", (20_000, 14_000), 128).save(folder / "a" / "honest.jpg", quality=50)
    frame = Image.new("L", (50, 50))
    frame.save(folder / "b" / "frames.gif", save_all=True, append_images=[Image.new("L", (50, 50), 255), frame] * 5000)
    words = ("--train.workers=0", "--data.heldout=0.02", "--heldout.images=2")
    within = [sys.executable, "-c", MEASURED]
    plain = kit.run("unbombed", *words, within=within)
    ended = bombed.run("run", *words, within=within)
    assert plain.code == ended.code == 0, ended.text
    reasons = {Path(row["name"]).name: row["reason"] for row in bombed.lines("run", "skipped.jsonl")}
    assert reasons.keys() == {"bomb.png", "bomb.gif", "honest.jpg"}
    assert reasons["honest.jpg"] == "20000x14000 is more than 150000000 pixels: refused before decoding"
    assert kilobytes(ended) - kilobytes(plain) < 200_000


class Attack:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["weights.pt", "weights.bin", "weights.npz"])
def test_f17_no_tool_runs_what_a_file_of_weights_would(kit, name, tmp_path):
    file, made = tmp_path / name, tmp_path / "made"
    if name.endswith(".pt"):
        torch.save({"model": Attack(made)}, file)
    else:
        file.write_bytes(pickle.dumps({"model": Attack(made)}))
    ended = kit.run("attacked", f"--init={file}")
    assert ended.code == 2 and str(file) in ended.errors and ended.errors.count("\n") == 1, ended.text
    assert not made.exists()


def test_f17_no_recipe_runs_anything(kit, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(f"train: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n")
    tool = Path(__file__).parent.parent.parent / "tools" / "pretrain_mpp.py"
    environment = os.environ | {"PYTHONPATH": str(tool.parent.parent)}
    ended = subprocess.run([sys.executable, str(tool), str(file)], capture_output=True, text=True, env=environment)
    assert ended.returncode == 2 and str(file) in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "made").exists()


def test_f28_little_shared_memory_is_told_with_a_number_that_works(kit):
    script = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    within = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if os.geteuid() or subprocess.run([*within, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    ended = kit.run("small", "--train.workers=2", within=within)
    assert ended.code == 2 and "in /dev/shm, and 0 MB are free; try --train.workers 0" in ended.errors, ended.text


@pytest.mark.parametrize("hard", ["-n", "-Sn"])
def test_f28_few_open_files_are_made_more_or_done_without(kit, twin, hard):
    out = f"files{hard}"
    ended = kit.run(out, "--train.workers=2", within=["sh", "-c", f'ulimit {hard} 64 && exec "$@"', "sh"])
    assert ended.code == 0, ended.text
    assert ("raised the limit of open files from 64" if hard == "-Sn" else "at most 64 files may be open") in ended.out
    kit.assert_twins(out, twin)
