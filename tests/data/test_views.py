"""The view that a classifier is judged on."""

import numpy as np
import torch
from PIL import Image

from mpp.data.transforms import fixed_view
from mpp.data.views import View


def picture(height, width, seed=0):
    small = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    large = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(large).copy()).permute(2, 0, 1)


def test_the_centre_is_that_of_resizing_the_short_side_first():
    """Pillow: short side to 256, then 224 from the middle; ours crops first, so borders differ by rounding only."""
    image = picture(300, 420)
    resized = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((358, 256), Image.Resampling.BICUBIC)
    left, top = (358 - 224) // 2, (256 - 224) // 2
    expected = torch.from_numpy(np.asarray(resized.crop((left, top, left + 224, top + 224))).copy()).permute(2, 0, 1)
    found = View()(image, (224, 224))
    assert (found.int() - expected.int()).abs().float().mean() < 1


def test_crop_1_is_the_view_of_the_frozen_evaluations():
    for size in ((32, 32), (48, 80)):
        assert torch.equal(View(crop=1.0)(picture(61, 97), size), fixed_view(picture(61, 97), size))


def test_squeezing_keeps_everything():
    image = torch.zeros(3, 20, 60, dtype=torch.uint8)
    image[:, :, :6] = 255  # a tenth of the width
    view = View(kind="squeeze")(image, (40, 40))
    assert view[:, :, :4].float().mean() > 240 and abs(view.float().mean().item() / 255 - 0.1) < 0.01


def test_extreme_pictures_have_a_view():
    for height, width in ((1, 1), (3000, 2), (2, 3000)):
        assert View()(torch.zeros(3, height, width, dtype=torch.uint8), (32, 32)).shape == (3, 32, 32)
