"""Datasets of torchvision: the right split, labels without decoding, files handed on undecoded."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mpp.data.torchvision_sets import Torchvision, dataset_class, parameters

FAKE = Torchvision(name="FakeData", arguments={"size": 6, "image_size": [3, 4, 4], "num_classes": 3})


def mnist(root: Path) -> Torchvision:
    """MNIST's own idx files, 5 training and 3 test pictures; picture i is of level i and labelled i % 2."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", 5), ("t10k", 3)):
        levels = np.arange(count, dtype=np.uint8)
        pixels = np.broadcast_to(levels[:, None, None], (count, 28, 28)).tobytes()
        sizes = b"".join(size.to_bytes(4, "big") for size in (count, 28, 28))
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + sizes + pixels)
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + sizes[:4] + (levels % 2).tobytes())
    return Torchvision(name="MNIST", root=root)


def imagenette(root: Path) -> Torchvision:
    """Files that are no pictures: they must come out as they are."""
    for place in ("train/n01440764/a", "train/n03888257/b", "val/n03888257/c", "val/n01440764/d"):
        name, path = place.partition("/")[2], root / "imagenette2" / f"{place}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return Torchvision(name="Imagenette", root=root)


def test_pixels_kept_in_memory_come_as_images_with_labels(tmp_path):
    train, test = (mnist(tmp_path).open(split) for split in ("train", "test"))
    assert [len(train), len(test)] == [5, 3]
    assert [image.getpixel((0, 0)) for image in train.read([4, 1])] == [4, 1]
    assert train.labels().tolist() == [0, 1, 0, 1, 0] and train.labels().dtype == np.int64
    assert train.classes == test.classes and train.classes[1] == "1 - one"
    assert train.description == "torchvision MNIST train: 5 images, 10 classes"


def test_files_come_undecoded_and_labels_need_no_file(tmp_path):
    train, test = (imagenette(tmp_path).open(split) for split in ("train", "test"))
    assert train.read([0, 1]) == [b"n01440764/a", b"n03888257/b"]
    assert train.classes == test.classes == ("tench, Tinca tinca", "parachute, chute")
    assert train.name(1) == "Imagenette train[1] (imagenette2/train/n03888257/b.JPEG)"
    (tmp_path / "imagenette2/val/n03888257/c.JPEG").unlink()
    assert test.labels().tolist() == [0, 1]
    good, missing = test.read([0, 1])
    assert good == b"n01440764/d" and isinstance(missing, FileNotFoundError)


def test_generated_images_have_labels_and_no_test_split():
    train = FAKE.open("train")
    assert FAKE.open("test") is None
    assert train.classes == ("0", "1", "2") and len(train.labels()) == 6
    assert all(isinstance(image, Image.Image) and image.size == (4, 4) for image in train.read(range(6)))


def test_labels_without_an_attribute_are_read_from_the_items(monkeypatch):
    expected = FAKE.open("train").labels()
    plain = dataset_class("FakeData")(size=6, image_size=(3, 4, 4), num_classes=3)
    assert expected.tolist() == [plain[id][1] for id in range(6)]


def test_an_attribute_that_disagrees_with_the_items_is_not_taken_for_labels(tmp_path):
    dataset = mnist(tmp_path).open("train")
    dataset._items.targets, dataset._items.labels = dataset._items.targets + 1, [9] * 5
    assert dataset.labels().tolist() == [1, 2, 1, 2, 1]


def test_one_broken_image_is_an_exception_in_its_place():
    dataset = FAKE.open("train")
    assert [type(image) for image in dataset.read([0, 99])] == [Image.Image, IndexError]


@pytest.mark.parametrize("name", ["MNIST", "Imagenette"])
def test_the_fingerprint_follows_the_data_not_its_place(tmp_path, name):
    make = {"MNIST": mnist, "Imagenette": imagenette}[name]
    one, other = make(tmp_path / "one").open("train"), make(tmp_path / "two").open("train")
    assert one.fingerprint() == other.fingerprint() != make(tmp_path / "three").open("test").fingerprint()


def test_a_pickled_dataset_reads_the_same(tmp_path):
    dataset = pickle.loads(pickle.dumps(imagenette(tmp_path).open("train")))
    assert dataset.read([1]) == [b"n03888257/b"]


@pytest.mark.parametrize(
    ("name", "names"),
    [("EMNIST", {"train", "split", "download"}), ("ImageNet", {"split", "loader"}), ("FakeData", {"size"})],
)
def test_arguments_handed_on_to_base_classes_are_known(name, names):
    assert names <= parameters(dataset_class(name))


@pytest.mark.parametrize(
    ("source", "train", "test"),
    [
        (
            Torchvision(name="OxfordIIITPet"),
            ["train", "trainval", "train-standard"],
            ["test", "val", "valid"],
        ),
        (Torchvision(name="STL10", arguments={"split": "unlabeled"}), [None], ["test", "val", "valid"]),
        (Torchvision(name="SUN397"), [None], []),
    ],
)
def test_splits_are_chosen_by_what_the_constructor_takes(source, train, test):
    takes = parameters(dataset_class(source.name))
    assert [choice.get("split") for choice in source._choices("train", takes)] == train
    assert [choice.get("split") for choice in source._choices("test", takes)] == test


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "CIFAR11"}, "torchvision CIFAR11: .*nearest: CIFAR10"),
        ({"name": "cifar10"}, "nearest: CIFAR10"),
        ({"name": "LSUN"}, "expected the name"),
        ({"name": "CIFAR10"}, "RuntimeError: .*try download: true"),
        ({"name": "FakeData", "download": True}, "torchvision cannot fetch this"),
        ({"name": "FakeData", "arguments": {"sise": 3}}, "TypeError: .*sise"),
        ({"name": "FakeData", "arguments": {"size": 0}}, "no images in train"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        Torchvision(root=tmp_path, **fields).open("train")


def test_items_of_another_sort_are_refused(tmp_path):
    moving = tmp_path / "MovingMNIST"
    moving.mkdir()
    np.save(moving / "mnist_test_seq.npy", np.zeros((20, 2, 64, 64), dtype=np.uint8))
    with pytest.raises(ValueError, match=r"expected items \(image, class number\), got .Tensor"):
        Torchvision(name="MovingMNIST", root=tmp_path, arguments={"split": None}).open("train")


def test_arguments_that_have_their_own_field_are_faults():
    faults = list(Torchvision(name="MNIST", arguments={"root": "x", "train": True, "split": "a"}).faults())
    assert [path for path, _ in faults] == ["arguments.root", "arguments.train"]
