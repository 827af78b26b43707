"""What a spec names, read: tensors, and the description beside them where there is one. No pickle is ever run."""

import difflib
import json
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from mpp.checkpoint import Checkpoint, newest
from mpp.patches import Size, pair

GRAMMAR = (
    "expected a run folder, one of its checkpoints, a timm folder (config.json and model.safetensors), "
    "timm:NAME, or a file of weights (.safetensors, .pt, .pth, .bin)"
)
# Arguments of timm that place a head or regularise; they do not change the tokens of the backbone.
HEAD = {"num_classes", "global_pool", "fc_norm", "use_fc_norm", "pool_include_prefix", "use_head"}
TRAINING = {"drop_rate", "proj_drop_rate", "pos_drop_rate", "attn_drop_rate", "drop_path_rate", "weight_init"}
# A config.json is somebody else's text: it may shape a model, and must not make timm read further files.
REFUSED = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "features_only"}
SAFE_TORCH = "2.10"  # the first without GHSA-63cw-57p8-fm3p
TRUST = "MPP_TRUST_PICKLES"
WRAPPERS = ("model", "state_dict")
PREFIXES = ("module.", "_orig_mod.", "backbone.", "model.")


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Weights as they were stored, the head still among them; a bare file has tensors only."""

    where: str
    """how messages name it"""
    tensors: dict[str, Tensor]
    """names as timm has them"""
    architecture: str = ""
    """timm's name without a tag; empty for a bare file"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """what shapes the backbone, without the image size"""
    image_size: Size | None = None
    """pixels, height first"""
    channels: int | None = None
    """of the images"""
    mean: tuple[float, ...] = ()
    """per channel, of pixels in [0, 1]"""
    std: tuple[float, ...] = ()
    """per channel"""
    head: tuple[str, ...] = ()
    """timm's name of the classifier; a model with a distillation token has two"""

    @property
    def described(self) -> bool:
        return bool(self.architecture)


def check_exists(spec: str) -> None:
    """ValueError where a spec names no file or folder and nothing of timm's."""
    if not spec.startswith("timm:") and not Path(spec).exists():
        near = _near(Path(spec)) or (f"timm:{spec}" if timm.is_model(spec) else "")
        near = f"; did you mean {near}?" if near else ""
        raise ValueError(f"{spec}: no such file or folder; {GRAMMAR}{near}")


def _near(path: Path) -> str:
    """The most similar name beside a path that is not there; of several that are as similar, the first."""
    try:
        beside = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return ""
    return "".join(str(path.parent / name) for name in difflib.get_close_matches(path.name, beside, 1))


def read(spec: str) -> Stored:
    """The weights that a spec names; ValueError if there are none or they cannot be trusted."""
    check_exists(spec)
    if spec.startswith("timm:"):
        return read_hub(spec.removeprefix("timm:"))
    path = Path(spec)
    if path.is_file():
        return Stored(where=spec, tensors=read_tensors(path))
    if (path / "config.json").is_file() and not (path / "manifest.json").is_file():
        return read_folder(path)
    checkpoint = checkpoint_at(path)
    where = f"{checkpoint.path} (step {checkpoint.step:,})"
    return described(where, checkpoint.tensors("model.safetensors"), checkpoint.document("config.json"))


def checkpoint_at(path: Path) -> Checkpoint:
    """A run's newest valid checkpoint, or the checkpoint that the path itself names."""
    if (path / "manifest.json").is_file():
        checkpoint = Checkpoint(path)
        checkpoint.verify()
        return checkpoint
    found, skipped = newest(path) if path.is_dir() else (None, [])
    if found is None:
        damaged = "".join(f"\n  skipped {bad}: {reason}" for bad, reason in skipped)
        raise ValueError(f"{path} has no checkpoint; expected a run folder or one of its checkpoints{damaged}")
    return found


def read_hub(name: str, pretrained: bool = True) -> Stored:
    """Pretrained weights of timm, at their own size and with their own head: timm loads those strictly.

    pretrained: False gives the same description with untrained weights, and needs no network.
    """
    if not timm.is_model(name):
        near = timm.list_pretrained(f"*{name.split('.')[0].split('_')[0]}*")[:5]
        raise ValueError(f"timm:{name}: timm {timm.__version__} has no model {name!r}; some that it has: {near}")
    try:
        model: Any = timm.create_model(name, pretrained=pretrained)
    except (OSError, RuntimeError, ImportError) as error:
        raise ValueError(
            f"timm:{name}: no weights came: {str(error).splitlines()[0]}\n  Without a network, fetch them elsewhere "
            f"(hf download timm/NAME.TAG --local-dir FOLDER) and name that folder, or point HF_HOME at a cache that "
            f"has them; timm.list_pretrained() names what exists"
        ) from None
    settings = dict(model.pretrained_cfg)
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or settings["input_size"][-2:]
    arguments = {"img_size": size, "in_chans": settings["input_size"][0]}
    tag = settings.get("tag")
    where = f"timm:{settings['architecture']}{f'.{tag}' if tag else ''}"
    return described(
        where,
        model.state_dict(),
        {"architecture": settings["architecture"], "model_args": arguments, "pretrained_cfg": settings},
    )


