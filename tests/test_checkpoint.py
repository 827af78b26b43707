"""A checkpoint exists whole and is found, the newest by step, or does not exist; nothing is stored inexactly."""

import errno
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mpp.checkpoint import Checkpoint, CheckpointError, newest, prune, save, tidy, verify

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


def current(run: Path) -> Checkpoint:
    checkpoint, skipped = newest(run)
    assert checkpoint is not None and not skipped
    return checkpoint


def names(run: Path) -> list[str]:
    return sorted(os.listdir(run / "checkpoints"))


def test_what_was_saved_comes_back(tmp_path):
    path = write(tmp_path / "a" / "run", 200, 0.1)
    assert path == tmp_path / "a/run/checkpoints/00000200"
    assert sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()) == sorted(FILES)
    checkpoint = current(tmp_path / "a" / "run")
    assert (checkpoint.path, checkpoint.step, checkpoint.facts) == (
        path,
        200,
        {"world_size": 2, "value": 0.1},
    )
    assert checkpoint.document("state/trainer.json") == {"step": 200, "value": 0.1}
    assert torch.equal(checkpoint.tensors("model.safetensors")["w"], torch.full((3, 4), 0.1))
    assert names(tmp_path / "a" / "run") == ["00000200"]
    verify(path)


def test_a_run_without_checkpoints_starts_anew(tmp_path):
    assert newest(tmp_path) == newest(tmp_path / "absent") == (None, [])
    (tmp_path / "checkpoints" / ".tmp-killed-in-its-first-save").mkdir(parents=True)
    assert newest(tmp_path) == (None, [])
    assert prune(tmp_path, 1) == [tmp_path / "checkpoints" / ".tmp-killed-in-its-first-save"]
    assert names(tmp_path) == []


base = torch.arange(24.0).reshape(2, 3, 4)
ODD = {
    "transposed": base.transpose(0, 2),
    "strided": base[:, ::2, 1:3],
    "expanded": torch.ones(1).expand(3, 5),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "empty too": torch.empty(0),
    "parameter": torch.nn.Parameter(torch.randn(3)),
    "bfloat16": torch.randn(7).bfloat16(),
    "float16": torch.randn(7).half(),
    "float8": torch.randn(7).to(torch.float8_e4m3fn),
    "complex": torch.view_as_complex(torch.randn(3, 2)).conj(),
    "negated": torch.view_as_complex(torch.randn(3, 2)).conj().imag,
    "bool": torch.tensor([True, False]),
    "uint8": torch.arange(256).to(torch.uint8),
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
}


