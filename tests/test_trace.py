"""The trace tells runs apart by ids, pixels and masks, and joins micro-batches and processes in global order."""

import torch

from mpp.masking import Corruption, RandomMasking, make_plan
from mpp.metrics import JsonLines
from mpp.trace import Trace


def batch(*ids, shade=0):
    return {"id": torch.tensor(ids), "image": torch.full((len(ids), 3, 8, 8), shade, dtype=torch.uint8)}


def plan(ids, seed=0):
    ids = torch.tensor(ids)
    return make_plan(RandomMasking(), Corruption(), (4, 4), seed, torch.zeros_like(ids), ids)


def traced(path, micro_batches, gather=lambda rows: rows, shade=0, seed=0):
    trace = Trace(JsonLines(path), len(micro_batches), gather)
    for ids in micro_batches:
        drawn = plan(ids, seed)
        trace.add(1, batch(*ids, shade=shade), drawn.permutation, drawn.partner)
    return JsonLines(path).read()


def test_micro_batches_of_a_step_are_one_line(tmp_path):
    whole = traced(tmp_path / "whole", [[4, 7, 1, 9]])
    split = traced(tmp_path / "split", [[4, 7], [1, 9]])
    assert whole == split and whole[0]["ids"] == [4, 7, 1, 9] and len(set(whole[0]["views"])) == 4


def test_processes_follow_each_other(tmp_path):
    other = [(8, "aa")]
    assert traced(tmp_path / "a", [[4]], gather=lambda rows: [*rows, *other])[0]["ids"] == [4, 8]


def test_another_pixel_or_mask_shows(tmp_path):
    base, pixels, masks = (
        traced(tmp_path / name, [[4]], shade=shade, seed=seed)[0]["views"]
        for name, shade, seed in (("base", 0, 0), ("pixels", 1, 0), ("masks", 0, 1))
    )
    assert len({base[0], pixels[0], masks[0]}) == 3
