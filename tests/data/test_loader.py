"""Batches: the same for any workers, bad pictures replaced and named, fixed views left out and counted."""

import numpy as np
import pytest
import torch

from mpp.data.loader import (
    FixedViews,
    Pictures,
    Skipped,
    TrainingViews,
    chunks_of,
    fixed_batches,
    spread,
    training_batches,
)
from mpp.data.order import Order, Share
from mpp.data.skipped import SkipList
from mpp.data.sources import Subset
from mpp.data.transforms import Augment, ShiftedCrop
from mpp.metrics import JsonLines


class Arrays:
    """A dataset of 40 small pictures; those in `bad` are text, those in `gone` cannot be read."""

    classes = ("a", "b")
    description = "40 arrays"

    def __init__(self, bad=(), gone=()):
        self.bad, self.gone = set(bad), set(gone)

    def __len__(self):
        return 40

    def read(self, ids):
        return [self._one(id) for id in ids]

    def _one(self, id):
        if id in self.bad:
            return b"no picture"
        if id in self.gone:
            return OSError("input/output error")
        return np.full((10, 10, 3), id, dtype=np.uint8)

    def labels(self):
        return np.arange(40) % 2

    def name(self, id):
        return f"{id}.png"

    def fingerprint(self):
        return "0"


def views(bad=(), gone=(), ids=None):
    subset = Subset(Arrays(bad, gone), None if ids is None else np.array(ids))
    augment = Augment(crop=ShiftedCrop(padding=1))
    return TrainingViews(Pictures(subset, 3, None), Order(len(subset), seed=0), augment, (8, 8))


def batches(v, workers=0, share=None, first=0, last=6):
    return list(training_batches(v, share or Share(16, 8), first, last, workers))


def same(a, b):
    return len(a) == len(b) and all(
        x["skipped"] == y["skipped"] and all(torch.equal(x[k], y[k]) for k in ("image", "id", "epoch", "label"))
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers):
    v = views(bad=[3, 17], gone=[8])
    assert same(batches(v), batches(v, workers))


def test_going_on_in_the_middle_of_an_epoch_changes_nothing():
    v = views()
    assert same(batches(v)[2 * 3 :], batches(v, first=3))


def test_what_is_read_is_what_the_id_says():
    for batch in batches(views(ids=[4, 9, 20, 33])):
        assert set(batch["id"].tolist()) <= {4, 9, 20, 33}
        assert torch.equal(batch["image"][:, 0, 4, 4].long(), batch["id"])
        assert torch.equal(batch["label"], batch["id"] % 2)


def test_every_bad_picture_of_an_epoch_is_replaced_and_named():
    v = views(bad=[3, 17], gone=[8])
    read = batches(v, last=5)  # 80 places: two epochs of 40
    skipped = {s.id: s for batch in read for s in batch["skipped"]}
    assert set(skipped) == {3, 8, 17}
    assert skipped[3].name == "3.png" and "input/output error" in skipped[8].reason
    ids = torch.cat([batch["id"] for batch in read])
    assert len(ids) == 80 and not {3, 8, 17} & set(ids.tolist())
    assert torch.equal(torch.cat([b["image"][:, 0, 4, 4] for b in read]).long(), ids)


def test_the_replacement_of_a_bad_picture_does_not_move_the_others():
    good, mended = batches(views(), last=5), batches(views(bad=[3]), last=5)
    a, b = (torch.cat([batch["id"] for batch in read]) for read in (good, mended))
    assert torch.equal(a[a != 3], b[a != 3]) and (a == 3).sum() == 2


def test_data_without_any_picture_stops_with_the_last_name_and_reason():
    with pytest.raises(ValueError, match=r"100 pictures in a row.*\.png"):
        batches(views(bad=range(40)), last=1)


def test_fixed_views_leave_bad_pictures_out_and_keep_their_places():
    fixed = FixedViews(views(bad=[1], ids=[0, 1, 2, 3, 4]).pictures, (8, 8))
    read = list(fixed_batches(fixed, [[0, 1], [1], [2, 3, 4]]))
    assert [b["place"].tolist() for b in read] == [[0], [], [2, 3, 4]]
    assert read[1]["image"].shape == (0, 3, 8, 8) and [s.id for s in read[0]["skipped"]] == [1]


def test_chunks_are_cut_the_same_for_any_number_of_processes():
    whole = chunks_of(97, 8)
    assert [p for _, places in whole for p in places] == list(range(97))
    for world in (2, 3):
        parts = [chunk for rank in range(world) for chunk in chunks_of(97, 8, rank, world)]
        assert sorted(parts) == whole


def test_a_sample_of_a_large_split_is_spread_over_all_of_it():
    assert spread(5, 10).tolist() == [0, 1, 2, 3, 4]
    assert spread(1000, 4).tolist() == [0, 250, 500, 750]


def test_the_skip_list_names_each_picture_once_also_after_a_restart(tmp_path):
    file = JsonLines(tmp_path / "skipped.jsonl")
    bad = Skipped(3, 'tab\t"quote".jpg', "no picture")
    skips = SkipList(file, lambda values: values + values)  # as if two processes had met it
    skips.add("train", [bad])
    skips.flush()
    again = SkipList(file, lambda values: values)
    again.add("train", [bad])
    again.add("heldout", [bad])
    again.flush()
    assert [(row["split"], row["name"]) for row in file.read()] == [
        ("train", bad.name),
        ("heldout", bad.name),
    ]
