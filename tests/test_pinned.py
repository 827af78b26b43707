"""Weights that stay what they were."""

import torch

from mpp.architectures import ViT
from mpp.backbones import build_backbone
from mpp.pinned import fingerprint, linked

SPEC = ViT(patch_size=8, image_size=16, embed_dim=32, depth=1, num_heads=2)


def test_a_fingerprint_is_of_every_weight():
    ours, same = (build_backbone(SPEC, 3, seed=0) for _ in range(2))
    assert fingerprint(ours) == fingerprint(same) != fingerprint(build_backbone(SPEC, 3, seed=1))
    for parameter in same.parameters():
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.view(-1)[0] += 1
        assert fingerprint(same) != fingerprint(ours)
        with torch.no_grad():
            parameter.copy_(before)
    assert fingerprint(same) == fingerprint(ours)


def test_a_file_is_linked_or_copied_where_the_disk_has_no_links(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("weights")
    linked(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "a").samefile(tmp_path / "b")

    def refuse(*names):
        raise OSError("no links here")

    monkeypatch.setattr("mpp.pinned.os.link", refuse)
    linked(str(tmp_path / "a"), str(tmp_path / "c"))
    assert (tmp_path / "c").read_text() == "weights" and not (tmp_path / "a").samefile(tmp_path / "c")
