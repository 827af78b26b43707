"""Datasets of Hugging Face: bytes as stored, labels by train's names, and mistakes told in one line."""

import io
import multiprocessing
import pickle
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mpp.data import huggingface
from mpp.data.huggingface import HuggingFace

CIFAR = Path(__file__).parents[2] / "../shared/data/cifar10_jpeg"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    huggingface.load.cache_clear()
    datasets.disable_progress_bars()


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (2, 2), level).save(file, "PNG")
    return file.getvalue()


def rows(labels=(0, 1, 0), names=("cat", "dog"), image="image", label="label", start=0, **more):
    """A dataset of tiny pictures with a ClassLabel column; more: further columns."""
    count = len(next(iter(more.values()), labels or [0, 1, 2]))
    columns = {image: [{"bytes": png(start + i), "path": f"{start + i}.png"} for i in range(count)], **more}
    features = {image: datasets.Image(), **{name: _feature(values) for name, values in more.items()}}
    if labels is not None:
        columns[label], features[label] = list(labels), datasets.ClassLabel(names=list(names))
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def _feature(values):
    kind = {int: "int64", str: "string", bool: "bool", float: "float64"}
    return datasets.Value(kind[type(values[0])])


def parquet(root: Path, **splits) -> Path:
    root.mkdir(exist_ok=True)
    for name, data in splits.items():
        data.to_parquet(root / f"{name}-00000-of-00001.parquet")
    return root


def source(path, **fields) -> HuggingFace:
    return HuggingFace(path=str(path), **fields)


def test_a_folder_of_parquet_files_gives_bytes_labels_and_names(tmp_path):
    path = parquet(tmp_path / "set", train=rows(), test=rows([1, 0], start=100))
    train, test = (source(path).open(split) for split in ("train", "test"))
    assert train.read([2, 0]) == [png(2), png(0)] and test.read([1]) == [png(101)] and train.read([]) == []
    assert train.classes == test.classes == ("cat", "dog")
    assert train.labels().tolist() == [0, 1, 0] and test.labels().tolist() == [1, 0]
    assert train.labels().dtype == np.int64
    assert train.name(2) == "train[2] (2.png)"
    assert train.description == f"huggingface {path} train: 3 images, 2 classes"


def test_parquet_files_by_pattern_and_saved_datasets_open_too(tmp_path):
    parquet(tmp_path / "set", train=rows())
    rows().save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=rows(), val=rows([1])).save_to_disk(tmp_path / "both")
    for path in (tmp_path / "set" / "*.parquet", tmp_path / "one", tmp_path / "both"):
        assert source(path).open("train").read([1]) == [png(1)]
    assert source(tmp_path / "one").open("test") is None
    assert source(tmp_path / "both").open("test").labels().tolist() == [1]


def test_an_image_folder_is_read_from_its_files(tmp_path):
    for split, name, level in (("train", "cat", 1), ("train", "dog", 2), ("test", "dog", 3)):
        (tmp_path / split / name).mkdir(parents=True)
        (tmp_path / split / name / f"{level}.png").write_bytes(png(level))
    (tmp_path / "test" / "cat").mkdir()
    (tmp_path / "test" / "cat" / "4.png").write_bytes(png(4))
    train = source(tmp_path).open("train")
    assert train.classes == ("cat", "dog") and train.labels().tolist() == [0, 1]
    assert train.read([0, 1]) == [png(1), png(2)] and train.name(0) == "train[0] (train/cat/1.png)"
    before = train.fingerprint()
    (tmp_path / "train" / "cat" / "1.png").unlink()
    missing, there = train.read([0, 1])
    assert isinstance(missing, FileNotFoundError) and there == png(2)
    assert source(tmp_path).open("train").fingerprint() != before


def test_a_row_without_an_image_is_an_exception_in_its_place(tmp_path):
    data = datasets.Dataset.from_dict(
        {"image": [{"bytes": png(0), "path": None}, None, {"bytes": None, "path": "/no/such.png"}]},
        features=datasets.Features(image=datasets.Image()),
    )
    # Written by Arrow, as `datasets` itself would look for the missing file.
    pq.write_table(data.data.table, tmp_path / "train.parquet")
    good, empty, missing = source(tmp_path).open("train").read([0, 1, 2])
    assert good == png(0) and isinstance(empty, ValueError) and isinstance(missing, FileNotFoundError)


def test_raw_bytes_in_any_column_will_do(tmp_path):
    data = datasets.Dataset.from_dict({"picture": [png(0), png(1)], "label": [3, 12]})
    train = source(parquet(tmp_path, train=data)).open("train")
    assert train.read([1]) == [png(1)] and train.name(1) == "train[1]"
    assert train.classes == ("3", "12") and train.labels().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("train", "test", "classes", "labels", "test_labels"),
    [
        (["b", "a", "c"], ["c", "b"], ("a", "b", "c"), [1, 0, 2], [2, 1]),
        ([10, 9, 10], [9], ("9", "10"), [1, 0, 1], [0]),
        ([True, False, True], [True], ("False", "True"), [1, 0, 1], [1]),
    ],
)
def test_plain_labels_become_classes_made_from_train(tmp_path, train, test, classes, labels, test_labels):
    path = parquet(tmp_path, train=rows(None, kind=train), test=rows(None, kind=test))
    opened = source(path, label_column="kind").open("train")
    assert opened.classes == classes and opened.labels().tolist() == labels
    assert source(path, label_column="kind").open("test").labels().tolist() == test_labels