def read_folder(path: Path) -> Stored:
    """A timm folder written by anybody."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path / 'config.json'}: is no JSON: {error}") from None
    files = [path / name for name in ("model.safetensors", "pytorch_model.bin") if (path / name).is_file()]
    if not files:
        raise ValueError(f"{path} has a config.json and no model.safetensors beside it; {GRAMMAR}")
    return described(str(path), read_tensors(files[0]), config)


def described(where: str, tensors: dict[str, Tensor], config: Any) -> Stored:
    """Tensors with what a timm config.json says of them."""
    settings = config.get("pretrained_cfg", config) if isinstance(config, dict) else {}
    name = str(config.get("architecture", "")).split(".")[0] if settings else ""
    if not timm.is_model(name):
        raise ValueError(f"{where}: config.json names no architecture of timm {timm.__version__} (got {name!r})")
    arguments = dict(config.get("model_args") or {})
    if bad := sorted(REFUSED & set(arguments)):
        raise ValueError(f"{where}: config.json: model_args.{bad[0]} is not accepted: it names other weights")
    size = settings.get("input_size") or timm.get_pretrained_cfg(name).input_size  # pyright: ignore
    channels = int(arguments.pop("in_chans", size[0]))
    image_size = pair(plain(arguments.pop("img_size", size[-2:])))
    classifier = settings.get("classifier") or "head"
    head = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    return Stored(
        where=where,
        tensors=tensors,
        architecture=name,
        arguments={key: plain(value) for key, value in arguments.items() if key not in HEAD | TRAINING},
        image_size=image_size,
        channels=channels,
        mean=_statistic(settings, "mean", channels, where),
        std=_statistic(settings, "std", channels, where),
        head=head,
    )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """One file of weights: names as timm has them, wrappers and prefixes of training scripts taken off."""
    if path.suffix == ".safetensors":
        return unprefixed(_read_safetensors(path), path)
    if path.suffix not in (".pt", ".pth", ".bin"):
        raise ValueError(f"{path}: {path.suffix or 'no ending'!r} is no format of weights; {GRAMMAR}")
    _check_pickle(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # of protocols that torch does not write itself
            value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Of torch's text the reason alone: the rest is how to open the file nevertheless.
        reason = re.search(r"unsupported (global|operand|class) \S+", str(error), re.IGNORECASE)
        raise ValueError(
            f"{path} holds more than tensors, and opening it could run code ({reason[0] if reason else 'refused'}); "
            f"save its state_dict() alone, best as .safetensors"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: is no file of weights: {str(error)[:200]}") from None
    return unprefixed(unwrapped(value, path), path)


def unwrapped(value: Any, path: Path) -> dict[str, Tensor]:
    """The state dict inside `{"model": ...}` or `{"state_dict": ...}`, or the value itself."""
    inner = [key for key in WRAPPERS if isinstance(value, Mapping) and isinstance(value.get(key), Mapping)]
    if len(inner) > 1:
        raise ValueError(f"{path} has weights under each of {inner}: which are meant? Save one of them alone")
    if inner:
        return unwrapped(value[inner[0]], path)
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"{path} holds a {type(value).__name__} and no named tensors; save a state_dict()")
    tensors = {str(key): tensor for key, tensor in value.items() if isinstance(tensor, Tensor)}
    if swollen := [name for name, tensor in tensors.items() if _is_swollen(tensor)]:
        raise ValueError(f"{path}: {swollen[0]} claims more values than the file holds; save a plain state_dict()")
    if odd := [str(key) for key, tensor in value.items() if not isinstance(tensor, Tensor)]:
        raise ValueError(
            f"{path} has entries that are no tensors ({', '.join(odd[:5])}); expected a state_dict, alone or under "
            f"one of {list(WRAPPERS)}"
        )
    return dict(value)


def _check_pickle(path: Path) -> None:
    """ValueError for a pickle that this torch may not read safely, or that would be far larger in memory."""
    if TorchVersion(torch.__version__) < SAFE_TORCH and os.environ.get(TRUST) != "1":
        raise ValueError(
            f"{path}: is a pickle, and torch {torch.__version__} has a flaw by which such a file can run code "
            f"(GHSA-63cw-57p8-fm3p); upgrade to torch {SAFE_TORCH}, convert the file to .safetensors, or set {TRUST}=1 "
            f"if you made it yourself"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, OSError):  # of torch's older formats, or no file of weights: torch.load says which
        return
    if packed:
        raise ValueError(f"{path}: {packed[0]} in it is compressed, which torch never does; save it again with torch")


def _is_swollen(tensor: Tensor) -> bool:
    """Whether a tensor has more values than bytes were stored for: a copy of it could take any memory."""
    return tensor.layout != torch.strided or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()


def unprefixed(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """`module.backbone.norm.weight` -> `norm.weight`; no timm transformer has modules of these names at its top."""
    names: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name
        while prefix := next((p for p in PREFIXES if short.startswith(p)), ""):
            short = short.removeprefix(prefix)
        if short in names:
            raise ValueError(f"{path} has two tensors for {short} ({name} is one); save one set of weights alone")
        names[short] = tensor
    return names


def plain(value: Any) -> Any:
    """As Python would state it: JSON has lists where arguments are tuples."""
    return tuple(plain(part) for part in value) if isinstance(value, list | tuple) else value


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        # Copied: mapped pages would kill the process (SIGBUS) if somebody cut the file later on.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise ValueError(f"{path}: is no safetensors file: {error}") from None


def _statistic(settings: dict[str, Any], what: str, channels: int, where: str) -> tuple[float, ...]:
    values = tuple(float(value) for value in settings.get(what) or ())
    if len(values) != channels:
        raise ValueError(
            f"{where}: config.json: pretrained_cfg.{what} has {len(values)} values for {channels} channels; "
            f"write the statistics the weights were trained with"
        )
    return values
