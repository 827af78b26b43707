"""Label budgets: exact counts, the same for one seed, nested, nothing in both parts; what is too few has a name."""

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

from mpp.config import RecipeError, dump_recipe, load_recipe
from mpp.data.budget import All, Budget, PerClass, Total, Vtab1k
from mpp.data.dataset import check_classes
from mpp.data.sources import ClassFolders, Subset, open_splits

KINDS = get_args(get_args(Budget)[0])


@dataclass(frozen=True, kw_only=True)
class Recipe:
    budget: Budget = field(default_factory=All)


NAMES = tuple(f"class {c}" for c in range(10))


def subset(counts, names=None, ids=None) -> Subset:
    """counts: images per class; they lie mixed, as the ids of a listed data set do."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    names = NAMES[: len(counts)] if names is None else names
    dataset = SimpleNamespace(labels=lambda: labels, classes=names, description="these pictures")
    return Subset(dataset, np.arange(len(labels)) if ids is None else ids)


def per_class(part: Subset) -> list[int]:
    return np.bincount(part.labels(), minlength=len(part.classes)).tolist()


def made(kind, **fields):
    return (
        kind(count=5, **fields) if kind is PerClass else kind(count=60, **fields) if kind is Total else kind(**fields)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_apart_sorted_and_inside_the_subset(kind):
    whole = subset([300] * 10, ids=np.arange(3000)[::2])
    for validation in (True,) if kind is Vtab1k else (0.2, 20):
        train, chosen_by = made(kind, validation=validation).split(whole)
        for part in (train, chosen_by):
            assert part.ids.dtype == np.int64 and (np.diff(part.ids) > 0).all() and set(part.ids) <= set(whole.ids)
        assert not set(train.ids) & set(chosen_by.ids) and len(chosen_by)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_is_a_function_of_seed_and_id_alone(kind):
    whole = subset([300] * 10)
    draw = lambda seed: [part.ids.tolist() for part in made(kind, seed=seed).split(whole) if part]  # noqa: E731
    assert draw(1) == draw(1)
    assert kind is All or len({str(draw(seed)) for seed in range(10)}) == 10


def test_every_image_is_as_likely_as_any_other():
    hits = np.zeros(200)
    for seed in range(400):
        hits[PerClass(count=10, seed=seed).split(subset([100] * 2))[0].ids] += 1
    assert abs(hits.mean() - 40) < 1e-9 and hits.std() == pytest.approx((400 * 0.1 * 0.9) ** 0.5, rel=0.2)


def test_an_image_keeps_its_place_when_others_leave_the_data():
    """Ranks come from each image's own hash: taking away images not drawn changes nothing."""
    whole = subset([50] * 4)
    drawn = PerClass(count=5).split(whole)[0].ids
    rest = Subset(whole.dataset, np.union1d(drawn, np.arange(0, 200, 3)))
    assert PerClass(count=5).split(rest)[0].ids.tolist() == drawn.tolist()


def test_per_class_takes_exactly_so_many_of_every_class():
    train, chosen_by = PerClass(count=7).split(subset([10, 7, 100]))
    assert per_class(train) == [7, 7, 7] and chosen_by is None


def test_total_is_spread_evenly():
    assert per_class(Total(count=2000).split(subset([500] * 10))[0]) == [200] * 10
    assert sorted(per_class(Total(count=23).split(subset([500] * 10))[0])) == [2] * 7 + [3] * 3


def test_total_takes_all_of_a_small_class_and_the_rest_from_the_others():
    assert sorted(per_class(Total(count=100).split(subset([3, 60, 60]))[0])) == [3, 48, 49]


@pytest.mark.parametrize("kind", [PerClass, Total])
def test_smaller_budgets_of_one_seed_are_contained_in_larger_ones(kind):
    whole = subset([40, 90, 60])
    drawn = [set(kind(count=count, seed=2).split(whole)[0].ids) for count in (4, 11, 30, 39)]
    assert all(small < large for small, large in itertools.pairwise(drawn))


def test_total_of_so_many_per_class_is_per_class():
    whole = subset([40, 90, 60])
    assert np.array_equal(Total(count=30).split(whole)[0].ids, PerClass(count=10).split(whole)[0].ids)


@pytest.mark.parametrize(("validation", "each"), [(0.1, 5), (20, 2), (0.5, 25)])
def test_the_validation_slice_is_taken_out_of_the_budget_class_by_class(validation, each):
    train, chosen_by = PerClass(count=50, validation=validation).split(subset([80] * 10))
    assert per_class(chosen_by) == [each] * 10 and per_class(train) == [50 - each] * 10
    whole, none = PerClass(count=50).split(subset([80] * 10))
    assert none is None and sorted([*train.ids, *chosen_by.ids]) == whole.ids.tolist()


def test_the_validation_slice_keeps_the_shares_of_uneven_classes_and_its_size():
    train, chosen_by = All(validation=50).split(subset([1, 100, 300, 99]))
    assert len(chosen_by) == 50 and per_class(train)[0] == 1
    assert per_class(chosen_by) == pytest.approx([0, 10, 30, 10], abs=1)


