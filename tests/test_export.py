"""What a folder for timm says of itself."""

import pytest
import timm

from mpp.architectures import ViT
from mpp.backbones import build_backbone
from mpp.data.views import View
from mpp.export import timm_config


@pytest.mark.parametrize(
    ("view", "crop", "mode"),
    [
        (View(crop=0.875, interpolation="bilinear"), 0.875, "center"),
        (View(kind="squeeze", crop=0.5), 1.0, "squash"),
    ],
)
def test_the_view_that_a_classifier_was_tested_on_is_what_timm_would_test_it_on(view, crop, mode):
    backbone = build_backbone(ViT(patch_size=8, image_size=32, embed_dim=32, depth=1, num_heads=2), 3, seed=0)
    settings = timm_config(backbone, ("a", "b"), "mean", view)["pretrained_cfg"]
    found = timm.data.resolve_data_config(pretrained_cfg=settings)
    assert (found["crop_pct"], found["crop_mode"], found["interpolation"]) == (crop, mode, view.interpolation)
    plain = timm.data.resolve_data_config(pretrained_cfg=timm_config(backbone)["pretrained_cfg"])
    assert (plain["crop_pct"], tuple(plain["input_size"])) == (1.0, (3, 32, 32))
