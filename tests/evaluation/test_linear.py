"""Linear probe: sklearn's logistic regression, many rates in one pass, chosen without test, loud where nothing fits."""

import math
import statistics
from dataclasses import replace
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from mpp.chance import Purpose, seed_of
from mpp.data.order import Order
from mpp.evaluation import softmax_regression
from mpp.evaluation.features import Features, Split
from mpp.evaluation.linear import LinearProbe
from mpp.evaluation.scores import hold_back
from mpp.evaluation.shots import draw
from mpp.evaluation.softmax_regression import LBFGS, SGD, cross_entropy

CPU = torch.device("cpu")


def clouds(classes=4, train=240, test=100, dim=12, seed=0, distance=0.5, name="clouds"):
    """A split of overlapping clouds, one per class, columns of very different mean and size."""
    random = np.random.default_rng(seed)
    centres, size = random.normal(size=(classes, dim)) * distance, 10.0 ** random.uniform(-1, 2, size=dim)
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


def features_of(split, lines=None):
    runtime = SimpleNamespace(device=CPU, log=[].append if lines is None else lines.append)
    features = SimpleNamespace(
        get=lambda source, pool, layer: split, readouts=readouts, runtime=runtime, which="untrained"
    )
    features.note = MethodType(Features.note, features)
    return features


def rows_of(probe, split):
    rows = list(probe(features_of(split)))
    for row in rows:
        del row["seconds"]
    return rows


def prepared(split):
    """Standardised as METHOD.md 4 says, in numpy."""
    x, test_x = split.train_x.double().numpy(), split.test_x.double().numpy()
    return [(part - x.mean(0)) / (x.std(0) + 1e-5) for part in (x, test_x)]


SOLVERS = pytest.mark.parametrize("solver", [LBFGS(), SGD(epochs=20, batch_size=48)], ids=["lbfgs", "sgd"])


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("l2", [1e-3, 1e-1, 10.0])
def test_lbfgs_is_the_logistic_regression_of_sklearn(classes, l2):
    linear_model = pytest.importorskip("sklearn.linear_model", reason="compares with scikit-learn, of the demo extra")
    split = clouds(classes)
    fit = LBFGS(tolerance=1e-7).fit(split.train_x, split.train_y, classes, (l2,), 0, CPU)[0]
    assert fit.converged
    x, test_x = prepared(split)
    # For two classes sklearn has one column of weights, the difference of ours, at half the penalty.
    penalty = l2 if classes > 2 else l2 / 2
    twin = linear_model.LogisticRegression(C=1 / (penalty * len(x)), tol=1e-10, max_iter=10_000)
    twin.fit(x, split.train_y.numpy())
    weight = fit.weight[:-1].T.numpy()
    expected = twin.coef_ if classes > 2 else twin.coef_ / 2 * [[-1], [1]]
    np.testing.assert_allclose(weight - weight.mean(0), expected - expected.mean(0), atol=1e-4)
    np.testing.assert_allclose(fit.scores(split.test_x).softmax(1).numpy(), twin.predict_proba(test_x), atol=1e-5)
    correct = (twin.predict(test_x) == split.test_y.numpy()).mean()
    row = rows_of(LinearProbe(solver=LBFGS(l2=(l2,), tolerance=1e-7)), split)[0]
    assert row["value"] == correct and 1 / classes < correct < 1


def test_the_path_of_penalties_ends_where_each_alone_would():
    split = clouds()
    l2, solver = (1e-3, 1.0, 1e-2), LBFGS(tolerance=1e-8)
    together = solver.fit(split.train_x, split.train_y, 4, l2, 0, CPU)
    for penalty, fit in zip(l2, together, strict=True):
        alone = solver.fit(split.train_x, split.train_y, 4, (penalty,), 0, CPU)[0]
        assert fit.converged and torch.allclose(fit.weight, alone.weight, atol=1e-4, rtol=0)


