"""Room for checkpoints is asked for before the first step."""

import resource
import shutil
from types import SimpleNamespace

import pytest

from mpp.disk import check_room, size_of


def test_room_enough_leaves_no_trace(tmp_path):
    check_room(tmp_path / "run", 1_000_000, 3_000_000)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_disk_with_too_little_is_refused_with_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2_000_000))
    check_room(tmp_path, 1_000_000, 2_000_000)
    with pytest.raises(ValueError, match=r"2.0 MB free, .* need about 3.0 MB more; .*keep_last .1 needs 2.0 MB"):
        check_room(tmp_path, 1_000_000, 3_000_000)


def test_a_limit_that_the_disk_does_not_tell_is_found_by_trying(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        check_room(tmp_path, 90_000, 90_000)
        with pytest.raises(ValueError, match=r"a file of 1.0 MB, .* cannot be written in .*File too large .*ulimit"):
            check_room(tmp_path, 1_000_000, 1_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_size_counts_files_below_and_follows_no_link(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"123")
    (tmp_path / "y").write_bytes(b"12")
    (tmp_path / "z").symlink_to(tmp_path / "y")
    assert size_of(tmp_path) == 5 and size_of(tmp_path / "none") == 0