def test_a_test_split_with_its_names_in_another_order_agrees_by_name(tmp_path):
    datasets.DatasetDict(train=rows(), test=rows([0, 1], ["dog", "cat"]), val=rows([0], ["eel"])).save_to_disk(tmp_path)
    test = source(tmp_path).open("test")
    assert test.classes == ("cat", "dog") and test.labels().tolist() == [1, 0]
    with pytest.raises(ValueError, match="not in train: 'eel'"):
        source(tmp_path, test_split="val").open("test")


def test_a_test_split_with_hidden_labels_is_passed_over(tmp_path):
    path = parquet(tmp_path, train=rows(), test=rows([-1, -1]), validation=rows([1, 0]))
    assert source(path).open("test").labels().tolist() == [1, 0]
    assert source(path, test_split="test").open("test").labels().tolist() == [-1, -1]
    datasets.DatasetDict(train=rows(), test=rows(None), val=rows([1])).save_to_disk(tmp_path / "saved")
    assert source(tmp_path / "saved").open("test").labels().tolist() == [1]
    assert source(tmp_path / "saved", test_split="test").open("test").classes is None


def test_no_label_column_means_unlabelled(tmp_path):
    train = source(parquet(tmp_path, train=rows(None, width=[1, 2, 3]))).open("train")
    assert train.classes is None and train.labels() is None and train.description.endswith("3 images, no labels")


def test_what_is_ambiguous_names_the_candidates(tmp_path):
    two = rows().add_column("other", [{"bytes": png(9), "path": None}] * 3, feature=datasets.Image())
    path = parquet(tmp_path / "images", train=two)
    with pytest.raises(ValueError, match="found 'image', 'other'.*set image_column"):
        source(path).open("train")
    assert source(path, image_column="other").open("train").read([0]) == [png(9)]
    two = rows().add_column("coarse", [0, 0, 0], feature=datasets.ClassLabel(names=["animal"]))
    path = parquet(tmp_path / "labels", train=two)
    with pytest.raises(ValueError, match="could be the label: .*'coarse'.*set label_column"):
        source(path).open("train")
    assert source(path, label_column="coarse").open("train").classes == ("animal",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train_split": "learn"}, "train_split is 'learn', expected one of 'train'"),
        ({"test_split": "exam"}, "test_split is 'exam'"),
        ({"image_column": "img"}, "image_column is 'img', expected one of 'image', 'size', 'label'"),
        ({"image_column": "size"}, "image_column 'size' holds double"),
        ({"label_column": "lable"}, "label_column is 'lable'"),
        ({"label_column": "size"}, "label_column 'size' holds double"),
        ({"revision": "main"}, "revision is 'main', but this is a local folder"),
    ],
)
def test_a_wrong_field_says_what_there_is(tmp_path, fields, message):
    path = parquet(tmp_path, train=rows(size=[0.5, 0.5, 0.5]))
    with pytest.raises(ValueError, match=message):
        [source(path, **fields).open(split) for split in ("train", "test")]


@pytest.mark.parametrize("path", ["/no/such", "./here", "a/b/c", "there/no_such", "no*.parquet", "a file.txt"])
def test_a_path_that_does_not_exist_is_not_asked_of_the_hub(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(ValueError, match="there (is|are) none"):
        source(path).open("train")


def test_an_offline_hub_is_one_readable_line(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="huggingface no/such: .*HF_HUB_OFFLINE is set") as error:
        source("no/such").open("train")
    assert "\n" not in str(error.value)


def test_a_folder_without_data_is_a_readable_error(tmp_path):
    with pytest.raises(ValueError, match="cannot open it: .*kind: folder"):
        source(tmp_path).open("train")


def test_the_same_split_twice_is_a_fault():
    assert [field for field, _ in HuggingFace(path="x", test_split="train").faults()] == ["test_split"]


def test_the_fingerprint_follows_the_data_not_its_place(tmp_path):
    def fingerprint(name: str, data) -> str:
        return source(parquet(tmp_path / name, train=data)).open("train").fingerprint()

    assert fingerprint("a", rows()) == fingerprint("b", rows())
    assert len({fingerprint("c", rows([0, 1, 1])), fingerprint("d", rows([0, 1])), fingerprint("a", rows())}) == 3


def _first(dataset) -> bytes:
    return dataset.read([0])[0]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_read_the_same_bytes(tmp_path, start):
    train = source(parquet(tmp_path, train=rows())).open("train")
    if start == "spawn":  # what a spawned worker does, without its start-up time
        assert _first(pickle.loads(pickle.dumps(train))) == png(0)
        return
    assert _first(train) == png(0)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_first, (train,)) == png(0)


@pytest.mark.skipif(not CIFAR.is_dir(), reason="the shared data ../shared/data/cifar10_jpeg is not here")
def test_cifar_in_parquet_opens_with_its_ten_classes():
    splits = [source(CIFAR).open(split) for split in ("train", "test")]
    assert [len(split) for split in splits] == [50_000, 10_000]
    assert np.bincount(splits[0].labels()).tolist() == [5000] * 10
    assert splits[0].classes[0] == "airplane" and splits[0].read([49_999])[0][:2] == b"\xff\xd8"