def test_the_gradient_is_autograds_for_any_blocks(monkeypatch):
    split = clouds()
    rows, y = torch.cat([split.train_x.double() / 100, torch.ones(240, 1)], 1), split.train_y
    weight = torch.randn(13, 3 * 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    free = weight.clone().requires_grad_()
    losses = [nn.functional.cross_entropy(rows @ part, y) for part in free.split(4, dim=1)]
    torch.stack(losses).sum().backward()
    for block in (7, 240):
        monkeypatch.setattr("mpp.evaluation.linear.BLOCK", block)
        loss, gradient = cross_entropy(rows, y, weight, 4)
        assert torch.allclose(loss, torch.stack(losses)) and torch.allclose(gradient, free.grad)


def test_the_sweep_of_rates_equals_separate_trainings_with_torchs_sgd():
    """One of the rates diverges: the others must not notice."""
    split, rates = clouds(), (1e-3, 3e-2, 1e4)
    solver = SGD(learning_rates=rates, epochs=3, batch_size=32)
    fits = solver.fit(split.train_x, split.train_y, 4, rates, 5, CPU)
    order = Order(240, seed_of(5, Purpose.PROBE))
    x = torch.tensor(prepared(split)[0]).float()
    steps = math.ceil(3 * 240 / 32)
    for rate, fit in zip(rates[:2], fits[:2], strict=True):
        layer = nn.Linear(12, 4)
        nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
        optimizer = torch.optim.SGD(layer.parameters(), lr=rate, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for step in range(steps):
            batch = order.at(torch.arange(32 * step, 32 * step + 32))[1]
            optimizer.zero_grad()
            nn.functional.cross_entropy(layer(x[batch]), split.train_y[batch]).backward()
            optimizer.step()
            scheduler.step()
        ours = fit.weight.float()
        assert torch.allclose(ours[:-1].T, layer.weight, atol=1e-5) and torch.allclose(ours[-1], layer.bias, atol=1e-5)
        final = nn.functional.cross_entropy(layer(x), split.train_y).detach()
        assert fit.loss == pytest.approx(float(final), abs=1e-5)


@SOLVERS
def test_far_clouds_are_told_apart_without_a_mistake(solver):
    rows = rows_of(LinearProbe(solver=solver), clouds(classes=7, distance=20.0))
    assert [(row["metric"], row["value"]) for row in rows] == [("top1", 1.0), ("top5", 1.0)]


@SOLVERS
def test_test_labels_and_test_images_choose_nothing(solver):
    split = clouds(distance=0.3)
    other = replace(split, test_y=split.test_y.flip(0), test_x=split.test_x.roll(1, 0) * 2)
    ours, theirs = (
        rows_of(LinearProbe(solver=solver, seeds=2), split),
        rows_of(LinearProbe(solver=solver, seeds=2), other),
    )
    assert ours[0]["chosen"] == theirs[0]["chosen"] and ours[0]["value"] != theirs[0]["value"]


def test_the_setting_is_the_best_on_the_slice_and_fitted_again_on_all_of_train():
    split, l2 = clouds(distance=0.3, train=120, seed=1), (1e-4, 1e-2, 0.3, 3.0, 100.0)
    held = hold_back(split.train_y, torch.arange(120), 0.25, 0)
    solver = LBFGS(l2=l2)
    fits = solver.fit(split.train_x[~held], split.train_y[~held], 4, l2, 0, CPU)
    scores = [(f.scores(split.train_x[held]).argmax(1) == split.train_y[held]).float().mean().item() for f in fits]
    best = max(range(5), key=scores.__getitem__)
    assert scores.count(scores[best]) == 1 and 0 < best < 4, "the case must have one best inside"
    row = rows_of(LinearProbe(solver=solver, validation=0.25), split)[0]
    alone = rows_of(LinearProbe(solver=LBFGS(l2=(l2[best],))), split)[0]
    assert row["value"] == alone["value"]
    assert row["chosen"][0]["l2"] == l2[best] and row["chosen"][0]["validation"] == pytest.approx(scores[best])
    assert not row["chosen"][0]["at_edge"] and row["chosen"][0]["converged"]
    assert alone["chosen"][0] | {"train_loss": 0} == {
        "l2": l2[best], "validation": None, "at_edge": False, "train_loss": 0, "converged": True,
    }  # fmt: skip


@pytest.mark.parametrize("l2", [(0.3, 3.0, 100.0), (1e-4, 1e-2, 0.3)])  # of the sweep above, cut beside its best
def test_a_best_setting_at_the_end_of_the_sweep_is_marked(l2):
    split = clouds(distance=0.3, train=120, seed=1)
    chosen = rows_of(LinearProbe(solver=LBFGS(l2=l2), validation=0.25), split)[0]["chosen"][0]
    assert chosen["at_edge"] and chosen["l2"] == 0.3


def test_value_spread_and_interval_are_over_draws_of_shots():
    split = clouds()
    probe = LinearProbe(shots=(5, "all"), seeds=3, solver=LBFGS(l2=(0.1,)))
    few, every = rows_of(probe, split)
    values = []
    for seed in range(3):
        ids = draw(split.train_y, 5, seed)
        small = replace(split, train_x=split.train_x[ids], train_y=split.train_y[ids])
        values.append(rows_of(LinearProbe(solver=LBFGS(l2=(0.1,))), small)[0]["value"])
    assert few.pop("chosen")[2]["l2"] == 0.1
    assert few.pop("interval")[0] < few["value"]
    assert few == {
        "evaluation": "linear",
        "dataset": "clouds",
        "setting": {"shots": 5, "solver": "lbfgs", "l2": [0.1], "pool": "mean", "layer": -1},
        "metric": "top1",
        "value": statistics.fmean(values),
        "values": values,
        "spread": statistics.stdev(values),
        "seeds": 3,
        "images": 100,
    }
    assert every["seeds"] == 1 and every["spread"] is None  # nothing is drawn: every seed would be the same
    assert every["value"] > few["value"]


@SOLVERS
def test_two_calls_give_the_same_rows(solver):
    probe = LinearProbe(solver=solver, seeds=2)
    assert rows_of(probe, clouds()) == rows_of(probe, clouds())


def test_features_that_nearly_depend_on_each_other_take_few_iterations():
    random = torch.Generator().manual_seed(0)
    mixing = torch.randn(32, 32, generator=random) * torch.logspace(0, -2.5, 32)
    x = torch.randn(600, 32, generator=random) @ mixing.T
    y = (x @ torch.randn(32, 3, generator=random) + 5 * torch.randn(600, 3, generator=random)).argmax(1)
    fits = LBFGS(max_iterations=40).fit(x, y, 3, (1e-6, 1e-3, 1.0), 0, CPU)
    assert [fit.converged for fit in fits] == [True] * 3
    alone = LBFGS(max_iterations=40).fit(x, y, 3, (1e-6,), 0, CPU)[0]  # from 0, and not from its neighbour's end
    assert alone.loss == pytest.approx(fits[0].loss, abs=1e-6)


def test_classes_that_nearly_come_apart_converge_also_with_one_curvature_for_all(monkeypatch):
    split = clouds(distance=3.0, train=80)
    own = LBFGS(max_iterations=300).fit(split.train_x, split.train_y, 4, (1e-6,), 0, CPU)[0]
    monkeypatch.setattr(softmax_regression, "LARGE", 0)
    shared = LBFGS(max_iterations=300).fit(split.train_x, split.train_y, 4, (1e-6,), 0, CPU)[0]
    assert own.converged and shared.converged and own.loss < 1e-3
    assert own.loss == pytest.approx(shared.loss, abs=1e-5)


def test_a_feature_that_is_a_copy_of_another_is_no_fault():
    random = torch.Generator().manual_seed(1)
    x = torch.randn(200, 4, generator=random)
    y = (x[:, 0] > 0).long()
    fit = LBFGS().fit(torch.cat([x, x, torch.ones(200, 1)], 1), y, 2, (1e-4,), 0, CPU)[0]
    assert fit.converged and torch.allclose(fit.weight[:4], fit.weight[4:8], atol=1e-2)


def test_what_has_not_converged_is_marked_and_said():
    lines = []
    row = next(iter(LinearProbe(solver=LBFGS(l2=(1e-6,), max_iterations=2))(features_of(clouds(), lines))))
    assert row["chosen"][0]["converged"] is False
    assert (
        len(lines) == 1
        and "linear on clouds, untrained backbone" in lines[0]
        and "not converged in 2 iterations" in lines[0]
    )


@pytest.mark.parametrize("rate", [1e9, 1e38])
def test_rates_that_learn_nothing_are_refused(rate):
    probe = LinearProbe(solver=SGD(learning_rates=(rate,), epochs=3, batch_size=16))
    with pytest.raises(
        ValueError, match="linear on clouds, learning_rate .*: the probe's training loss is .*not below"
    ):
        list(probe(features_of(clouds())))


@pytest.mark.parametrize("noise", [0.0, 1e-8])
@SOLVERS
def test_constant_features_are_refused(solver, noise):
    split = clouds()
    flat = torch.full((240, 12), 0.1) + noise * torch.randn(240, 12, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="all 240 train images have the same features"):
        list(LinearProbe(solver=solver)(features_of(replace(split, train_x=flat))))


def test_features_that_are_no_numbers_are_refused():
    split = clouds()
    split.test_x[4, 2] = float("inf")
    with pytest.raises(ValueError, match="1 of 100 test images have NaN or infinite features"):
        list(LinearProbe()(features_of(split)))


def test_labels_are_checked_without_features():
    split = replace(clouds(), train_x=None, test_x=None)
    LinearProbe(shots=(60,)).check(split)
    with pytest.raises(ValueError, match="61 shots need 61"):
        LinearProbe(shots=(61,)).check(split)
    with pytest.raises(ValueError, match="expected 2 or more classes, got 1"):
        LinearProbe().check(replace(clouds(classes=1), train_x=None))
    with pytest.raises(ValueError, match="1 of 4 classes have no train image: 'class 1'"):
        LinearProbe().check(replace(split, train_y=split.train_y[split.train_y != 1]))


def test_one_image_of_each_class_leaves_nothing_to_choose_on():
    split = clouds(train=4, classes=4)
    with pytest.raises(ValueError, match="every class has one train image"):
        LinearProbe().check(split)
    LinearProbe(solver=LBFGS(l2=(1.0,))).check(split)
    assert [field for field, _ in LinearProbe(shots=(1,)).faults()] == ["shots"]
    assert list(LinearProbe(shots=(1,), solver=LBFGS(l2=(1.0,))).faults()) == []


def test_a_class_with_one_image_is_trained_on():
    split = clouds(distance=20.0)
    kept = (split.train_y != 3) | (torch.arange(240) == int((split.train_y == 3).nonzero()[0]))
    fewer = replace(split, train_x=split.train_x[kept], train_y=split.train_y[kept])
    assert rows_of(LinearProbe(), fewer)[0]["value"] == 1.0


def test_a_value_named_twice_is_a_fault():
    assert list(LinearProbe().faults()) == []
    assert list(LBFGS(l2=(1.0, 1.0)).faults()) == [("l2", "names 1.0 more than once")]
    assert [field for field, _ in SGD(learning_rates=(1.0, 1.0)).faults()] == ["learning_rates"]
