"""Sources and their two parts: each kind keeps the promises of a Dataset, and nothing is in both parts."""

import io
import pickle
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from mpp.chance import Purpose, hashed
from mpp.data.sources import (
    ClassFolders,
    Demo,
    Folder,
    HuggingFace,
    Source,
    Subset,
    Torchvision,
    _smallest,
    held_out,
    open_splits,
    require_labels,
)

KINDS = get_args(get_args(Source)[0])


def class_folders(root: Path, per_class: int = 6) -> Path:
    for split, name in (("train", "cat"), ("train", "dog"), ("test", "cat"), ("test", "dog")):
        folder = root / split / name
        folder.mkdir(parents=True)
        for i in range(per_class):
            file = io.BytesIO()
            Image.new("RGB", (3, 2), (i, len(name), 0)).save(file, "PNG")
            (folder / f"{i}.png").write_bytes(file.getvalue())
    return root


@pytest.fixture(params=KINDS, ids=lambda kind: kind.kind)
def source(request, tmp_path, monkeypatch):
    """One small working source of each kind in the union."""
    if request.param is Demo:
        pytest.importorskip("skimage", reason="the demo data comes inside scikit-image")
        pytest.importorskip("sklearn", reason="the demo data comes inside scikit-learn")
        return Demo(train_images=18, test_images=9)
    if request.param is Torchvision:
        return Torchvision(name="FakeData", arguments={"size": 8, "image_size": [3, 2, 2], "num_classes": 2})
    if request.param is HuggingFace:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = class_folders(tmp_path / "data")
    return request.param(path=str(path) if request.param is HuggingFace else path)


def test_every_source_reads_what_it_lists(source):
    for split in ("train", "test"):
        if (dataset := source.open(split)) is None:
            continue
        items = dataset.read(range(len(dataset)))
        assert len(items) == len(dataset) > 0
        assert all(isinstance(item, bytes | Image.Image | np.ndarray) for item in items)
        assert len({dataset.name(id) for id in range(len(dataset))}) == len(dataset)
        assert f"{len(dataset):,}" in dataset.description and "\n" not in dataset.description


def test_every_source_numbers_its_labels_by_its_classes(source):
    dataset = source.open("train")
    if dataset.classes is None:
        assert dataset.labels() is None
        return
    labels = dataset.labels()
    assert labels.dtype == np.int64 and labels.shape == (len(dataset),)
    assert labels.min() >= 0 and labels.max() < len(dataset.classes)


def test_every_source_opens_the_same_again_and_survives_pickling(source):
    one, again = source.open("train"), pickle.loads(pickle.dumps(source.open("train")))
    assert one.fingerprint() == again.fingerprint()
    assert [_content(item) for item in one.read([3, 1])] == [_content(item) for item in again.read([3, 1])]
    assert one.name(2) == again.name(2)


def _content(item) -> bytes:
    return item if isinstance(item, bytes) else np.asarray(item).tobytes()


def test_every_source_survives_its_own_recipe(source):
    adapter = TypeAdapter(Source)
    assert adapter.validate_python(adapter.dump_python(source, mode="json")) == source


def test_every_source_gives_train_and_a_heldout_part(source):
    splits = open_splits(source, seed=3)
    train, heldout = splits.train, splits.heldout
    assert len(train) and len(heldout)
    if train.dataset is heldout.dataset:
        assert sorted([*train.ids, *heldout.ids]) == list(range(len(train.dataset)))
        assert splits.description.endswith(f"; {len(heldout):,} of them held out")
    else:
        assert len(train) == len(train.dataset) and len(heldout) == len(heldout.dataset)
        assert train.classes == heldout.classes and "held out: " in splits.description


class Numbers:
    """A dataset of n nothings."""

    classes, description = None, "numbers"

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count


@pytest.mark.parametrize(
    ("count", "share", "out"), [(1000, 0.02, 20), (10, 0.02, 1), (2, 0.02, 1), (2, 0.99, 1), (100, 0.999, 99)]
)
def test_the_heldout_part_has_the_asked_share_and_never_everything(count, share, out):
    splits = held_out(Numbers(count), share, seed=0)
    assert (len(splits.train), len(splits.heldout)) == (count - out, out)
    assert not set(splits.train.ids) & set(splits.heldout.ids)
    assert (np.diff(splits.train.ids) > 0).all() and splits.train.ids.dtype == np.int64


