"""Counts of predictions: equal to sklearn's, ties to the lowest class, the same in any parts."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, confusion_matrix, top_k_accuracy_score

from mpp.evaluation.classification import Classification, predicted


def scores(count=300, classes=8, seed=0):
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=random)
    logits = torch.randn(count, classes, generator=random)
    logits[torch.arange(count), labels] += 1
    return logits, labels


def test_every_number_is_sklearns():
    logits, labels = scores()
    counts, guess = Classification.of(logits, labels), logits.argmax(1)
    assert np.array_equal(counts.confusion, confusion_matrix(labels, guess)) and counts.images == 300
    assert counts.top1 == pytest.approx(accuracy_score(labels, guess))
    assert counts.top5 == pytest.approx(top_k_accuracy_score(labels, logits, k=5))
    assert counts.mean_per_class == pytest.approx(balanced_accuracy_score(labels, guess))
    right = [float((guess[labels == c] == c).double().mean()) for c in range(8)]
    assert counts.per_class.tolist() == pytest.approx(right)


def test_rows_of_the_matrix_are_the_true_classes():
    counts = Classification.of(torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([2]))
    assert counts.confusion.tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]


def test_of_equal_scores_the_lowest_class_comes_first():
    flat = torch.zeros(8, 8)
    counts = Classification.of(flat, torch.arange(8))
    assert predicted(flat).tolist() == [0] * 8 and counts.top1 == 1 / 8 and counts.top5 == 5 / 8
    assert counts.top.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert predicted(torch.tensor([[1.0, 3.0, 3.0], [-torch.inf, -torch.inf, -torch.inf]])).tolist() == [1, 0]


def test_any_parts_add_up_to_the_whole_also_through_the_state():
    logits, labels = scores()
    whole = Classification.of(logits, labels)
    parts = [Classification.of(*part) for part in zip(logits.split(37), labels.split(37), strict=True)]
    total = sum(parts, Classification.nothing(8))
    summed = Classification.from_state(sum(part.state for part in parts))
    for other in (total, summed):
        assert torch.equal(other.confusion, whole.confusion) and torch.equal(other.top, whole.top)
    assert whole.state.dtype == torch.int64 and whole.state.shape == (8, 9)


@pytest.mark.parametrize("classes", [3, 8])
def test_the_first_five_classes_of_each_image_say_as_much_as_its_scores(classes):
    logits, labels = scores(classes=classes)
    top = logits.sort(dim=1, descending=True, stable=True).indices[:, :5]
    a, b = Classification.of_top(top, labels, classes), Classification.of(logits, labels)
    assert torch.equal(a.state, b.state)


def test_an_empty_chunk_counts_nothing():
    counts = Classification.of(torch.empty(0, 4), torch.empty(0, dtype=torch.int64))
    assert counts.images == 0 and torch.equal(counts.state, Classification.nothing(4).state)
    with pytest.raises(ValueError, match="no image"):
        _ = counts.top1


def test_classes_without_images_do_not_pull_the_mean_down():
    counts = Classification.of(torch.eye(3)[[0, 0, 1]], torch.tensor([0, 0, 0]))
    assert counts.mean_per_class == pytest.approx(2 / 3) and counts.per_class[1:].isnan().all()
    names = [row["setting"]["class"] for row in counts.class_rows("d", {}, 0.0, ["a", "b", "c"])]
    assert names == ["a"]


def test_rows_are_those_of_the_interface():
    rows = list(Classification.of(*scores()).rows("cifar10", {"size": 32}, 1.23456))
    assert [row["metric"] for row in rows] == ["top1", "top5", "mean_class_accuracy"]
    assert rows[0] == {
        "evaluation": "classification", "dataset": "cifar10", "setting": {"size": 32}, "metric": "top1",
        "value": rows[0]["value"], "spread": None, "seeds": 1, "images": 300, "seconds": 1.235,
    }  # fmt: skip
    few = Classification.of(*scores(classes=5))
    assert [row["metric"] for row in few.rows("d", {}, 0.0)] == ["top1", "mean_class_accuracy"]


def test_class_rows_name_their_class_and_count_its_images():
    counts = Classification.of(*scores())
    rows = list(counts.class_rows("d", {"size": 32}, 0.0, [f"c{i}" for i in range(8)]))
    assert [row["setting"] for row in rows] == [{"size": 32, "class": f"c{i}"} for i in range(8)]
    assert [row["value"] for row in rows] == counts.per_class.tolist() and sum(row["images"] for row in rows) == 300
    with pytest.raises(ValueError):
        list(counts.class_rows("d", {}, 0.0, ["too", "few"]))


@pytest.mark.parametrize("label", [-1, 8])
def test_a_label_of_no_class_is_refused(label):
    logits, labels = scores()
    labels[4] = label
    with pytest.raises(ValueError, match=f"labels 0..7, as the model has 8 classes, got .*{label}"):
        Classification.of(logits, labels)


def test_scores_that_are_no_numbers_are_refused():
    logits, labels = scores()
    logits[[3, 5], 2] = torch.nan
    with pytest.raises(ValueError, match="2 of 300 images"):
        Classification.of(logits, labels)