def test_a_slice_smaller_than_the_number_of_classes_is_no_two_of_one_class():
    _, chosen_by = All(validation=4).split(subset([50] * 10))
    assert sorted(per_class(chosen_by)) == [0] * 6 + [1] * 4


def test_vtab_is_800_and_200_of_1000_drawn_from_all_alike():
    whole = subset([2000, 1000])
    train, chosen_by = Vtab1k(seed=4).split(whole)
    both, none = Vtab1k(seed=4, validation=False).split(whole)
    assert (len(train), len(chosen_by), len(both), none) == (800, 200, 1000, None)
    assert sorted([*train.ids, *chosen_by.ids]) == both.ids.tolist()
    counts = [per_class(Vtab1k(seed=seed, validation=False).split(whole)[0])[0] for seed in range(40)]
    assert len(set(counts)) > 10 and np.mean(counts) == pytest.approx(667, abs=8)  # drawn, not stratified


@pytest.mark.parametrize(
    ("budget", "counts", "message"),
    [
        (PerClass(count=8), [10, 7, 3], "8 train images of every class, and 2 of 3.*'class 1' has 7, 'class 2' has 3"),
        (Total(count=21), [10, 10], "21 train images asked, and there are 20"),
        (Total(count=2), [10, 10, 10], "at least one image for each of the 3 classes, got 2"),
        (Vtab1k(), [400, 500], "1,000 train images asked, and there are 900"),
        (All(validation=19), [10, 10], "19 of 20 .* at most 18 can be kept back"),
        (PerClass(count=1, validation=0.5), [10, 10], "1 of 2 .* at most 0 can be kept back"),
    ],
)
def test_too_few_images_are_refused_by_name_and_number(budget, counts, message):
    with pytest.raises(ValueError, match=message):
        budget.split(subset(counts))


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_without_train_images_is_refused_by_name(kind):
    with pytest.raises(ValueError, match="found none of 'class 1'"):
        made(kind).split(subset([700, 0, 700]))


@pytest.mark.parametrize("kind", KINDS)
def test_data_without_labels_is_refused(kind):
    whole = subset([700, 700])
    labels = whole.dataset.labels().copy()
    labels[3:5] = -1
    for other, message in ((None, "this has none"), (labels, "2 have none"), (labels * 0 + 2, "expected labels 0..1")):
        dataset = SimpleNamespace(labels=lambda other=other: other, classes=NAMES[:2], description="these")
        with pytest.raises(ValueError, match=message):
            made(kind).split(Subset(dataset, whole.ids))


def test_an_empty_class_folder_never_shifts_labels(tmp_path):
    for name in ("ant", "bee", "cat"):
        (tmp_path / name).mkdir()
    for name in ("ant", "cat"):
        (tmp_path / name / "1.png").write_bytes(b"")
        (tmp_path / name / "2.png").write_bytes(b"")
    with pytest.raises(ValueError, match="found none in 'bee'"):
        open_splits(ClassFolders(path=tmp_path))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (("ant", "cat"), "expected the 3 classes of the model, found 2; missing 'bee'"),
        (("ant", "bee", "cat", "dog"), "found 4; extra 'dog'"),
        (("ant", "bat", "cat"), "found 3; missing 'bee'; extra 'bat'"),
        (("ant", "cat", "bee"), "another order: number 1 is 'cat' instead of 'bee', number 2 is 'bee' instead"),
        (("ant", "bee", "bee"), "missing 'cat'; extra 'bee'"),
    ],
)
def test_other_classes_than_the_models_are_refused_by_name(found, message):
    with pytest.raises(ValueError, match=f"^pets test: .*{message}"):
        check_classes(("ant", "bee", "cat"), found, "pets test")


def test_equal_classes_pass_even_where_two_have_one_name():
    check_classes(["crane", "crane", "bee"], ("crane", "crane", "bee"), "birds")


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("{kind: all, validation: 0.1}", All(validation=0.1)),
        ("{kind: per_class, count: 10, seed: 3}", PerClass(count=10, seed=3)),
        ("{kind: total, count: 2_000, validation: 200}", Total(count=2000, validation=200)),
        ("{kind: vtab_1k, validation: false}", Vtab1k(validation=False)),
    ],
)
def test_a_recipe_can_name_every_budget(tmp_path, text, budget):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"budget: {text}\n")
    assert load_recipe(Recipe, [str(recipe)]).budget == budget
    recipe.write_text(dump_recipe(Recipe(budget=budget)))
    assert load_recipe(Recipe, [str(recipe)]).budget == budget


@pytest.mark.parametrize("validation", ["1.5", "-1", "-0.1"])
def test_impossible_validation_slices_are_refused(validation):
    with pytest.raises(RecipeError, match="budget.validation"):
        load_recipe(Recipe, ["--budget.kind=all", f"--budget.validation={validation}"])
