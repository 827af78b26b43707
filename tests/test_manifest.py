"""Damage of any kind to any file of a checkpoint is found and named; nothing damaged or hostile is ever loaded."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from mpp import manifest
from mpp.checkpoint import Checkpoint, CheckpointError, UnknownFormat, newest, prune, save, verify

FILES = [
    "model.safetensors",
    "state/optimizer.safetensors",
    "config.json",
    "state/trainer.json",
    "manifest.json",
]


def write(run: Path, step: int, value: float = 0.0) -> Path:
    """A small checkpoint, `value` in all its files."""
    tensors = {
        "model.safetensors": {"w": torch.full((3, 4), value), "b": torch.full((4,), value)},
        "state/optimizer.safetensors": {"w.exp_avg": torch.full((3, 4), value)},
    }
    documents = {"config.json": {"value": value}, "state/trainer.json": {"step": step, "value": value}}
    return save(run, step, tensors, documents, facts={"world_size": 2, "value": value})


def value_in(checkpoint: Checkpoint) -> float:
    """The value that `write` was given; it must be the same in every file."""
    found = {checkpoint.document(name)["value"] for name in FILES[2:4]} | {checkpoint.facts["value"]}
    for name in FILES[:2]:
        found |= {value for tensor in checkpoint.tensors(name).values() for value in tensor.flatten().tolist()}
    assert len(found) == 1
    return found.pop()


def cut(share: float):
    return lambda path, other: os.truncate(path, int(path.stat().st_size * share))


def flip(place: float):
    def damage(path, other):
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return damage


def swap(path, other):
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs), other.write_bytes(mine)


def replace(how):
    def damage(path, other):
        os.rename(path, path.with_name("aside"))
        how(path)

    return damage


DAMAGES = {
    **{f"cut to {share:.0%}": cut(share) for share in (0, 0.01, 0.5, 0.99)},
    **{f"flipped at {place:.0%}": flip(place) for place in (0, 0.5, 1)},
    "deleted": replace(lambda path: None),
    "of another step": swap,
    "a link": replace(lambda path: path.symlink_to("aside")),
    "a pipe": replace(os.mkfifo),
    "a folder": replace(os.mkdir),
}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run with checkpoints of the steps 100, 200 and 300."""
    run = tmp_path_factory.mktemp("three")
    for step in (100, 200, 300):
        write(run, step, float(step))
    return run


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_never_loaded(tmp_path, three, name, damage):
    shutil.copytree(three, tmp_path, dirs_exist_ok=True)
    bad, second = tmp_path / "checkpoints/00000300", tmp_path / "checkpoints/00000200"
    DAMAGES[damage](bad / name, second / name)
    with pytest.raises(CheckpointError, match=f"{bad}: {name}: "):
        verify(bad)
    with pytest.raises(CheckpointError, match=f"{bad}: {name}: "):
        opened = Checkpoint(bad)
        opened.tensors(name) if name.endswith(".safetensors") else opened.document(name)
    checkpoint, skipped = newest(tmp_path)
    good, named = (100, [bad, second]) if damage == "of another step" else (200, [bad])
    assert checkpoint is not None and value_in(checkpoint) == good
    assert [path for path, _ in skipped] == named and all(reason.startswith(f"{name}: ") for _, reason in skipped)
    assert checkpoint.path not in prune(tmp_path, keep_last=1) and newest(tmp_path)[0].step == good


def test_no_flipped_bit_of_a_manifest_goes_unnoticed(tmp_path):
    path = write(tmp_path, 7) / "manifest.json"
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        with pytest.raises(CheckpointError) as caught:
            Checkpoint(path.parent)
        assert not isinstance(caught.value, UnknownFormat)


def test_a_start_from_scratch_is_refused_while_anything_is_there(tmp_path):
    for step in (100, 200):
        DAMAGES["deleted"](write(tmp_path, step) / "model.safetensors", None)
    with pytest.raises(CheckpointError, match=r"00000200: model.*\n.*00000100: model.safetensors: is missing"):
        newest(tmp_path)
    assert prune(tmp_path, keep_last=1) == [] and len(os.listdir(tmp_path / "checkpoints")) == 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other/checkpoints").touch()
    with pytest.raises(CheckpointError, match="is not a folder"):
        newest(tmp_path / "other")


def forge(path: Path, **changes) -> None:
    """Change a manifest and seal it again, as another version or a stranger could."""
    content = {**json.loads(path.read_text()), **changes}
    content.pop("sha256")
    path.write_bytes(manifest.sealed(content, "forged"))


def test_another_format_is_refused_with_the_version_needed(tmp_path):
    write(tmp_path, 100)
    forge(write(tmp_path, 200) / "manifest.json", format=2, needs="mpp >= 3.1", files="laid out otherwise")
    with pytest.raises(UnknownFormat, match=r"00000200: has checkpoint format 2, .* needed: mpp >= 3.1"):
        newest(tmp_path)  # an older one must not be taken in silence


@pytest.mark.parametrize("name", ["../secret.json", "/etc/hostname", "a/../../secret.json", "a\\b", "", ".", "a//b"])
def test_a_manifest_cannot_lead_outside(tmp_path, name):
    path = write(tmp_path, 100)
    (path.parent / "secret.json").write_text("{}")
    forge(
        path / "manifest.json",
        files={name: {"size": 2, "sha256": manifest.sha256(path.parent / "secret.json")}},
    )
    with pytest.raises(CheckpointError, match="does not lie in the folder"):
        verify(path)


def test_a_linked_folder_in_a_checkpoint_is_not_followed(tmp_path):
    path = write(tmp_path, 100)
    os.rename(path / "state", tmp_path / "state")
    (path / "state").symlink_to(tmp_path / "state")
    with pytest.raises(CheckpointError, match="state: is a link"):
        verify(path)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 900 + "1" + "}" * 900, "[]", "1" * 5000, "{}", " " * (manifest.LIMIT + 1)],
)
def test_a_hostile_manifest_ends_in_one_error(tmp_path, text):
    path = write(tmp_path, 100)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json: "):
        verify(path)


@pytest.mark.parametrize("changes", [{"step": "1"}, {"files": []}, {"files": {"x": 3}}, {"facts": None}])
def test_a_sealed_manifest_of_wrong_types_is_refused(tmp_path, changes):
    path = write(tmp_path, 100)
    forge(path / "manifest.json", **changes)
    with pytest.raises(CheckpointError, match=r"manifest\.json: "):
        verify(path)
