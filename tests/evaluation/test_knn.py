"""kNN: equal to scikit-learn and to results by hand, the same however it is cut, loud about bad labels."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mpp.evaluation.checks import check_labels
from mpp.evaluation.features import Split
from mpp.evaluation.knn import KNN, count_hits, count_votes, fixed_point, is_hit, nearest
from mpp.evaluation.shots import draw


def clouds(classes=7, train=210, test=90, dim=12, seed=0, name="clouds"):
    """A split of overlapping clouds, one per class, with an offset so that no class is at the origin."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(classes, dim)) * 0.7
    train_y, test_y = np.arange(train) % classes, np.arange(test) % classes
    return Split(
        train_x=torch.tensor(centres[train_y] + random.normal(size=(train, dim)) + 0.3).float(),
        train_y=torch.tensor(train_y),
        test_x=torch.tensor(centres[test_y] + random.normal(size=(test, dim)) + 0.3).float(),
        test_y=torch.tensor(test_y),
        classes=tuple(f"class {i}" for i in range(classes)),
        name=name,
    )


def readouts(probe):
    return [(pool, layer) for pool in probe.pool for layer in probe.layers]


def features_of(split):
    return SimpleNamespace(get=lambda source, pool, layer: split, readouts=readouts)


def whole(rows):
    """Small whole numbers stand for fixed-point rows: their products are exact by hand."""
    return torch.tensor(rows, dtype=torch.int32) * 2**20


def sklearn_votes(split, k, temperature):
    """Class probabilities of scikit-learn's classifier: a second, independent computation in float64."""
    neighbors = pytest.importorskip("sklearn.neighbors", reason="compares with scikit-learn, of the demo extra")
    classifier = neighbors.KNeighborsClassifier(
        n_neighbors=k, metric="cosine", algorithm="brute", weights=lambda d: np.exp((1 - d) / temperature)
    )
    classifier.fit(split.train_x.double().numpy(), split.train_y.numpy())
    return classifier.predict_proba(split.test_x.double().numpy())


def our_votes(split, k, temperature, chunk=16384):
    similarity, index = nearest(fixed_point(split.train_x), fixed_point(split.test_x), k, chunk)
    return count_votes(similarity, split.train_y[index], len(split.classes), temperature)


@pytest.mark.parametrize("k", [1, 10, 20, 210])
@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_votes_equal_sklearn(k, temperature):
    split = clouds()
    votes = our_votes(split, k, temperature).double()
    expected = sklearn_votes(split, k, temperature)
    np.testing.assert_allclose((votes / votes.sum(1, keepdim=True)).numpy(), expected, atol=1e-6)
    correct = int((expected.argmax(1) == split.test_y.numpy()).sum())
    assert count_hits(split, [k], temperature)[k, 1] == correct


def test_votes_equal_sklearn_with_tied_neighbours():
    """Every train image twice, the copy under another class: each vote is a tie, the lowest class has it."""
    split = clouds()
    twice = torch.cat([split.train_y, 6 - split.train_y])
    split = replace(split, train_x=split.train_x.repeat(2, 1), train_y=twice)
    votes = our_votes(split, 2, 0.07)
    expected = sklearn_votes(split, 2, 0.07)
    assert votes.argmax(1).tolist() == expected.argmax(1).tolist()
    ours = votes.double() / votes.sum(1, keepdim=True)
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_equal_similarities_go_to_the_lowest_index(chunk):
    train = whole([[0, 3], [3, 0], [0, 3], [3, 0], [3, 0], [0, 3]])
    similarity, index = nearest(train, whole([[2, 0], [0, 2]]), 4, chunk)
    assert index.tolist() == [[1, 3, 4, 0], [0, 2, 5, 1]]
    assert (similarity[:, 0] > similarity[:, 3]).all()