def test_the_heldout_part_is_a_function_of_the_seed_alone():
    ids = [held_out(Numbers(500), 0.1, seed).heldout.ids.tolist() for seed in (0, *range(20))]
    assert ids[0] == ids[1] and len({tuple(part) for part in ids}) == 20
    assert abs(np.mean(ids) - 249.5) < 25  # drawn from all over: 5 standard deviations of 1,000 draws


def test_the_heldout_part_is_that_of_the_smallest_hashes():
    count = 300_000  # more than one block of them
    order = hashed(3, torch.arange(count), Purpose.HELDOUT).argsort(stable=True)
    splits = held_out(Numbers(count), 0.02, seed=3)
    assert splits.heldout.ids.tolist() == order[:6000].sort().values.tolist()
    assert splits.train.ids.tolist() == order[6000:].sort().values.tolist()


def test_of_equal_hashes_the_first_are_taken():
    assert np.flatnonzero(_smallest(np.array([5, 2, 7, 2, 1, 2]), 3)).tolist() == [1, 3, 4]


def test_all_images_cost_no_memory():
    tracemalloc.start()
    everything = Subset(Numbers(300_000_000))
    ids = everything.at(np.array([7, 299_999_999]))
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert ids.tolist() == [7, 299_999_999] and len(everything) == 300_000_000
    assert Subset(Numbers(3)).ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("count", "share", "message"), [(1, 0.5, "at least 2"), (9, 0.0, "share"), (9, 1.0, "share")])
def test_what_cannot_be_held_out_is_refused(count, share, message):
    with pytest.raises(ValueError, match=message):
        held_out(Numbers(count), share, seed=0)


@pytest.mark.parametrize("heldout", [0, 1, -0.1, 1.5])
def test_a_recipe_with_an_impossible_share_is_refused(heldout):
    with pytest.raises(ValidationError, match="heldout"):
        TypeAdapter(Source).validate_python({"kind": "folder", "path": "x", "heldout": heldout})


def test_a_range_the_wrong_way_round_is_a_fault():
    assert [path for path, _ in Folder(path=Path("x"), range=(5.0, 5.0)).faults()] == ["range"]
    assert not list(Folder(path=Path("x"), range=(0.0, 4095.0)).faults())


def labelled(labels, classes=("a", "b")) -> Subset:
    labels = None if labels is None else np.array(labels)
    dataset = SimpleNamespace(labels=lambda: labels, classes=classes, description="these pictures")
    return Subset(dataset, np.arange(4))


def test_labels_of_a_subset_follow_its_ids():
    subset = Subset(labelled([5, 6, 7, 8]).dataset, np.array([3, 1]))
    assert subset.labels().tolist() == [8, 6] and len(subset) == 2


@pytest.mark.parametrize(
    ("train", "heldout", "message"),
    [
        (labelled(None, None), labelled(None, None), "needs labels.*these pictures.*class_folders"),
        (labelled([0, 1, 0, 1]), labelled(None, None), "needs labels"),
        (labelled([1, 1, 1, 1]), labelled([0, 1, 0, 1]), "at least two classes.*train has 1"),
        (labelled([0, 1, -1, 1]), labelled([0, 1, 0, 1]), "1 have none"),
    ],
)
def test_a_labelled_task_says_what_it_lacks(train, heldout, message):
    with pytest.raises(ValueError, match=f"^fine-tuning .*{message}"):
        require_labels(SimpleNamespace(train=train, heldout=heldout), "fine-tuning")


def test_good_labels_pass_even_where_the_heldout_part_is_of_one_class():
    require_labels(SimpleNamespace(train=labelled([0, 1, 0, 1]), heldout=labelled([0, 0, 0, 0])), "fine-tuning")


def test_one_class_folder_can_be_opened_but_not_classified(tmp_path):
    class_folders(tmp_path)
    splits = open_splits(ClassFolders(path=tmp_path / "train" / "cat" / ".."))
    require_labels(splits, "a probe")
    (tmp_path / "one" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat").rename(tmp_path / "one" / "cat" / "deeper")
    splits = open_splits(ClassFolders(path=tmp_path / "one"))
    with pytest.raises(ValueError, match="a probe needs at least two classes"):
        require_labels(splits, "a probe")
