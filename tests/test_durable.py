"""A log ends where its checkpoint was written, and loses nothing else."""

import json
import os

import pytest

from mpp.durable import cut_back, discard, make_folder

WHOLE = [
    b'{"step": 1, "loss": 2.5}\n',
    b'{"step": 2,  "loss": NaN}\n',
    b'{"note": "no step"}\n',
    b'{"step": 3}\n',
]


@pytest.mark.parametrize(
    "tail, dropped",
    [
        (b"", 0),
        (b'{"step": 3, "lo', 1),
        (b'{"step": 3, "lo\n', 1),
        (b"\0" * 4096, 1),
        (b"\xff\xfe\n", 1),
        (b"[" * 100_000, 1),
        (b"17\n", 1),
        (b"\n", 1),
        (b'{"step": 4}\n{"step": 5}\n', 2),
        (b'{"step": 3.5}\n{"step": 5', 2),
        (b'{"step": 40, "half"{"step": 3}\n', 1),
    ],
)
def test_a_log_is_cut_back_to_its_checkpoint(tmp_path, tail, dropped):
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b"".join(WHOLE) + tail)
    assert cut_back(log, 3) == dropped
    assert log.read_bytes() == b"".join(WHOLE) and os.listdir(tmp_path) == ["metrics.jsonl"]
    assert cut_back(log, 3) == 0
    assert cut_back(log, 0) == 3 and log.read_bytes() == WHOLE[2]


def test_lines_of_one_step_all_stay(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 5, "loss": 1}\n{"step": 5, "heldout_loss": 2}\n{"step": 6, "loss": 1}\n')
    assert cut_back(log, 5) == 1
    assert [json.loads(line) for line in log.read_text().splitlines()] == [
        {"step": 5, "loss": 1},
        {"step": 5, "heldout_loss": 2},
    ]


def test_a_whole_last_line_without_its_end_is_kept_and_ended(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}')
    assert cut_back(log, 2) == 0 and log.read_text() == '{"step": 1}\n{"step": 2}\n'
    log.write_text('{"step": 1}\n{"step": 2}')
    assert cut_back(log, 1) == 1 and log.read_text() == '{"step": 1}\n'


def test_a_log_that_needs_no_cut_is_left_alone(tmp_path):
    assert cut_back(tmp_path / "absent.jsonl", 3) == 0 and os.listdir(tmp_path) == []
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b"".join(WHOLE))
    before = os.stat(log)
    assert cut_back(log, 3) == 0 and os.stat(log).st_ino == before.st_ino
    log.write_bytes(b"")
    assert cut_back(log, 3) == 0


def test_a_linked_log_stays_linked_and_keeps_its_mode(tmp_path):
    real, log = tmp_path / "real.jsonl", tmp_path / "metrics.jsonl"
    real.write_text('{"step": 1}\n{"step": 2}\n')
    real.chmod(0o640)
    log.symlink_to(real)
    assert cut_back(log, 1) == 1
    assert log.is_symlink() and real.read_text() == '{"step": 1}\n' and real.stat().st_mode & 0o777 == 0o640


def test_what_is_discarded_takes_nothing_else_along(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "kept")
    for name in ("link", "folder", "absent"):
        discard(tmp_path / name)
    assert os.listdir(tmp_path) == ["kept"] and os.listdir(tmp_path / "kept") == ["file"]


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        make_folder(tmp_path / "file" / "inner")
    make_folder(tmp_path / "a" / "b" / "c")
    make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
