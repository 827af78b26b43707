"""Folders: everything is listed or counted, nothing is opened on the way, and the order never changes."""

import os
import pickle
import socket
from pathlib import Path

import numpy as np
import pytest

from mpp.data import folders
from mpp.data.folders import ClassFolders, Folder


def put(root: Path, *names: str | bytes) -> Path:
    """Files under root, each holding its own name."""
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(os.fsencode(name))
    return root


def names(dataset) -> list[str]:
    return [dataset.name(id) for id in range(len(dataset))]


def test_every_visible_file_is_listed_whatever_its_extension(tmp_path):
    put(
        tmp_path,
        "b.JPEG",
        "a/x.png",
        "a/deep/er/y",
        "c.txt",
        "a b\n'\"\t.jpg",
        "-rf.png",
        "\u00fc\u6f22.webp",
        "n" * 255,
    )
    dataset = Folder(path=tmp_path).open("train")
    expected = [
        "-rf.png",
        "a b\n'\"\t.jpg",
        "a/deep/er/y",
        "a/x.png",
        "b.JPEG",
        "c.txt",
        "n" * 255,
        "\u00fc\u6f22.webp",
    ]
    assert names(dataset) == expected
    assert dataset.read([3, 0]) == [b"a/x.png", b"-rf.png"]
    assert dataset.description == f"folder {tmp_path}: 8 files"
    assert dataset.classes is None and dataset.labels() is None
    assert Folder(path=tmp_path).open("test") is None


def test_a_name_that_is_not_utf8_is_read_and_printable(tmp_path):
    put(tmp_path, b"\xff\xfe.jpg")
    dataset = Folder(path=tmp_path).open("train")
    assert dataset.read([0]) == [b"\xff\xfe.jpg"]
    assert dataset.name(0) == "\\xff\\xfe.jpg"


def test_hidden_files_and_folders_are_ignored_and_counted(tmp_path):
    put(tmp_path, "a.png", ".hidden.png", "sub/.DS_Store", ".cache/x.png", ".cache/y.png", "sub/b.png")
    dataset = Folder(path=tmp_path).open("train")
    assert names(dataset) == ["a.png", "sub/b.png"]
    assert dataset.description.endswith("2 files (2 hidden files, 1 hidden folder ignored)")


def test_a_folder_that_is_itself_hidden_is_read_when_it_is_asked_for(tmp_path):
    assert len(Folder(path=put(tmp_path / ".data", "a.png")).open("train")) == 1


def test_links_are_followed_once_and_loops_end(tmp_path):
    outside = put(tmp_path / "outside", "o.png")
    root = put(tmp_path / "root", "a/one.png", "b/two.png")
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "across").symlink_to(root / "b")
    (root / "b" / "across").symlink_to(root / "a")
    (root / "linked").symlink_to(outside)
    (root / "file.png").symlink_to(outside / "o.png")
    (root / "self").symlink_to(root / "self")
    (root / "broken").symlink_to(root / "nowhere")
    dataset = Folder(path=root).open("train")
    assert names(dataset) == ["a/one.png", "b/two.png", "file.png", "linked/o.png"]
    assert dataset.description.endswith("4 files (2 broken links, 3 repeated folders ignored)")


def test_many_mutual_links_end_in_bounded_time(tmp_path):
    put(tmp_path, *(f"{i}/x" for i in range(12)))
    for i in range(12):
        for j in range(12):
            (tmp_path / f"{i}" / f"to{j}").symlink_to(tmp_path / f"{j}")
    assert len(Folder(path=tmp_path).open("train")) == 12


def test_fifos_and_sockets_are_counted_and_never_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "a.png", "was_a_file")
    os.mkfifo(tmp_path / "fifo.png")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.png")  # the whole path may be longer than a socket's may be
        dataset = Folder(path=tmp_path).open("train")
    assert dataset.description.endswith("2 files (2 special files ignored)")
    (tmp_path / "was_a_file").unlink()
    os.mkfifo(tmp_path / "was_a_file")  # after it was listed: opening it would wait for ever
    assert isinstance(dataset.read([1])[0], OSError)


def test_one_unreadable_file_is_an_exception_in_its_place(tmp_path, monkeypatch):
    put(tmp_path, "a", "b", "c", "d" * 10)
    dataset = Folder(path=tmp_path).open("train")
    (tmp_path / "b").unlink()
    monkeypatch.setattr(folders, "MAX_BYTES", 9)
    a, b, c, d = dataset.read([0, 1, 2, 3])
    assert (a, c) == (b"a", b"c")
    assert isinstance(b, FileNotFoundError) and isinstance(d, OSError) and "at most 9" in str(d)


