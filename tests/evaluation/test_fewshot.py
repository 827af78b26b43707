"""Few-shot: the textbook ridge to 1e-6, exact draws, calm on dead features, loud about missing images."""

import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mpp.evaluation.features import Split
from mpp.evaluation.fewshot import FewShot, accuracies, fit_whitening, ridge, signed_sums
from mpp.evaluation.shots import check_shots, draw


def clouds(classes=4, train=240, test=100, dim=16, seed=0, name="clouds"):
    """A split of overlapping clouds, one per class, columns of very different mean and size."""
    random = np.random.default_rng(seed)
    centres, size = random.normal(size=(classes, dim)) * 0.5, 10.0 ** random.uniform(-1, 2, size=dim)
    train_y, test_y = random.permutation(np.arange(train) % classes), np.arange(test) % classes
    return Split(
        train_x=torch.tensor((centres[train_y] + random.normal(size=(train, dim)) + 3) * size).float(),
        train_y=torch.tensor(train_y),
        test_x=torch.tensor((centres[test_y] + random.normal(size=(test, dim)) + 3) * size).float(),
        test_y=torch.tensor(test_y),
        classes=tuple(f"class {i}" for i in range(classes)),
        name=name,
    )


def readouts(probe):
    return [(pool, layer) for pool in probe.pool for layer in probe.layers]


def features_of(split):
    return SimpleNamespace(get=lambda source, pool, layer: split, readouts=readouts)


def prepared(x, test_x):
    """The textbook's preprocessing, in numpy and from the words of METHOD.md."""
    x, test_x = x.double().numpy(), test_x.double().numpy()
    mean, std = x.mean(0), x.std(0)
    dead = std < 1e-4 * np.median(std)
    rows = []
    for part in (x, test_x):
        white = (part - mean) / (std + 1e-5)
        white[:, dead] = 0
        rows.append(np.concatenate([white, np.full((len(part), 1), 100.0)], axis=1))
    return rows


def one_hot(y, classes):
    return np.where(y.numpy()[:, None] == np.arange(classes), 1.0, -1.0)


def our_scores(split, x, y, l2, **kwargs):
    whiten = fit_whitening(x)
    return [whiten(split.test_x) @ w for w in ridge(x, y, len(split.classes), l2, whiten, **kwargs)]


BRANCHES = pytest.mark.parametrize("shots", [1, 2, 4, 5, 25, "all"])  # 17 columns: N is 4, 8, 16, 20, 100, 240


@BRANCHES
@pytest.mark.parametrize("l2", [1024.0, 1.0, 1e-3])
def test_scores_equal_the_textbook_ridge_of_numpy(shots, l2):
    split = clouds()
    chosen = draw(split.train_y, shots, seed=1)
    x, y = split.train_x[chosen], split.train_y[chosen]
    rows, test_rows = prepared(x, split.test_x)
    weights = np.linalg.solve(rows.T @ rows + l2 * np.eye(rows.shape[1]), rows.T @ one_hot(y, 4))
    np.testing.assert_allclose(our_scores(split, x, y, (l2,))[0].numpy(), test_rows @ weights, atol=1e-6)


@BRANCHES
def test_accuracy_and_scores_equal_the_ridge_of_sklearn(shots):
    linear_model = pytest.importorskip("sklearn.linear_model", reason="compares with scikit-learn, of the demo extra")
    split = clouds()
    chosen = draw(split.train_y, shots, seed=2)
    x, y = split.train_x[chosen], split.train_y[chosen]
    rows, test_rows = prepared(x, split.test_x)
    twin = linear_model.Ridge(alpha=1024.0, fit_intercept=False, solver="cholesky").fit(rows, one_hot(y, 4))
    expected = twin.predict(test_rows)
    np.testing.assert_allclose(our_scores(split, x, y, (1024.0,))[0].numpy(), expected, atol=1e-6)
    correct = (expected.argmax(1) == split.test_y.numpy()).mean()
    assert accuracies(split, chosen, (1024.0,)) == [correct]
    assert 0.25 < correct < 1.0 or shots == 1


@pytest.mark.parametrize("l2", [1e-6, 1e-8, 1e-9, 1e-10])
def test_a_tiny_penalty_on_repeated_features_is_least_squares(l2):
    """Copies of a column add zeros to the eigenvalues, which come out a little more or less."""
    split = clouds()
    rows, test_rows = prepared(split.train_x, split.test_x)
    expected = test_rows @ np.linalg.lstsq(rows, one_hot(split.train_y, 4), rcond=None)[0]
    twice = replace(split, train_x=split.train_x.repeat(1, 4), test_x=split.test_x.repeat(1, 4))
    scores = our_scores(twice, twice.train_x, twice.train_y, (l2,))[0]
    np.testing.assert_allclose(scores.numpy(), expected, atol=1e-4)


