"""ReaL: files matched by name, empty lists dropped, nothing missing or foreign counted in silence."""

import json

import numpy as np
import pytest
import torch

from mpp.evaluation.imagenet_real import IMAGES, check_imagenet_classes, numbered, read_real, real_score

LABELS = ((3, 7), (), (5,), (0, 1, 2), ())
NAMES = [f"val/n01440764/ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 6)]
RIGHT = torch.tensor([7, 9, 5, 4, 9])  # right, dropped, right, wrong, dropped


def test_right_is_in_the_list_and_empty_lists_are_dropped():
    score = real_score(RIGHT, NAMES, LABELS)
    assert (score.right, score.counted, score.dropped, score.missing) == (2, 3, 2, 0)
    assert score.value == pytest.approx(2 / 3) and "66.67 % = 2 of 3 images (2 without any label dropped)" in str(score)


def test_files_are_matched_by_name_wherever_they_lie():
    order = np.random.default_rng(1).permutation(5)
    names = [NAMES[i] for i in order]
    names[0] = f"validation[3] (n01440764/{names[0].rsplit('/', 1)[1]})"
    names[1] = names[1].rsplit("/", 1)[1].replace(".JPEG", "_n01440764.JPEG")
    assert real_score(RIGHT[order], names, LABELS) == real_score(RIGHT, NAMES, LABELS)


def test_a_number_in_a_folder_is_not_the_files():
    assert numbered(["ILSVRC2012_val_00000002/ILSVRC2012_val_00000001.JPEG"]) == [1]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([*NAMES[:4], "val/cat.jpg"], "1 of 5 are not: 'val/cat.jpg'"),
        ([*NAMES[:4], "ILSVRC2012_val_000000011.JPEG"], "1 of 5 are not"),
        ([*NAMES[:4], "ILSVRC2012_val_00000000.JPEG"], "1 of 5 are not"),
        ([*NAMES[:4], "ILSVRC2012_val_00050001.JPEG"], "1 of 5 are not"),
        ([*NAMES[:4], "a/ILSVRC2012_val_00000001.JPEG"], "twice: 'val/.*00000001.JPEG' and 'a/"),
    ],
)
def test_foreign_and_doubled_files_are_refused_by_name(names, message):
    with pytest.raises(ValueError, match=message):
        real_score(RIGHT, names, LABELS)


def test_missing_files_are_refused_by_name_unless_allowed_and_then_counted():
    with pytest.raises(ValueError, match="1 of the validation images .*missing, 'ILSVRC2012_val_00000003'"):
        real_score(RIGHT[[0, 1, 3]], [NAMES[i] for i in (0, 1, 3)], LABELS)
    score = real_score(RIGHT[[0, 1, 3]], [NAMES[i] for i in (0, 1, 3)], LABELS, allow_missing=True)
    assert (score.right, score.counted, score.missing) == (1, 2, 1) and "1 missing" in str(score)
    assert real_score(RIGHT[[0, 2, 3]], [NAMES[i] for i in (0, 2, 3)], LABELS).missing == 0  # only empty ones lack
    with pytest.raises(ValueError, match="none of the given files"):
        real_score(RIGHT[:1], NAMES[1:2], LABELS, allow_missing=True)


@pytest.mark.parametrize("wrong", [-1, 1000])
def test_a_prediction_of_no_class_is_refused(wrong):
    with pytest.raises(ValueError, match="expected predictions 0..999"):
        real_score(torch.tensor([7, 9, 5, 4, wrong]), NAMES, LABELS)


def test_the_row_tells_the_denominator():
    row = real_score(RIGHT, NAMES, LABELS).row("imagenet", {"size": 224}, 2.0)
    assert row["images"] == 3 and row["metric"] == "real_top1" and row["value"] == pytest.approx(2 / 3)
    assert row["setting"] == {"size": 224, "dropped": 2, "missing": 0}


def test_real_json_is_read_as_it_is(tmp_path):
    path = tmp_path / "real.json"
    path.write_text(json.dumps([[i % 1000] for i in range(IMAGES - 1)] + [[]]))
    labels = read_real(path)
    assert len(labels) == IMAGES and labels[1234] == (234,) and labels[-1] == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[1], [2]]", "50,000 validation images, got 2 entries"),
        ("{}", "got 0 entries"),
        ("7", "got int"),
        ("[[1]", "cannot be read"),
        ("[" + "[1]," * (IMAGES - 1) + "[1000]]", "entry 50,000: .*got \\[1000\\]"),
        ("[" + "[1]," * (IMAGES - 1) + "3]", "entry 50,000: .*got 3"),
    ],
)
def test_another_file_is_refused(tmp_path, content, message):
    (tmp_path / "real.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_real(tmp_path / "real.json")
    with pytest.raises(ValueError, match="cannot be read"):
        read_real(tmp_path / "none.json")


def test_other_classes_than_imagenets_are_refused():
    synsets = [f"n{i:08d}" for i in range(1000)]
    check_imagenet_classes(synsets)
    check_imagenet_classes([f"class {i}" for i in range(1000)])
    with pytest.raises(ValueError, match="1,000 classes, got 10"):
        check_imagenet_classes(synsets[:10])
    synsets[3], synsets[4] = synsets[4], synsets[3]
    with pytest.raises(ValueError, match="number 3 is 'n00000004' instead of 'n00000003'"):
        check_imagenet_classes(synsets)