@pytest.mark.parametrize("there", [(), (".hidden",)])
def test_an_empty_folder_says_what_was_looked_for(tmp_path, there):
    put(tmp_path, *there)
    with pytest.raises(ValueError, match="expected image files"):
        Folder(path=tmp_path).open("train")


@pytest.mark.parametrize("source", [Folder, ClassFolders])
def test_a_missing_folder_names_the_nearest_that_exists(tmp_path, source):
    with pytest.raises(ValueError, match=f"nearest existing folder is {tmp_path}$"):
        source(path=tmp_path / "no" / "such").open("train")
    with pytest.raises(ValueError, match="found something else"):
        source(path=put(tmp_path, "file") / "file").open("train")


def test_the_fingerprint_sees_names_and_sizes_but_neither_times_nor_the_place(tmp_path):
    def fingerprint(root: str) -> str:
        return Folder(path=tmp_path / root).open("train").fingerprint()

    put(tmp_path / "one", "a", "b/c")
    first = fingerprint("one")
    os.utime(tmp_path / "one" / "a", (1, 1))
    (tmp_path / "one").rename(tmp_path / "two")
    assert fingerprint("two") == first
    (tmp_path / "two" / "a").write_bytes(b"longer")
    assert (longer := fingerprint("two")) != first
    (tmp_path / "two" / "b" / "c").rename(tmp_path / "two" / "b" / "d")
    assert fingerprint("two") not in (first, longer)


def test_a_pickled_dataset_reads_the_same_from_another_working_directory(tmp_path, monkeypatch):
    put(tmp_path / "data", "a", "b")
    monkeypatch.chdir(tmp_path)
    copy = pickle.dumps(Folder(path=Path("data")).open("train"))
    monkeypatch.chdir("/")
    assert pickle.loads(copy).read([1, 0]) == [b"b", b"a"]


def test_class_folders_number_the_sorted_names(tmp_path):
    put(tmp_path, "dog/1", "cat/deep/2", "cat/1", "cat-like/1", "readme.txt", "notes.txt", ".git/x")
    dataset = ClassFolders(path=tmp_path).open("train")
    assert dataset.classes == ("cat", "cat-like", "dog")
    assert names(dataset) == ["cat-like/1", "cat/1", "cat/deep/2", "dog/1"]
    assert dataset.labels().tolist() == [1, 0, 0, 2] and dataset.labels().dtype == np.int64
    note = "4 files in 3 classes (2 files beside the class folders, 1 hidden folder ignored)"
    assert dataset.description == f"class_folders {tmp_path}: {note}"
    assert ClassFolders(path=tmp_path).open("test") is None


@pytest.mark.parametrize("name", ["test", "validation", "valid", "val"])
def test_train_and_test_folders_are_the_splits(tmp_path, name):
    put(tmp_path, "train/cat/1", "train/dog/1", f"{name}/cat/2", f"{name}/dog/2", "labels.csv")
    train, test = (ClassFolders(path=tmp_path).open(split) for split in ("train", "test"))
    assert names(train) == ["cat/1", "dog/1"] and names(test) == ["cat/2", "dog/2"]
    assert train.classes == test.classes == ("cat", "dog")


def test_an_unlabelled_test_folder_gives_way_to_a_labelled_one(tmp_path):
    put(tmp_path, "train/cat/1", "test/0001.png", "val/cat/2")
    assert names(ClassFolders(path=tmp_path).open("test")) == ["cat/2"]


def test_train_can_be_a_class_or_the_only_split(tmp_path):
    assert ClassFolders(path=put(tmp_path / "a", "car/1", "train/1")).open("train").classes == (
        "car",
        "train",
    )
    assert ClassFolders(path=put(tmp_path / "b", "train/cat/1")).open("train").classes == ("cat",)
    assert ClassFolders(path=tmp_path / "b").open("test") is None


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (["test/cat/1"], "missing 'dog'"),
        (["test/cat/1", "test/dog/1", "test/eel/1"], "not in train: 'eel'"),
        (["test/cat/1", "test/dog/.hidden"], "none in 'dog'"),
        (["test/1.png"], "missing 'cat', 'dog'"),
    ],
)
def test_test_classes_that_are_not_those_of_train_are_named(tmp_path, there, message):
    put(tmp_path, "train/cat/1", "train/dog/1", *there)
    with pytest.raises(ValueError, match=message):
        ClassFolders(path=tmp_path).open("test")


def test_empty_class_folders_in_train_are_named(tmp_path):
    put(tmp_path, "cat/1", "dog/.hidden")
    (tmp_path / "eel").mkdir()
    with pytest.raises(ValueError, match="none in 'dog', 'eel'"):
        ClassFolders(path=tmp_path).open("train")


def test_no_class_folders_points_to_the_folder_kind(tmp_path):
    with pytest.raises(ValueError, match="kind: folder"):
        ClassFolders(path=put(tmp_path, "1.png")).open("train")