@pytest.mark.parametrize("kind", ODD)
def test_any_tensor_keeps_its_bits(tmp_path, kind):
    save(tmp_path, 1, {"x.safetensors": {"x": ODD[kind]}}, {}, {})
    (loaded,) = current(tmp_path).tensors("x.safetensors").values()
    wanted = ODD[kind].detach().resolve_conj().resolve_neg().contiguous()
    assert (loaded.dtype, loaded.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(loaded.reshape(-1, 1).view(torch.uint8), wanted.reshape(-1, 1).view(torch.uint8))


def test_tensors_that_share_memory_are_each_stored(tmp_path):
    tied = {"head": base, "embed": base, "rows": base[1:], "all": base.view(-1), "none": base[:0]}
    save(tmp_path, 1, {"x.safetensors": tied}, {}, {})
    loaded = current(tmp_path).tensors("x.safetensors")
    assert all(torch.equal(loaded[name], tied[name]) for name in tied) and loaded.keys() == tied.keys()
    save(tmp_path, 2, {"x.safetensors": loaded, "nothing.safetensors": {}}, {}, {})
    assert current(tmp_path).tensors("nothing.safetensors") == {}


def test_loaded_tensors_do_not_hang_on_the_file(tmp_path):
    path = write(tmp_path, 1, 5.0)
    loaded = Checkpoint(path).tensors("model.safetensors")["w"]
    os.truncate(path / "model.safetensors", 0)  # reading a mapped page would now end the process
    assert loaded.eq(5).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_device_come_back_on_the_cpu(tmp_path):
    save(tmp_path, 1, {"x.safetensors": {"x": base.cuda(), "tied": base.cuda()[0]}}, {}, {})
    assert torch.equal(current(tmp_path).tensors("x.safetensors")["x"], base)


@pytest.mark.parametrize(
    "tensors, documents, facts",
    [
        ({"x.safetensors": {"x": torch.empty(3, device="meta")}}, {}, {}),
        ({"x.safetensors": {"x": torch.eye(3).to_sparse()}}, {}, {}),
        ({"x.safetensors": {"x": torch.zeros(2, dtype=torch.complex128)}}, {}, {}),
        ({"x.safetensors": {"x": [1.0, 2.0]}}, {}, {}),
        ({}, {"x.json": {1: "a number as key"}}, {}),
        ({}, {"x.json": [{"deep": torch.zeros(1)}]}, {}),
        ({}, {}, {"path": Path("x")}),
        ({}, {}, ["no dict"]),
        ({}, {}, {"long": "x" * 2**24}),
        ({}, {"../outside.json": 1}, {}),
        ({}, {"/tmp/outside.json": 1}, {}),
        ({}, {"a/../../outside.json": 1}, {}),
        ({}, {"manifest.json": 1}, {}),
        ({"same.json": {}}, {"same.json": 1}, {}),
    ],
)
def test_what_cannot_be_stored_exactly_is_refused_and_leaves_nothing(tmp_path, tensors, documents, facts):
    write(tmp_path, 1, 1.0)
    with pytest.raises(CheckpointError, match=r"00000002|tmp-"):
        save(tmp_path, 2, tensors, documents, facts)
    assert names(tmp_path) == ["00000001"] and not list(tmp_path.rglob("outside*"))


@pytest.mark.parametrize("step", [-1, 1.0, True, "1"])
def test_a_step_is_a_whole_number(tmp_path, step):
    with pytest.raises(CheckpointError, match="whole number"):
        write(tmp_path, step)


def test_newest_goes_by_step_whatever_the_clock_says(tmp_path, monkeypatch):
    for step, clock in [(200, 2e9), (99_999_999, 0), (3 * 10**20, 1e9), (100_000_000, 2e9)]:
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        os.utime(write(tmp_path, step), (clock, clock))
    assert current(tmp_path).step == 3 * 10**20
    prune(tmp_path, keep_last=2)
    assert [int(name) for name in names(tmp_path)] == [10**8, 3 * 10**20]


def test_other_names_are_ignored(tmp_path):
    write(tmp_path, 5)
    for name in ["best", "12a", "٣", "-7", "old-9", ".tmp-1", "5 copy"]:
        (tmp_path / "checkpoints" / name).mkdir()
    assert current(tmp_path).step == 5
    (tmp_path / "notes.txt").touch()
    (tmp_path / "checkpoints/00000005/notes.txt").write_text("mine")
    verify(tmp_path / "checkpoints/00000005")
    with pytest.raises(CheckpointError, match=r"notes.txt: is no part of it; it holds model.safetensors"):
        current(tmp_path).document("notes.txt")


def stand_in(kind: str, path: Path, whole: Path) -> None:
    if kind == "a link":
        path.symlink_to(whole)
    elif kind == "a file":
        path.write_text("x")
    elif kind == "missing":
        path.mkdir()
    else:
        os.rename(whole, path)


@pytest.mark.parametrize("kind", ["a link", "a file", "missing", "is that of step 200"])
def test_what_only_looks_like_a_checkpoint_is_named_and_passed_over(tmp_path, kind):
    write(tmp_path, 100)
    fake = tmp_path / "checkpoints/99999999999"
    stand_in(kind, fake, whole=write(tmp_path, 200))
    checkpoint, [(path, reason)] = newest(tmp_path)
    assert checkpoint is not None and checkpoint.step == (100 if kind.startswith("is that") else 200)
    assert path == fake and kind in reason and str(path) not in reason
    prune(tmp_path, keep_last=1)
    assert fake.exists() and newest(tmp_path)[0].step == checkpoint.step
    assert value_in(Checkpoint(write(tmp_path, 99999999999, 3.0))) == 3.0  # the same step may be reached again


def test_prune_keeps_the_newest_and_says_what_went(tmp_path):
    for step in range(1, 6):
        write(tmp_path, step)
    assert [path.name for path in prune(tmp_path, keep_last=2)] == ["00000003", "00000002", "00000001"]
    assert names(tmp_path) == ["00000004", "00000005"] and prune(tmp_path, keep_last=2) == []
    with pytest.raises(ValueError, match="1 or more"):
        prune(tmp_path, keep_last=0)


def test_prune_keeps_those_at_multiples_beside_the_newest(tmp_path):
    for step in range(1, 9):
        write(tmp_path, step)
    assert [path.name for path in prune(tmp_path, 1, keep_every=3)] == [f"{step:08}" for step in (7, 5, 4, 2, 1)]
    assert names(tmp_path) == ["00000003", "00000006", "00000008"]


def test_prune_never_takes_the_last_valid_one(tmp_path):
    for step in range(1, 6):
        write(tmp_path, step)
    for step in (4, 5):  # sizes are right, hashes are not
        path = tmp_path / f"checkpoints/{step:08d}/model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert [path.name for path in prune(tmp_path, keep_last=1)] == ["00000002", "00000001"]
    assert newest(tmp_path)[0].step == 3


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    def refuse(handle):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    write(tmp_path, 100, 1.0)
    for step in (100, 200):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="quota"):
            patch.setattr(os, "fsync", refuse)
            write(tmp_path, step, 2.0)
        assert names(tmp_path) == ["00000100"] and value_in(current(tmp_path)) == 1.0


def test_a_tensor_file_too_large_for_the_disk_is_an_oserror_with_its_number(tmp_path):
    write(tmp_path, 100, 1.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            save(tmp_path, 200, {"x.safetensors": {"x": torch.zeros(10**6)}}, {}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG and "x.safetensors" in str(caught.value)
    assert names(tmp_path) == ["00000100"] and current(tmp_path).step == 100


def test_a_failed_replacement_leaves_the_old_one(tmp_path, monkeypatch):
    write(tmp_path, 100, 1.0)
    rename, calls = os.rename, []

    def second_fails(old, new):
        calls.append(new)
        if len(calls) == 2:
            raise OSError(errno.EIO, "broken")
        rename(old, new)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="broken"):
        patch.setattr(os, "rename", second_fails)
        write(tmp_path, 100, 2.0)
    assert value_in(current(tmp_path)) == 1.0
    assert tidy(tmp_path) == [] and names(tmp_path) == ["00000100"] and value_in(current(tmp_path)) == 1.0


def test_checking_needs_no_torch():
    code = "import sys, mpp.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0


def test_what_has_no_checkpoint_is_called_what_it_is(tmp_path, capsys):
    from mpp.checkpoint import main

    assert main(["verify", str(tmp_path)]) == 1
    assert "neither a run nor a checkpoint" in capsys.readouterr().out
    (tmp_path / "recipe.yaml").write_text("")
    assert main(["verify", str(tmp_path)]) == 1
    assert "has not saved yet" in capsys.readouterr().out