@BRANCHES
def test_a_list_of_penalties_equals_one_at_a_time(shots):
    split = clouds()
    l2 = (0.5, 1024.0, 1e6, 1e-3)
    together = list(FewShot(shots=(shots,), l2=l2)(features_of(split)))
    alone = [row for one in l2 for row in FewShot(shots=(shots,), l2=(one,))(features_of(split))]
    for row in together + alone:
        del row["seconds"]
    assert together == alone
    assert [row["setting"]["l2"] for row in together] == list(l2)


@pytest.mark.parametrize("block", [1, 7, 100, 240])
def test_blocks_change_nothing(block):
    split = clouds()
    whole = our_scores(split, split.train_x, split.train_y, (1.0,))[0]
    cut = our_scores(split, split.train_x, split.train_y, (1.0,), block=block)[0]
    assert torch.allclose(whole, cut, atol=1e-10, rtol=0)
    everything = draw(split.train_y, "all", 0)
    assert accuracies(split, everything, (1.0,), block=block) == accuracies(split, everything, (1.0,))


def test_signed_sums_are_the_product_with_the_targets():
    """Class 3 of 5 has no row in this block, as can happen within a large train split."""
    y = torch.tensor([4, 0, 1, 0, 2, 4, 4])
    rows = torch.arange(21, dtype=torch.float64).reshape(7, 3).square()
    np.testing.assert_array_equal(signed_sums(rows, y, 5).numpy(), rows.numpy().T @ one_hot(y, 5))


@pytest.mark.parametrize("shots", [1, 5, 10, 60])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_draw_has_exactly_so_many_of_every_class(shots, seed):
    y = clouds().train_y
    chosen = draw(y, shots, seed)
    assert torch.bincount(y[chosen]).tolist() == [shots] * 4
    assert len(chosen.unique()) == len(chosen) and torch.equal(chosen, chosen.sort().values)
    assert torch.equal(chosen, draw(y, shots, seed))


def test_draws_differ_between_seeds_and_nest_within_one():
    y = clouds().train_y
    first, second = draw(y, 5, 0).tolist(), draw(y, 5, 1).tolist()
    assert first != second
    assert set(first) < set(draw(y, 10, 0).tolist())


def test_a_draw_is_fair():
    """Over 600 seeds each of the 60 images of a class is drawn about 100 times."""
    y = clouds().train_y
    times = sum(torch.bincount(draw(y, 10, seed), minlength=len(y)) for seed in range(600))
    assert times.min() > 60 and times.max() < 145


def test_draws_are_frozen():
    """Few-shot numbers of different releases are comparable only while these stay."""
    assert draw(torch.arange(24) % 3, 2, seed=0).tolist() == [1, 7, 9, 11, 12, 14]


def test_all_is_the_whole_train_split_once():
    split = clouds()
    assert torch.equal(draw(split.train_y, "all", 0), torch.arange(240))
    rows = list(FewShot(shots=(60, "all"), seeds=2)(features_of(split)))
    assert [(row["setting"]["shots"], row["seeds"]) for row in rows] == [(60, 2), ("all", 1)]
    assert rows[0]["value"] == rows[1]["value"]
    assert rows[0]["spread"] == 0 and rows[1]["spread"] is None


@pytest.mark.parametrize("train", [0.0, 0.1, 1e6])
def test_constant_features_at_one_shot_do_not_explode(train):
    """Constant over the few images, anything on the test images: divided by 1e-5 it would decide alone."""
    split = clouds()
    plain = our_scores(split, *one_shot(split), (1024.0,))[0]
    constant = torch.full((240, 3), train) + torch.tensor([0.0, 1e-6, 1.0]) * train
    wild = replace(
        split,
        train_x=torch.cat([split.train_x, constant], dim=1),
        test_x=torch.cat([split.test_x, torch.randn(100, 3) * 1e4], dim=1),
    )
    scores = our_scores(wild, *one_shot(wild), (1024.0,))[0]
    assert torch.allclose(scores, plain, atol=1e-9, rtol=0)


def one_shot(split):
    chosen = draw(split.train_y, 1, seed=0)
    return split.train_x[chosen], split.train_y[chosen]


def test_a_column_that_hardly_varies_is_not_looked_at():
    x = clouds().train_x
    sizes = x.double().std(0, correction=0)
    middle = sizes.quantile(0.5)
    for share, looked_at in [(0.5e-4, False), (2e-4, True)]:
        x[:, 0] = torch.tensor([-1.0, 1.0]).repeat(120) * middle * share
        assert bool(fit_whitening(x).scale[0] > 0) is looked_at


def test_features_without_any_variation_predict_the_most_frequent_or_the_lowest_class():
    split = clouds(dim=6)
    flat = replace(split, train_x=torch.full((240, 6), 0.1), test_x=torch.randn(100, 6) * 1e6)
    for row in FewShot(shots=(1, 25, "all"))(features_of(flat)):
        assert row["value"] == 0.25
    chosen = torch.cat([draw(split.train_y, 5, 0), (split.train_y == 2).nonzero()[:, 0]]).unique()
    scores = our_scores(flat, flat.train_x[chosen], flat.train_y[chosen], (1024.0,))[0]
    assert scores.argmax(1).eq(2).all()


