"""Counts of predictions: equal to sklearn's, ties to the lowest class, the same in any parts."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, confusion_matrix, top_k_accuracy_score

from mpp.evaluation.classification import LARGE, Classification, check_scores


def scores(count=300, classes=8, seed=0):
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=random)
    logits = torch.randn(count, classes, generator=random)
    logits[torch.arange(count), labels] += 1
    return logits, labels


def counted(logits, labels) -> Classification:
    """As scoring does: classes in the order of their scores, equal ones the lowest first."""
    return Classification.of_top(
        logits.sort(dim=1, descending=True, stable=True).indices[:, :5], labels, logits.shape[1]
    )


def test_every_number_is_sklearns():
    logits, labels = scores()
    counts, guess = counted(logits, labels), logits.argmax(1)
    assert np.array_equal(counts.confusion, confusion_matrix(labels, guess)) and counts.images == 300
    assert counts.top1 == pytest.approx(accuracy_score(labels, guess))
    assert counts.top5 == pytest.approx(top_k_accuracy_score(labels, logits, k=5))
    assert counts.mean_per_class == pytest.approx(balanced_accuracy_score(labels, guess))
    right = [float((guess[labels == c] == c).double().mean()) for c in range(8)]
    assert counts.per_class.tolist() == pytest.approx(right)


def test_rows_of_the_matrix_are_the_true_classes():
    counts = counted(torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([2]))
    assert counts.confusion.tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]


def test_an_empty_chunk_counts_nothing():
    counts = counted(torch.empty(0, 4), torch.empty(0, dtype=torch.int64))
    assert counts.images == 0 and counts.confusion.sum() == 0
    with pytest.raises(ValueError, match="no image"):
        _ = counts.top1


def test_classes_without_images_do_not_pull_the_mean_down():
    counts = counted(torch.eye(3)[[0, 0, 1]], torch.tensor([0, 0, 0]))
    assert counts.mean_per_class == pytest.approx(2 / 3) and counts.per_class[1:].isnan().all()
    names = [row["setting"]["class"] for row in counts.class_rows("d", {}, 0.0, ["a", "b", "c"])]
    assert names == ["a"]


def test_rows_are_those_of_the_interface():
    rows = list(counted(*scores()).rows("cifar10", {"size": 32}, 1.23456))
    assert [row["metric"] for row in rows] == ["top1", "top5", "mean_class_accuracy"]
    assert rows[0] == {
        "evaluation": "classification", "dataset": "cifar10", "setting": {"size": 32}, "metric": "top1",
        "value": rows[0]["value"], "spread": None, "seeds": 1, "images": 300, "seconds": 1.235,
    }  # fmt: skip
    few = counted(*scores(classes=5))
    assert [row["metric"] for row in few.rows("d", {}, 0.0)] == ["top1", "mean_class_accuracy"]


def test_class_rows_name_their_class_and_count_its_images():
    counts = counted(*scores())
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
        counted(logits, labels)


def test_scores_that_are_no_numbers_are_refused():
    logits, _ = scores()
    logits[[3, 5], 2] = torch.nan
    with pytest.raises(FloatingPointError, match="2 of 300 images"):
        check_scores(logits)


def test_very_many_classes_are_counted_without_a_matrix_and_without_rows_for_each():
    classes = LARGE + 1
    top, labels = torch.tensor([[7, 8], [classes - 1, 0], [3, 9]]), torch.tensor([7, 0, 1])
    counts = Classification.of_top(top, labels, classes)
    assert counts.is_large and (counts.top1, counts.top5) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert (
        counts.mean_per_class == pytest.approx(1 / 3) and list(counts.class_rows("d", {}, 0.0, ["x"] * classes)) == []
    )
