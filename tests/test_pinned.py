"""Weights that stay what they were."""

import torch
from safetensors.torch import save_file

from mpp.architectures import ViT
from mpp.backbones import build_backbone
from mpp.pinned import fingerprint, linked

SPEC = ViT(patch_size=8, image_size=16, embed_dim=32, depth=1, num_heads=2)


def test_a_fingerprint_is_of_every_weight_by_name(tmp_path):
    tensors = build_backbone(SPEC, 3, seed=0).model.state_dict() | {
        "scalar": torch.tensor(1.0),
        "none": torch.empty(0, 3),
    }

    def of(tensors) -> str:
        save_file(tensors, tmp_path / "w.safetensors")
        return fingerprint(str(tmp_path / "w.safetensors"))

    ours = of(tensors)
    assert of(dict(reversed(tensors.items()))) == ours
    assert of(tensors | {"other": torch.tensor(1.0)}) != ours
    for name, tensor in tensors.items():
        if tensor.numel():
            changed = tensor.clone()
            changed.view(-1)[-1] += 1
            assert of(tensors | {name: changed}) != ours


def test_a_file_is_linked_or_copied_where_the_disk_has_no_links(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("weights")
    linked(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "a").samefile(tmp_path / "b")

    def refuse(*names):
        raise OSError("no links here")

    monkeypatch.setattr("mpp.pinned.os.link", refuse)
    linked(str(tmp_path / "a"), str(tmp_path / "c"))
    assert (tmp_path / "c").read_text() == "weights" and not (tmp_path / "a").samefile(tmp_path / "c")