def test_mostly_dead_features_still_use_the_living_ones():
    """A median std of 0 makes the threshold 0: only the columns without any variation go."""
    split = clouds()
    living = our_scores(split, split.train_x, split.train_y, (1024.0,))[0]
    random = torch.Generator().manual_seed(0)
    dead = replace(
        split,
        train_x=torch.cat([split.train_x, torch.rand(30, generator=random).expand(240, 30)], dim=1),
        test_x=torch.cat([split.test_x, torch.randn(100, 30, generator=random) * 1e6], dim=1),
    )
    scores = our_scores(dead, dead.train_x, dead.train_y, (1024.0,))[0]
    assert torch.allclose(scores, living, atol=1e-9, rtol=0)


def test_equal_scores_go_to_the_lowest_class():
    split = clouds(classes=3, train=60)
    still = replace(split, train_x=torch.zeros(60, 16), test_x=torch.zeros(100, 16))
    # As many rows as columns or more: the normal equations are diagonal here, and the scores equal to the last bit.
    assert accuracies(still, draw(split.train_y, "all", 0), (1.0,)) == [34 / 100]


def test_value_and_spread_are_over_the_seeds():
    split = clouds()
    row = next(iter(FewShot(shots=(5,), seeds=4)(features_of(split))))
    values = [accuracies(split, draw(split.train_y, 5, seed), (1024.0,))[0] for seed in range(4)]
    half = 3.1824 * statistics.stdev(values) / 2  # Student's t with 3 degrees of freedom
    interval = [statistics.fmean(values) - half, statistics.fmean(values) + half]
    assert row.pop("seconds") >= 0
    assert row == {
        "evaluation": "fewshot",
        "dataset": "clouds",
        "setting": {"shots": 5, "l2": 1024.0, "pool": "mean", "layer": -1},
        "metric": "top1",
        "value": statistics.fmean(values),
        "values": values,
        "spread": statistics.stdev(values),
        "interval": pytest.approx(interval, rel=1e-4),
        "seeds": 4,
        "images": 100,
    }
    assert row["spread"] > 0
    assert next(iter(FewShot(shots=(5,), seeds=1)(features_of(split))))["spread"] is None


def test_two_calls_give_the_same_rows():
    first, second = (list(FewShot()(features_of(clouds()))) for _ in range(2))
    for row in first + second:
        del row["seconds"]
    assert first == second


def test_the_features_asked_for_are_those_of_the_recipe():
    asked, split = [], clouds()
    evaluation = FewShot(pool=("mean", "cls"), layers=(1, -1), shots=(1,))
    rows = list(evaluation(SimpleNamespace(get=lambda *key: asked.append(key) or split, readouts=readouts)))
    assert asked == [(None, "mean", 1), (None, "mean", -1), (None, "cls", 1), (None, "cls", -1)]
    assert [(row["setting"]["pool"], row["setting"]["layer"]) for row in rows] == [key[1:] for key in asked]


def test_too_few_images_of_a_class_are_refused_by_name_and_count():
    split = clouds()
    kept = (split.train_y != 2) | (torch.arange(240) < 40)
    count = int((split.train_y[kept] == 2).sum())
    fewer = replace(split, train_x=split.train_x[kept], train_y=split.train_y[kept])
    with pytest.raises(ValueError, match=rf"25 shots need 25 .* but 'class 2' has {count} that"):
        list(FewShot()(features_of(fewer)))
    check_shots(fewer, (1, count, "all"))


def test_a_class_missing_from_train_is_refused_even_for_all():
    split = clouds()
    kept = split.train_y != 1
    fewer = replace(split, train_x=split.train_x[kept], train_y=split.train_y[kept])
    with pytest.raises(ValueError, match="1 of 4 classes have no train image: 'class 1'"):
        list(FewShot(shots=("all",))(features_of(fewer)))


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="clouds: expected 2 or more classes, got 1"):
        list(FewShot()(features_of(clouds(classes=1))))


def test_labels_are_checked_without_features():
    split = clouds()
    FewShot().check(replace(split, train_x=None, test_x=None))
    with pytest.raises(ValueError, match="61 shots need 61"):
        FewShot(shots=(1, 61)).check(replace(split, train_x=None, test_x=None))


def test_features_that_are_no_numbers_are_refused():
    split = clouds()
    split.test_x[4, 2] = float("nan")
    with pytest.raises(ValueError, match="1 of 100 test images have NaN or infinite features"):
        list(FewShot()(features_of(split)))


def test_a_value_named_twice_is_a_fault():
    assert list(FewShot().faults()) == []
    assert list(FewShot(shots=(5, "all", 5)).faults()) == [("shots", "names 5 more than once")]
