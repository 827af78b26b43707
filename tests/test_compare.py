"""Two checkpoints are equal only to the last bit, and a person at a shell is told where they are not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpp.checkpoint import Checkpoint, main, save
from mpp.compare import differences, tensor_difference, value_difference


def write(run: Path, step: int = 5, document=None, facts=None, **tensors) -> Path:
    tensors = {"a": torch.zeros(2, 3), "b": torch.tensor([float("nan"), 1.0]), **tensors}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    document = {"windows": [{"sum": 1.5}], "epoch": 1} if document is None else document
    return save(run, step, {"model.safetensors": tensors}, {"state/trainer.json": document}, facts or {})


@pytest.mark.parametrize(
    "change, line",
    [
        ({}, ""),
        ({"facts": {"host": "other"}}, ""),
        ({"step": 6}, "step: 5 against 6"),
        (
            {"b": torch.tensor([float("nan"), 1 + 2**-23])},
            "model.safetensors: b differs in 1 of 2 values, by up to 1.19e-07; "
            "the first, number 1: 1 against 1.00000012",
        ),
        (
            {"a": torch.tensor([[0, 0, 3], [0, -7, 0.0]]), "b": None},
            "model.safetensors: a differs in 2 of 6 values, by up to 7; "
            "the first, number 2: 0 against 3 (2 tensors differ)",
        ),
        ({"b": None}, "model.safetensors: b is only in the first"),
        ({"c": torch.zeros(1)}, "model.safetensors: c is only in the second"),
        (
            {"a": torch.zeros(3, 2)},
            "model.safetensors: a is (2, 3) torch.float32 against (3, 2) torch.float32",
        ),
        (
            {"document": {"windows": [{"sum": 1.75}], "epoch": 2}},
            "state/trainer.json: windows.0.sum: 1.5 against 1.75",
        ),
        ({"document": {"windows": [], "epoch": 1}}, "state/trainer.json: windows: [{'sum': 1.5}] against []"),
    ],
)
def test_the_first_difference_is_named(tmp_path, capsys, change, line):
    first, second = write(tmp_path / "a"), write(tmp_path / "b", **change)
    assert list(differences(Checkpoint(first), Checkpoint(second))) == ([line] if line else [])
    for paths in [(first, second), (tmp_path / "a", tmp_path / "b"), (first, tmp_path / "b" / "checkpoints")]:
        assert main(["compare", *map(str, paths)]) == (1 if line else 0)
        said = capsys.readouterr().out.splitlines()
        assert said[-1] == f"{'different' if line else 'equal'}: {first} and {second}" and (not line or line in said)
        assert ("(not counted: facts differ: host: only in the second)" in said) == ("facts" in change)


def test_files_that_only_one_has_are_named(tmp_path):
    first = write(tmp_path / "a")
    second = save(tmp_path / "b", 5, {"model.safetensors": {}}, {}, {})
    assert list(differences(Checkpoint(first), Checkpoint(second))) == [
        "model.safetensors: a is only in the first (2 tensors differ)",
        "state/trainer.json: only in the first",
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e5m2])
def test_every_bit_counts_in_every_dtype(dtype):
    ones = torch.ones(2, 3).to(dtype)
    other = ones.clone()
    other[1, 0] = 0
    assert tensor_difference(ones, ones.clone()) == "" and tensor_difference(ones[:0], ones[:0]) == ""
    assert tensor_difference(ones, other).startswith("differs in 1 of 6 values, by up to 1; the first, number 3")
    assert tensor_difference(ones[0, 0], other[1, 0]).startswith("differs in 1 of 1")


def test_zeros_of_either_sign_differ():
    assert "0 against -0" in tensor_difference(torch.tensor(0.0), torch.tensor(-0.0))


def test_values_differ_in_type_too():
    assert value_difference({"a": 1}, {"a": True}) == "a: 1 against True"
    assert value_difference({"a": [1, {"b": None}]}, {"a": [1, {"c": None}]}) == "a.1.b: only in the first"
    assert value_difference(float("nan"), float("nan")) == "" and value_difference(1, 2) == "value: 1 against 2"


def test_verify_goes_through_all_checkpoints_of_a_run(tmp_path, capsys):
    for step in (1, 2, 3):
        write(tmp_path / "run", step)
    home = tmp_path / "run" / "checkpoints"
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count("valid    ") == 3
    (home / "00000002/state/trainer.json").write_text("{}")
    (home / "00000004").symlink_to(home / "00000003")
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"valid    {home}/00000001: 2 files, 0.0 MB",
        f"INVALID  {home}/00000002: state/trainer.json: has 2 bytes, but 55 were written",
        f"valid    {home}/00000003: 2 files, 0.0 MB",
        f"INVALID  {home}/00000004: is a link, not a folder",
    ]
    assert main(["verify", str(home / "00000002")]) == 1
    shutil.copytree(home / "00000003", tmp_path / "best")  # under another name
    assert main(["verify", str(tmp_path / "best")]) == 0


def test_a_comparison_says_what_it_passed_over_and_takes_nothing_damaged(tmp_path, capsys):
    first, second = write(tmp_path / "a", 5), write(tmp_path / "a", 6)
    (second / "manifest.json").unlink()
    assert main(["compare", str(tmp_path / "a"), str(first)]) == 0
    assert f"passed over {second}: manifest.json: is missing" in capsys.readouterr().out
    assert main(["compare", str(second), str(first)]) == 1
    assert f"{second}: manifest.json: is missing" in capsys.readouterr().err


def test_wrong_usage_is_told_apart(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "absent")]) == 2
    assert "absent: does not exist" in capsys.readouterr().err
    for words in ([], ["verify"], ["compare", str(tmp_path)], ["repair", str(tmp_path)]):
        with pytest.raises(SystemExit) as exit:
            main(words)
        assert exit.value.code == 2
    (tmp_path / "checkpoints").mkdir()
    assert main(["verify", str(tmp_path)]) == 1 and "has no checkpoint" in capsys.readouterr().out
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 1 and "has no checkpoint" in capsys.readouterr().err


def test_the_command_runs_as_documented(tmp_path):
    path = write(tmp_path)
    command = [sys.executable, "-m", "mpp.checkpoint", "verify", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"valid    {path}: 2 files, 0.0 MB\n", "")