def test_many_copies_are_taken_in_order_whatever_their_place():
    """1000 copies of 3 images: in floats, copies would differ in the last bit by their place."""
    random = torch.Generator().manual_seed(0)
    images = torch.randn(3, 37, generator=random)
    train, test = images.repeat(1000, 1), torch.randn(5, 37, generator=random)
    _, index = nearest(fixed_point(train), fixed_point(test), 1500, chunk=611)
    order = (fixed_point(test).double() @ fixed_point(images).double().T).argsort(1, descending=True)
    for row, ranked in zip(index, order, strict=True):
        assert row[:1000].tolist() == list(range(int(ranked[0]), 3000, 3))
        assert row[1000:].tolist() == list(range(int(ranked[1]), 3000, 3))[:500]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_no_digit_depends_on_the_chunks(chunk):
    split = clouds()
    ks = [1, 10, 50]
    assert count_hits(split, ks, 0.07, chunk=chunk) == count_hits(split, ks, 0.07)
    assert torch.equal(our_votes(split, 50, 0.07, chunk=chunk), our_votes(split, 50, 0.07))


def test_the_fixed_point_similarity_is_the_cosine():
    split = clouds()
    train, test = split.train_x.double(), split.test_x.double()
    similarity, index = nearest(fixed_point(split.train_x), fixed_point(split.test_x), 210)
    cosine = torch.nn.functional.cosine_similarity(test[:, None], train[None], dim=2)
    assert torch.allclose(similarity, cosine.gather(1, index), atol=1e-7, rtol=0)


@pytest.mark.parametrize("dim", [3, 384, 1280])
def test_the_products_are_exact(dim):
    """As integers and as floats: also where rows are parallel, so that all terms add up."""
    x = torch.randn(20, dim, generator=torch.Generator().manual_seed(0)).abs()
    rows = fixed_point(torch.cat([x, x * 3, torch.ones(1, dim), torch.eye(dim)[:1]]))
    exact = rows.long() @ rows.long().T
    assert torch.equal((rows.double() @ rows.double().T).long(), exact)
    assert abs(int(exact.max()) / 2**52 - 1) < 1e-6


def test_length_does_not_matter_and_zero_stays_zero():
    x = clouds().train_x[:5]
    scales = torch.tensor([1.0, 2.0**-100, 2.0**40, 0.25, 0.0])
    fixed = fixed_point(x * scales[:, None])
    assert torch.equal(fixed[:4], fixed_point(x)[:4])
    assert fixed[4].eq(0).all()
    similarity, index = nearest(fixed_point(x), fixed[4:], 3)
    assert similarity.eq(0).all() and index.tolist() == [[0, 1, 2]]


def test_the_nearest_image_of_a_train_image_is_itself():
    split = clouds(classes=3)
    same = replace(split, test_x=split.train_x, test_y=split.train_y)
    rows = list(KNN(k=(1,))(features_of(same)))
    assert [row["value"] for row in rows] == [1.0]


def test_a_class_without_a_vote_is_never_among_the_first_five():
    """Seven classes, two neighbours: the empty classes would fill the places up to five."""
    votes = count_votes(torch.tensor([[0.9, -0.9]]), torch.tensor([[4, 6]]), 7, temperature=0.001)
    assert (votes[0] > 0).tolist() == [False, False, False, False, True, False, True]
    every = votes.repeat(7, 1)
    assert is_hit(every, torch.arange(7), 5).tolist() == [False, False, False, False, True, False, True]
    assert is_hit(every, torch.arange(7), 1).tolist() == [False, False, False, False, True, False, False]


def test_equal_votes_go_to_the_lowest_class():
    votes = torch.tensor([[5, 7, 7, 5, 1, 7]]).repeat(6, 1)
    truth = torch.arange(6)
    assert is_hit(votes, truth, 1).nonzero().flatten().tolist() == [1]
    assert is_hit(votes, truth, 4).nonzero().flatten().tolist() == [0, 1, 2, 5]


def test_a_colder_vote_is_the_nearest_neighbour_and_a_hot_one_the_majority():
    similarity, labels = torch.tensor([[0.9, 0.5, 0.4]]), torch.tensor([[1, 0, 0]])
    assert count_votes(similarity, labels, 2, temperature=0.01).argmax() == 1
    assert count_votes(similarity, labels, 2, temperature=100.0).argmax() == 0


def test_rows_say_what_was_computed():
    split = clouds()
    rows = list(KNN(pool=("mean", "cls"), layers=(-1, 3), k=(10, 20))(features_of(split)))
    assert len(rows) == 2 * 2 * 2 * 2
    first = rows[0]
    assert first.pop("seconds") >= 0
    assert first == {
        "evaluation": "knn",
        "dataset": "clouds",
        "setting": {"k": 10, "shots": "all", "temperature": 0.07, "pool": "mean", "layer": -1},
        "metric": "top1",
        "value": count_hits(split, [10], 0.07)[10, 1] / 90,
        "values": [count_hits(split, [10], 0.07)[10, 1] / 90],
        "spread": None,
        "interval": None,
        "seeds": 1,
        "images": 90,
        "neighbours": 10,
    }


