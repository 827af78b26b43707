"""The demo crops: right labels, halves that never meet, the same pixels every time."""

import importlib.util
import pickle

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("skimage", reason="the demo data comes inside scikit-image")
pytest.importorskip("sklearn", reason="the demo data comes inside scikit-learn")

from mpp.data import demo
from mpp.data.demo import PHOTOS, Demo, crop_plan

SIZES = [(451, 300), (640, 427), (1411, 1411)]  # an odd width too: its middle column belongs to neither half
SMALL = Demo(train_images=45, test_images=20)


def test_windows_never_cross_the_middle_and_stay_inside():
    train, test = crop_plan("train", 3000, SIZES), crop_plan("test", 3000, SIZES)
    widths, heights = np.array(SIZES).T[:, train.labels]
    assert (train.boxes[:, 2] <= widths // 2).all() and (train.boxes[:, :2] >= 0).all()
    assert (train.boxes[:, 3] <= heights).all()
    widths, heights = np.array(SIZES).T[:, test.labels]
    assert (test.boxes[:, 0] >= (widths + 1) // 2).all() and (test.boxes[:, 2] <= widths).all()
    sides = np.concatenate([train.boxes, test.boxes])[:, 2:] - np.concatenate([train.boxes, test.boxes])[:, :2]
    assert (sides[:, 0] == sides[:, 1]).all() and sides.min() == 40 and sides.max() == 110


def test_a_crop_is_what_the_plan_says_of_its_photograph():
    dataset = SMALL.open("test")
    photos = [demo._photo(name) for name in PHOTOS]
    plan = crop_plan("test", 20, [photo.size for photo in photos])
    for id in range(20):
        image = photos[plan.labels[id]].crop(tuple(plan.boxes[id])).resize((32, 32), Image.Resampling.BICUBIC)
        exact = np.asarray(image)[:, :, plan.orders[id]] * (plan.brightness[id] / 1000)
        crop = dataset.read([id])[0]
        assert np.abs(np.minimum(exact, 255) - crop).max() <= 0.501
        assert dataset.labels()[id] == plan.labels[id]


def test_brightness_and_channel_order_cover_their_whole_range():
    plan = crop_plan("train", 6000, SIZES)
    assert plan.brightness.min() == 600 and plan.brightness.max() == 1200
    assert len(np.unique(plan.orders, axis=0)) == 6


def test_labels_are_balanced_and_shuffled():
    labels = SMALL.open("train").labels()
    assert np.bincount(labels).tolist() == [5] * 9 and labels.dtype == np.int64
    assert (np.diff(labels) < 0).sum() > 10
    counts = np.bincount(SMALL.open("test").labels())
    assert counts.max() - counts.min() <= 1


def test_the_same_crops_are_made_again():
    first = SMALL.open("train")
    demo._crops.cache_clear()
    second = SMALL.open("train")
    assert first is not second and first.fingerprint() == second.fingerprint()
    assert first.fingerprint() != SMALL.open("test").fingerprint()


def test_what_is_drawn_for_a_crop_does_not_depend_on_how_many_there_are():
    few, many = crop_plan("train", 50, SIZES), crop_plan("train", 500, SIZES)
    assert (few.brightness == many.brightness[:50]).all() and (few.orders == many.orders[:50]).all()


def test_crops_are_pixels_that_may_be_written_to_and_pickled():
    dataset = pickle.loads(pickle.dumps(Demo(size=16, train_images=9, test_images=9).open("train")))
    crops = dataset.read([3, 0, 3])
    assert [(crop.shape, crop.dtype) for crop in crops] == [((16, 16, 3), np.uint8)] * 3
    crops[0][:] = 0
    assert (dataset.read([3])[0] == crops[2]).all()
    assert dataset.description == "demo train: 9 crops of 16x16 px from 9 photographs"
    assert dataset.name(0).startswith("demo train[0] (")


def test_a_photograph_is_told_from_the_others_but_not_by_its_mean_colour_alone():
    train, test = Demo(train_images=900, test_images=270).open("train"), Demo(test_images=270).open("test")

    def features(dataset) -> np.ndarray:
        pixels = np.stack(dataset.read(range(len(dataset)))).reshape(len(dataset), -1).astype(np.float64)
        return pixels - pixels.mean(1, keepdims=True)

    near = features(test) @ features(train).T / np.linalg.norm(features(train), axis=1)
    accuracy = (train.labels()[near.argmax(1)] == test.labels()).mean()
    assert 2 / 9 < accuracy < 0.8


def test_a_missing_package_names_the_cure(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    demo._crops.cache_clear()
    with pytest.raises(ValueError, match=r"pip install -e '\.\[demo\]'"):
        SMALL.open("train")


def test_a_package_without_the_photograph_says_where_it_was_expected(monkeypatch):
    monkeypatch.setitem(PHOTOS, "rocket", "skimage/data/no_rocket.jpg")
    demo._crops.cache_clear()
    with pytest.raises(ValueError, match=r"no_rocket\.jpg.*--upgrade"):
        SMALL.open("train")
