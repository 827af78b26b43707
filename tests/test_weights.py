"""One door for weights: strict, both differences named, checkpoints found by run or by folder."""

import pytest
import torch

from mpp import checkpoint
from mpp.architectures import ViT
from mpp.backbones import build_backbone
from mpp.masking import Corruption, RandomMasking
from mpp.targets import MeanColor
from mpp.tasks import MaskedPatchPrediction
from mpp.weights import checkpoint_at, initial_checkpoint, initialize, load_strictly, objective_tensors


def task_of(seed=0, bits=2, **more):
    shape = {"size": "tiny", "embed_dim": 32, "depth": 1, "num_heads": 2, "patch_size": 8, "image_size": 32} | more
    backbone = build_backbone(ViT(**shape), 3, seed)
    return MaskedPatchPrediction(backbone, RandomMasking(), Corruption(), MeanColor(bits=bits), seed)


@pytest.fixture
def saved(tmp_path):
    task = task_of(seed=1)
    tensors = {
        "model.safetensors": task.backbone.model.state_dict(),
        "objective.safetensors": objective_tensors(task),
    }
    for step in (3, 7):
        checkpoint.save(tmp_path / "run", step, tensors, {}, {})
    return tmp_path / "run", task


def test_head_and_mask_token_lie_beside_the_pure_backbone(saved):
    assert sorted(objective_tensors(saved[1])) == ["head.bias", "head.weight", "mask_token"]


def test_a_run_gives_its_newest_checkpoint_and_a_folder_gives_itself(saved):
    run, _ = saved
    assert checkpoint_at(run).step == 7
    assert checkpoint_at(run / "checkpoints" / "00000003").step == 3
    with pytest.raises(ValueError, match="has no checkpoint"):
        checkpoint_at(run.parent)


def test_initialising_takes_everything_that_fits(saved):
    run, theirs = saved
    ours = task_of(seed=0)
    initialize(ours, initial_checkpoint(ours, str(run)))
    assert all(torch.equal(v, theirs.state_dict()[k]) for k, v in ours.state_dict().items())


def test_another_target_keeps_its_fresh_head_and_says_so(saved):
    run, theirs = saved
    ours = task_of(seed=0, bits=3)
    fresh = ours.head.weight.detach().clone()
    said = initialize(ours, initial_checkpoint(ours, str(run)))
    assert "fresh: head.bias, head.weight" in said and torch.equal(ours.head.weight, fresh)
    assert torch.equal(ours.mask_token, theirs.mask_token)


def test_every_difference_is_named(saved):
    run, _ = saved
    with pytest.raises(ValueError, match=r"missing: blocks\.1\."):
        initial_checkpoint(task_of(depth=2), str(run))
    with pytest.raises(ValueError, match=r"pos_embed \(1, 17, 32\) instead of \(1, 37, 32\)"):
        initial_checkpoint(task_of(image_size=48), str(run))
    model = task_of().backbone.model
    with pytest.raises(ValueError, match="unexpected: extra"):
        load_strictly(model, model.state_dict() | {"extra": torch.zeros(1)}, "here")