def test_two_calls_give_the_same_rows():
    first, second = (list(KNN()(features_of(clouds()))) for _ in range(2))
    for row in first + second:
        del row["seconds"]
    assert first == second


def test_the_features_asked_for_are_those_of_the_recipe():
    asked, split = [], clouds()
    list(
        KNN(pool=("cls",), layers=(2, -1))(
            SimpleNamespace(get=lambda *key: asked.append(key) or split, readouts=readouts)
        )
    )
    assert asked == [(None, "cls", 2), (None, "cls", -1)]


@pytest.mark.parametrize("classes, metrics", [(5, {"top1"}), (6, {"top1", "top5"})])
def test_top5_is_told_only_where_it_says_something(classes, metrics):
    rows = KNN()(features_of(clouds(classes=classes)))
    assert {row["metric"] for row in rows} == metrics


def test_more_neighbours_than_images_are_all_of_them():
    rows = list(KNN(k=(10, 100, 200))(features_of(clouds(classes=3, train=60))))
    assert [(row["setting"]["k"], row["neighbours"]) for row in rows] == [(10, 10), (100, 60), (200, 60)]
    assert rows[1]["value"] == rows[2]["value"]


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="clouds: expected 2 or more classes, got 1"):
        list(KNN()(features_of(clouds(classes=1))))


def test_classes_missing_from_train_are_refused_by_name():
    split = clouds()
    kept = (split.train_y != 2) & (split.train_y != 5)
    fewer = replace(split, train_x=split.train_x[kept], train_y=split.train_y[kept])
    with pytest.raises(ValueError, match="2 of 7 classes have no train image: 'class 2', 'class 5'"):
        list(KNN()(features_of(fewer)))


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("label", [-1, 7])
def test_labels_that_name_no_class_are_refused(part, label):
    split = clouds()
    getattr(split, f"{part}_y")[3] = label
    with pytest.raises(ValueError, match=f"{part} labels must be 0..6, got"):
        check_labels(split)


def test_an_empty_test_split_is_refused():
    split = clouds()
    with pytest.raises(ValueError, match="the test split has no images"):
        check_labels(replace(split, test_x=split.test_x[:0], test_y=split.test_y[:0]))


def test_labels_are_checked_without_features():
    split = clouds()
    KNN().check(replace(split, train_x=None, test_x=None))


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_no_numbers_are_refused(part, value):
    split = clouds()
    getattr(split, f"{part}_x")[4, 2] = value
    with pytest.raises(ValueError, match=f"1 of [0-9]+ {part} images have NaN or infinite features"):
        list(KNN()(features_of(split)))


def test_a_value_named_twice_is_a_fault():
    assert list(KNN().faults()) == []
    twice = replace(KNN(), k=(10, 10), layers=(-1, 2, -1))
    assert list(twice.faults()) == [("layers", "names -1 more than once"), ("k", "names 10 more than once")]


def test_a_few_labels_are_drawn_with_every_seed_as_few_shot_draws_them():
    split = clouds()
    rows = list(KNN(k=(3, 500), shots=(5, "all"), seeds=2)(features_of(split)))
    values = []
    for seed in range(2):
        chosen = draw(split.train_y, 5, seed)
        few = replace(split, train_x=split.train_x[chosen], train_y=split.train_y[chosen])
        values.append(count_hits(few, [3], 0.07)[3, 1] / 90)
    row = next(row for row in rows if (row["setting"]["k"], row["setting"]["shots"]) == (3, 5))
    assert (row["metric"], row["value"], row["seeds"]) == ("top1", sum(values) / 2, 2)
    few = {row["setting"]["k"]: row["neighbours"] for row in rows if row["setting"]["shots"] == 5}
    assert few == {3: 3, 500: 5 * len(split.classes)}
    assert {row["seeds"] for row in rows if row["setting"]["shots"] == "all"} == {1}
    with pytest.raises(ValueError, match="10000 shots need"):
        list(KNN(shots=(10_000,))(features_of(split)))
