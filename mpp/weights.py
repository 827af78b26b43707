"""One door for weights: own runs, timm's, anybody's timm folder, bare files; strict, and resized here alone.

    backbone = load_backbone("runs/quickstart")                         architecture and pixel statistics with it
    backbone = load_backbone("timm:vit_small_patch16_224.augreg_in21k", image_size=384)
    said = load_into(backbone, "weights.safetensors", "bilinear-corners")      into an architecture that stands

Names and shapes must agree to the last one, and both differences are reported. Only a classifier is left behind, by
the name that timm gives it, and the sentence says so.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpp.architectures import ImageSize
from mpp.backbones import Backbone, create_backbone, create_model
from mpp.checkpoint import Checkpoint
from mpp.export import classifier_tensors as classifier_tensors
from mpp.export import pooling_arguments as pooling_arguments
from mpp.export import randomize
from mpp.export import timm_config as timm_config
from mpp.patches import Size, grid_of, pair
from mpp.positions import BIAS_TABLE, Resampling, stated_grid, to_grid
from mpp.weight_files import Stored, plain, read, read_hub
from mpp.weight_files import checkpoint_at as checkpoint_at

SHAPE = ("patch_size", "embed_dim", "depth", "num_heads")  # named alike in a recipe's backbone
TOLERANCE = 1e-5  # of pixel statistics: config.json has six digits


class Misfit(ValueError):
    """Weights that are of another network than the one they should fill; `advice` is for a recipe with a backbone."""

    def __init__(self, message: str, advice: str):
        super().__init__(f"{message}; {advice}")
        self.message = message


def load_backbone(
    spec: str,
    *,
    image_size: ImageSize | None = None,
    regularization: dict[str, Any] | None = None,
    resampling: Resampling = "bilinear-corners",
    channels: int | None = None,
) -> Backbone:
    """The backbone that a spec names, with its architecture, channels and pixel statistics.

    spec: a run folder (its newest valid checkpoint), a checkpoint, a timm folder, or timm:NAME. image_size: pixels, or
    (height, width); None = the weights' own. regularization: arguments of timm for training, such as drop_path_rate.
    channels: refused if the weights have others. What was done is said in `backbone.origin`.
    """
    stored = read(spec)
    if not stored.described:
        raise ValueError(
            f"{spec} is a bare file and names no architecture; give a folder with a config.json beside it, or name "
            f"the architecture in the recipe's backbone"
        )
    _check_channels(stored, channels)
    backbone = _created(stored, stored.architecture, stored.arguments, image_size, regularization)
    backbone.origin = _fill(backbone, stored, resampling)
    return backbone


def load_into(backbone: Backbone, spec: str, resampling: Resampling = "bilinear-corners") -> str:
    """Weights into a backbone of the same architecture, at whatever image size; a sentence on what was taken.

    The same specs as `load_backbone`, and bare files, of which only names and shapes can be compared. ValueError for
    another architecture, other channels or other pixel statistics: they would change what the weights see.
    """
    if spec.startswith("timm:"):  # a download is not waited for in vain
        _check_same(read_hub(spec.removeprefix("timm:"), pretrained=False), backbone)
    stored = read(spec)
    if stored.described:
        _check_same(stored, backbone)
    backbone.origin = _fill(backbone, stored, resampling)
    return backbone.origin


def _created(
    stored: Stored,
    name: str,
    arguments: dict[str, Any],
    image_size: ImageSize | None = None,
    regularization: dict[str, Any] | None = None,
) -> Backbone:
    """A fresh backbone for stored weights, at their own image size unless another is asked for."""
    assert stored.channels is not None and stored.image_size is not None
    size = pair(image_size or stored.image_size)  # pyright: ignore
    arguments = arguments | {"img_size": size, "in_chans": stored.channels}
    return create_backbone(name, arguments, stored.channels, stored.mean, stored.std, regularization)


def _fill(backbone: Backbone, stored: Stored, how: Resampling) -> str:
    """The tensors into the backbone, positions on its grid; a sentence on what was taken and left."""
    tensors, left = _without_head(stored, backbone)
    tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    old, new = _grid(stored, backbone, tensors), backbone.grid
    if old != new:
        _check_resizable(backbone, stored.where)
    try:
        tensors, done = to_grid(backbone.model, tensors, old, new, how)
    except ValueError as error:
        raise ValueError(f"{stored.where}: {error}") from None
    load_strictly(backbone.model, tensors, stored.where)
    told = stored.where
    if old != new:
        told += f"; patches {old[0]}x{old[1]} -> {new[0]}x{new[1]}, {' and '.join(done) or 'no positions to resample'}"
    elif not stored.described and any(_is_position(name) for name in tensors):
        told += f"; the file states no grid: taken as {new[0]}x{new[1]}"
    return told + (f"; the backbone alone, its classifier ({_some(left)}) aside" if left else "")


def _without_head(stored: Stored, backbone: Backbone) -> tuple[dict[str, Tensor], list[str]]:
    """The backbone's tensors, and the names of those of timm's classifier."""
    own = backbone.model.pretrained_cfg.get("classifier") or "head"  # pyright: ignore
    heads = stored.head or ((own,) if isinstance(own, str) else tuple(own))
    names = {f"{head}.{part}" for head in heads for part in ("weight", "bias")}
    pooling = "attn_pool." if stored.described else "\0"  # timm's attention pooling comes behind the tokens, too
    left = sorted(name for name in stored.tensors if name in names or name.startswith(pooling))
    tensors = {name: tensor for name, tensor in stored.tensors.items() if name not in left}
    if any(name.startswith("fc_norm.") for name in tensors):
        raise ValueError(
            f"{stored.where} has its final norm behind the pooling (fc_norm), so its tokens have none; features here "
            f"are tokens after the final norm, which would not be those it was trained for. Try weights of the same "
            f"architecture before fine-tuning, whose norm is on the tokens"
        )
    return tensors, left


def _grid(stored: Stored, backbone: Backbone, tensors: dict[str, Tensor]) -> Size:
    """The grid of the stored weights: from the image size that is stated, or from the number of positions."""
    if stored.image_size is not None:
        return grid_of(stored.image_size, backbone.patch_size)
    own, theirs = backbone.model.state_dict().get("pos_embed"), tensors.get("pos_embed")
    if own is None or theirs is None:
        return backbone.grid  # another one shows in the shape of a table, and check_fit names it
    try:
        return stated_grid(theirs.shape[1], own.shape[1] - backbone.num_patches, backbone.grid)
    except ValueError as error:
        raise ValueError(f"{stored.where}: {error}") from None


def _is_position(name: str) -> bool:
    return name == "pos_embed" or name.endswith(BIAS_TABLE)


def _check_resizable(backbone: Backbone, where: str) -> None:
    """Whatever grows with the picture must be something that is resampled here."""
    height, width = backbone.image_size
    shapes = []
    for size in ((height, width), (2 * height, 2 * width)):
        with torch.device("meta"):
            model = create_model(backbone.name, backbone.arguments | {"img_size": size})
        shapes.append({name: tensor.shape for name, tensor in model.state_dict().items()})
    unknown = [name for name in shapes[0] if shapes[0][name] != shapes[1][name] and not _is_position(name)]
    if unknown:
        raise ValueError(
            f"{where}: {backbone.name} keeps positions in {_some(unknown)}, which nobody here can resample; use the "
            f"weights at their own image size"
        )


def _word(value: Any) -> str:
    """As on a command line."""
    return f"'{list(value)}'" if isinstance(value, tuple | list) else str(value)


def _check_same(stored: Stored, backbone: Backbone) -> None:
    _check_channels(stored, backbone.channels)
    _check_pixels(stored, backbone)
    _check_architecture(stored, backbone)


def _check_channels(stored: Stored, channels: int | None) -> None:
    if channels not in (None, stored.channels):
        raise ValueError(
            f"{stored.where} sees images of {stored.channels} channels, and {channels} are asked for; "
            f"set data.channels: {stored.channels}"
        )


def _check_pixels(stored: Stored, backbone: Backbone) -> None:
    """Other statistics would shift every input."""
    for what, theirs, ours in (("mean", stored.mean, backbone.mean), ("std", stored.std, backbone.std)):
        if any(abs(a - b) > TOLERANCE for a, b in zip(theirs, ours.tolist(), strict=True)):
            raise Misfit(
                f"{stored.where} was trained with a pixel {what} of {list(theirs)}, and this backbone has "
                f"{[round(value, 6) for value in ours.tolist()]}",
                f"set backbone.pixel_{what}: {list(theirs)}",
            )


def _check_architecture(stored: Stored, backbone: Backbone) -> None:
    """The same function of the same weights. Names may differ: `kind: vit, size: tiny` is vit_tiny_patch16_224."""
    ours = {key: plain(value) for key, value in backbone.arguments.items() if key not in ("img_size", "in_chans")}
    name, differences, advice = backbone.name.split(".")[0], [], []
    if stored.architecture != name:
        differences.append(f"{stored.architecture} instead of {name}")
    for key in sorted(ours.keys() | stored.arguments.keys()):
        pair_of = stored.arguments.get(key, "its default"), ours.get(key, "its default")
        if pair_of[0] != pair_of[1]:
            differences.append(f"{key} {pair_of[0]} instead of {pair_of[1]}")
            advice += [f"--backbone.{key} {_word(pair_of[0])}"] if key in SHAPE and key in stored.arguments else []
    if differences and not _same_function(stored, backbone):
        told = f" ({' '.join(advice)})" if advice else ""
        raise Misfit(
            f"{stored.where} is of another architecture ({_some(differences)})",
            f"use its own{told}, or weights of this one",
        )


@torch.no_grad()
def _same_function(stored: Stored, backbone: Backbone) -> bool:
    """Whether both architectures, at the stored size, turn random weights and a picture into the same bits."""
    theirs = _created(stored, stored.architecture, stored.arguments)
    try:
        ours = _created(stored, backbone.name, backbone.arguments)
    except ValueError:
        return False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        randomize(theirs.model)
        image = torch.randint(0, 256, (1, theirs.channels, *theirs.image_size), dtype=torch.uint8)
    weights, own = theirs.model.state_dict(), ours.model.state_dict()
    if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in own.items()}:
        return False
    ours.model.load_state_dict(weights)
    tokens = [b.eval().model.forward_features(b.normalize(image)) for b in (theirs, ours)]  # pyright: ignore
    return theirs.num_prefix_tokens == ours.num_prefix_tokens and torch.equal(*tokens)


def objective_tensors(task: nn.Module) -> dict[str, Tensor]:
    """What a task has beside its backbone: head and mask token."""
    return {name: t for name, t in task.state_dict().items() if not name.startswith("backbone.")}


def objective_config(task: Any) -> dict[str, Any]:
    """What the head predicts, for readers of objective.safetensors."""
    sections = {name: asdict(getattr(task, name)) for name in ("masking", "corruption", "target")}
    return sections | {"num_corrupted": task.num_corrupted, "patch_size": list(task.backbone.patch_size)}


def load_task(task: Any, checkpoint: Checkpoint) -> None:
    """Backbone, head and mask token of the same recipe; strict."""
    load_strictly(task.backbone.model, checkpoint.tensors("model.safetensors"), str(checkpoint.path))
    objective = checkpoint.tensors("objective.safetensors")
    check_fit(objective_tensors(task), objective, str(checkpoint.path))
    task.load_state_dict(objective, strict=False)  # the backbone's names are not among these


class Initial:
    """Weights that a run begins with: read and found fitting at once, put in place later.

    In between the task keeps its own, so that untrained features can be scored first. ValueError as `load_into`.
    """

    def __init__(self, task: Any, spec: str, resampling: Resampling):
        model, own = task.backbone.model, objective_tensors(task)
        untrained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        told = load_into(task.backbone, spec, resampling)
        self.model = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(untrained)
        # The head and the mask token come along from a run with the same target: another needs another head.
        theirs = same_objective(spec, objective_config(task))
        self.objective = {name: t for name, t in theirs.items() if name in own and t.shape == own[name].shape}
        fresh = sorted(set(own) - set(self.objective))
        self.told = told + (f"; fresh: {', '.join(fresh)}" if fresh else "")

    def put(self, task: Any) -> str:
        """The weights into the task; a sentence on what was taken."""
        task.backbone.model.load_state_dict(self.model)
        task.load_state_dict(self.objective, strict=False)
        return self.told


def same_objective(spec: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """Head and mask token of one of our pretraining checkpoints; the head only where it predicts the same."""
    try:
        checkpoint = checkpoint_at(Path(spec))
    except ValueError:
        return {}
    stored = checkpoint.document("objective.json") if "objective.json" in checkpoint.files else {}
    if "target" not in stored:
        return {}
    tensors = checkpoint.tensors("objective.safetensors")
    alike = all(plain(stored[name]) == plain(config[name]) for name in ("target", "patch_size"))
    return tensors if alike else {name: t for name, t in tensors.items() if not name.startswith("head.")}


def load_strictly(model: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """All names and shapes must agree; both differences are reported."""
    check_fit(model.state_dict(), tensors, where)
    model.load_state_dict(tensors)


def check_fit(own: dict[str, Tensor], tensors: dict[str, Tensor], where: str) -> None:
    """ValueError with what is missing, unexpected or of another shape."""
    missing, unexpected = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
    shapes = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    if missing or unexpected or shapes:
        parts = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
        told = "; ".join(f"{what}: {_some(names)}" for what, names in parts.items() if names)
        raise ValueError(f"{where} does not fit this backbone ({told}); use the same backbone and data.channels")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
