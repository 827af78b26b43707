"""Reconstruction pictures: the input, what the model saw, what it predicted, and the truth, marked as truth."""

from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor

from mpp.backbones import Backbone
from mpp.masking import Plan, gather, partners
from mpp.patches import to_images, to_patches

PANELS = (
    "input",
    "what the model saw\n(grey: [mask]; framed: another patch)",
    "predicted patches\n(pale: visible, copied from the input)",
    "TRUTH at the target's resolution\n(never seen by the model)",
)
GREY = 0.5


def panels(backbone: Backbone, images: Tensor, plan: Plan, predicted: Tensor, truth: Tensor) -> Tensor:
    """The four pictures of each image, float (4, B, C, H, W) in [0, 1].

    images: uint8 (B, C, H, W). predicted: (B, K, P*Q*C) in the plan's order. truth: (B, N, P*Q*C).
    """
    patches = to_patches(images, backbone.patch_size).float() / 255
    seen = _fill(patches, plan.permutation[:, : plan.masked], torch.full_like(patches[:, : plan.masked], GREY))
    borrowed = _framed(partners(patches, plan), backbone)
    seen = _fill(seen, plan.permutation[:, plan.masked : plan.masked + plan.random], borrowed)
    guessed = _fill(0.25 * patches + 0.75, plan.corrupted, predicted)
    true = _fill(0.25 * patches + 0.75, plan.corrupted, gather(truth, plan.corrupted))
    return torch.stack([to_images(p, backbone.grid, backbone.patch_size) for p in (patches, seen, guessed, true)])


def draw(pictures: Tensor, path: Path, title: str) -> None:
    """Writes (4, B, C, H, W) in [0, 1] as one PNG, a row for each image."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = pictures.shape[1]
    height, width = pictures.shape[-2:]
    figure = Figure(figsize=(9, 0.9 + 2.2 * rows * height / width), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, len(PANELS), squeeze=False)
    for column, name in enumerate(PANELS):
        axes[0, column].set_title(name, fontsize=8)
        for row in range(rows):
            axes[row, column].imshow(
                _displayable(pictures[column, row]), interpolation="nearest", vmin=0, vmax=1, cmap="gray"
            )
            axes[row, column].set_axis_off()
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _fill(patches: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return patches.scatter(1, index[..., None].expand(-1, -1, patches.shape[-1]), values.to(patches.dtype))


def _framed(patches: Tensor, backbone: Backbone) -> Tensor:
    """A dark frame of one pixel, so that a borrowed patch is not taken for the input; none under 4 pixels."""
    p, q = backbone.patch_size
    if min(p, q) < 4:
        return patches
    pixels = rearrange(patches, "b r (p q c) -> b r p q c", p=p, q=q).clone()
    pixels[:, :, [0, -1]] = 0
    pixels[:, :, :, [0, -1]] = 0
    return pixels.flatten(2)


def _displayable(image: Tensor) -> Tensor:
    """(C, H, W) -> (H, W) for one or two channels, (H, W, 3) for three and more: the first ones are shown."""
    image = image.detach().cpu()
    return image[0] if len(image) < 3 else image[:3].permute(1, 2, 0)
