"""One door for weights: strict, both differences named, positions resized, heads left behind by name, no pickle run."""

import io
import json
import os
import pickle
import zipfile
from dataclasses import dataclass

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from mpp import checkpoint
from mpp.architectures import Timm, ViT
from mpp.backbones import build_backbone
from mpp.export import randomize
from mpp.masking import Corruption, RandomMasking
from mpp.positions import resample
from mpp.targets import DownsizedColor, MeanColor
from mpp.tasks import MaskedPatchPrediction
from mpp.weights import (
    Initial,
    checkpoint_at,
    classifier_tensors,
    load_backbone,
    load_into,
    load_strictly,
    objective_config,
    objective_tensors,
    timm_config,
)


def vit(**more):
    return ViT(
        **{"size": "tiny", "embed_dim": 32, "depth": 1, "num_heads": 2, "patch_size": 8, "image_size": 32} | more
    )


def task_of(seed=0, bits=2, **more):
    backbone = build_backbone(vit(**more), 3, seed)
    return MaskedPatchPrediction(backbone, RandomMasking(), Corruption(), MeanColor(bits=bits), seed)


FAMILIES = {
    "vit": Timm(name="vit_tiny_patch16_224", image_size=64, arguments={"depth": 2, "embed_dim": 24, "num_heads": 2}),
    "deit3": Timm(
        name="deit3_small_patch16_224", image_size=64, arguments={"depth": 1, "embed_dim": 24, "num_heads": 2}
    ),
    "eva02": Timm(
        name="eva02_tiny_patch14_224", image_size=56, arguments={"depth": 1, "embed_dim": 24, "num_heads": 2}
    ),
    "beit": Timm(name="beit_base_patch16_224", image_size=64, arguments={"depth": 1, "embed_dim": 24, "num_heads": 2}),
    "cait": Timm(name="cait_xxs24_224", image_size=64, arguments={"depth": 1, "embed_dim": 24, "num_heads": 2}),
    "no class token": vit(class_token=False),
    "registers": vit(register_tokens=3),
    "distilled": Timm(
        name="deit_tiny_distilled_patch16_224",
        image_size=64,
        arguments={"depth": 1, "embed_dim": 24, "num_heads": 2},
    ),
}


def random_backbone(spec, channels=3, seed=0):
    backbone = build_backbone(spec, channels, seed).eval()
    torch.manual_seed(seed)
    randomize(backbone.model)
    return backbone


def write_folder(folder, backbone, tensors=None, classes=None, pool="mean", **changes):
    folder.mkdir(exist_ok=True)
    config = timm_config(backbone, classes, pool)
    config |= {key: value for key, value in changes.items() if key in config}
    config["pretrained_cfg"] |= {key: value for key, value in changes.items() if key not in config}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tensors or backbone.model.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def pictures(backbone, count=2):
    torch.manual_seed(7)
    return torch.randint(0, 256, (count, backbone.channels, *backbone.image_size), dtype=torch.uint8)


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def saved(tmp_path):
    task = task_of(seed=1)
    tensors = {
        "model.safetensors": task.backbone.model.state_dict(),
        "objective.safetensors": objective_tensors(task),
    }
    for step in (3, 7):
        documents = {"config.json": timm_config(task.backbone), "objective.json": objective_config(task)}
        checkpoint.save(tmp_path / "run", step, tensors, documents, {})
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
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    initial = Initial(ours, str(run), "bilinear-corners")
    assert all(torch.equal(v, before[k]) for k, v in ours.state_dict().items())  # until they are put in place
    initial.put(ours)
    assert all(torch.equal(v, theirs.state_dict()[k]) for k, v in ours.state_dict().items())


def test_another_target_keeps_its_fresh_head_and_says_so(saved):
    run, theirs = saved
    ours = task_of(seed=0, bits=3)
    fresh = ours.head.weight.detach().clone()
    said = Initial(ours, str(run), "bilinear-corners").put(ours)
    assert "fresh: head.bias, head.weight" in said and torch.equal(ours.head.weight, fresh)
    assert torch.equal(ours.mask_token, theirs.mask_token)


def test_a_head_of_another_meaning_is_not_taken_though_its_shape_fits(saved, tmp_path):
    """8 classes of the mean colour, and 8 numbers of 4 cells with 2 levels: the same shape, another meaning."""
    run, _ = saved
    ours = task_of(seed=0)
    ours.target = DownsizedColor(bits=ours.target.bits, size=1)
    assert "fresh: head.bias, head.weight" in Initial(ours, str(run), "bilinear-corners").told


def test_another_resolution_resamples_positions_and_says_so(saved):
    ours = task_of(seed=0, image_size=(48, 32))
    assert "4x4 -> 6x4, " in Initial(ours, str(saved[0]), "bicubic").put(ours)


def test_every_difference_is_named(saved):
    run, _ = saved
    for other, message in (
        (task_of(depth=2), "depth 1 instead of 2"),
        (task_of(num_heads=4), "num_heads 2 instead of 4"),
        (task_of(pixel_mean=0.4), "pixel_mean"),
    ):
        with pytest.raises(ValueError, match=message):
            Initial(other, str(run), "bilinear-corners")
    model = task_of().backbone.model
    with pytest.raises(ValueError, match="unexpected: extra"):
        load_strictly(model, model.state_dict() | {"extra": torch.zeros(1)}, "here")


def test_a_run_opens_as_it_was_trained(saved):
    run, task = saved
    for spec, step in ((run, 7), (run / "checkpoints" / "00000003", 3)):
        backbone = load_backbone(str(spec))
        assert equal(backbone.model.state_dict(), task.backbone.model.state_dict())
        assert (backbone.grid, backbone.image_size, backbone.channels) == ((4, 4), (32, 32), 3)
        assert f"(step {step})" in backbone.origin and backbone.is_plain


def test_a_damaged_newest_checkpoint_is_passed_over(saved):
    run, _ = saved
    (run / "checkpoints" / "00000007" / "model.safetensors").write_bytes(b"cut")
    assert "(step 3)" in load_backbone(str(run)).origin


def test_pixel_statistics_and_channels_travel_with_the_weights(tmp_path):
    mean = (0.1, 0.2, 0.3, 0.4)
    theirs = build_backbone(vit(pixel_mean=mean, pixel_std=0.2), 4, 1).eval()
    spec = write_folder(tmp_path / "m", theirs)
    ours = load_backbone(spec, channels=4).eval()
    images = pictures(ours)
    assert torch.equal(ours.features(images)["mean", -1], theirs.features(images)["mean", -1])
    assert torch.allclose(ours.mean, torch.tensor(mean)) and ours.channels == 4
    with pytest.raises(ValueError, match="images of 4 channels, and 3 are asked for"):
        load_backbone(spec, channels=3)
    with pytest.raises(ValueError, match=r"pixel mean of \[0.1, .*set backbone.pixel_mean"):
        load_into(build_backbone(vit(pixel_std=0.2), 4, 0), spec)
    with pytest.raises(ValueError, match=r"pixel std of \[0.2, "):
        load_into(build_backbone(vit(pixel_mean=mean), 4, 0), spec)
    with pytest.raises(ValueError, match="images of 4 channels, and 3"):
        load_into(build_backbone(vit(), 3, 0), spec)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(2, 2), (6, 3)])
def test_every_family_opens_at_another_size_with_its_positions_resampled(tmp_path, family, shape):
    theirs = random_backbone(FAMILIES[family])
    patch = theirs.patch_size[0]
    ours = load_backbone(write_folder(tmp_path / "m", theirs), image_size=(shape[0] * patch, shape[1] * patch))
    assert ours.grid == shape and ours.num_prefix_tokens == theirs.num_prefix_tokens
    own, stored = ours.model.state_dict(), theirs.model.state_dict()
    for name in stored:
        if name == "pos_embed":
            prefix = stored[name].shape[1] - 16
            assert prefix == {"deit3": 0, "cait": 0, "no class token": 0, "registers": 0, "distilled": 2}.get(family, 1)
            expected = resample(stored[name], (4, 4), shape, prefix, "bilinear-corners")
            assert torch.equal(own[name], expected) and "positions by bilinear-corners" in ours.origin
        elif not name.endswith("relative_position_bias_table"):
            assert torch.equal(own[name], stored[name])
    assert f"4x4 -> {shape[0]}x{shape[1]}" in ours.origin
    assert ("relative position bias by timm's rule" in ours.origin) == (family == "beit")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("family", ["vit", "deit3", "eva02", "beit", "registers"])
def test_timm_s_own_opening_at_another_size_gives_the_same_features(tmp_path, family):
    """bicubic-antialias is timm's; rotary positions and relative bias follow the grid in both."""
    theirs = random_backbone(FAMILIES[family])
    size = tuple(side * theirs.patch_size[0] for side in (7, 5))
    folder = write_folder(tmp_path / "m", theirs)
    ours = load_backbone(folder, image_size=size, resampling="bicubic-antialias").eval()
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=size).eval()
    with torch.no_grad():
        images = pictures(ours)
        assert torch.allclose(ours.features(images)["mean", -1], model(ours.normalize(images)), rtol=1e-4, atol=1e-5)


def test_load_into_takes_another_size_and_says_from_where_to_where(saved):
    run, task = saved
    ours = build_backbone(vit(image_size=(24, 64)), 3, 0)
    said = load_into(ours, str(run), "bicubic")
    assert "patches 4x4 -> 3x8, positions by bicubic" in said and "(step 7)" in said and ours.origin == said
    expected = resample(task.backbone.model.pos_embed, (4, 4), (3, 8), 1, "bicubic")
    assert torch.equal(ours.model.pos_embed, expected)


def test_the_same_count_on_another_grid_is_resampled(tmp_path):
    theirs = random_backbone(vit(image_size=(16, 64)))
    ours = build_backbone(vit(image_size=32), 3, 0)
    assert "2x8 -> 4x4" in load_into(ours, write_folder(tmp_path / "m", theirs))
    assert not torch.allclose(ours.model.pos_embed, theirs.model.pos_embed)


def test_another_architecture_is_refused_by_name(tmp_path, saved):
    run, _ = saved
    for more, message in (
        ({"depth": 2}, "depth 1 instead of 2"),
        ({"num_heads": 4}, "num_heads 2 instead of 4"),  # every shape agrees
        ({"patch_size": 16}, "patch_size"),
        ({"register_tokens": 2}, "no_embed_class its default instead of True, reg_tokens 0 instead of 2"),
    ):
        with pytest.raises(ValueError, match=f"another architecture .*{message}"):
            load_into(build_backbone(vit(**more), 3, 0), str(run))
    with pytest.raises(ValueError, match="vit_base_patch16_224 instead of eva02_tiny_patch14_224"):
        load_into(build_backbone(FAMILIES["eva02"], 3, 0), str(run))


def test_the_same_network_under_another_name_is_the_same(tmp_path):
    """`kind: vit, size: tiny` is timm's vit_tiny_patch16_224; with another activation it would not be."""
    shape = {"img_size": 32, "depth": 1}
    theirs = build_backbone(Timm(name="vit_tiny_patch16_224", image_size=32, arguments={"depth": 1}), 3, 1)
    spec = write_folder(tmp_path / "m", theirs)
    ours = build_backbone(ViT(size="tiny", depth=1, image_size=32), 3, 0)
    load_into(ours, spec)
    assert equal(ours.model.state_dict(), theirs.model.state_dict())
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    for change in ({"act_layer": "gelu_tanh"}, {"act_layer": "quick_gelu"}):  # every shape agrees
        (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"model_args": shape | change}))
        with pytest.raises(ValueError, match="another architecture .*act_layer"):
            load_into(ours, spec)


def test_training_arguments_of_others_do_not_come_along_and_ours_do(tmp_path):
    theirs = random_backbone(vit())
    spec = write_folder(tmp_path / "m", theirs, model_args=theirs.arguments | {"proj_drop_rate": 0.5, "fc_norm": False})
    assert not load_backbone(spec).has_dropout
    assert load_backbone(spec, regularization={"drop_path_rate": 0.0, "proj_drop_rate": 0.5}).has_dropout


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_a_classifier_s_folder_is_a_working_classifier_in_plain_timm(tmp_path, family, pool):
    backbone = random_backbone(FAMILIES[family])
    head = nn.Linear(backbone.embed_dim, 3)
    tensors = classifier_tensors(backbone, head, pool)
    if family == "distilled" or (family, pool) == ("no class token", "cls"):
        assert tensors is None  # timm averages two heads; there is no class token
        return
    assert tensors is not None
    folder = write_folder(tmp_path / "m", backbone, tensors, ("ant", "bee", "cat"), pool)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = pictures(backbone)
    with torch.no_grad():
        expected = head(backbone.features(images, (pool,))[pool, -1])
        assert torch.allclose(model(backbone.normalize(images)), expected, rtol=1e-4, atol=1e-5)
    assert list(model.pretrained_cfg["label_names"]) == ["ant", "bee", "cat"] and model.num_classes == 3
    again = load_backbone(folder)
    assert equal(again.model.state_dict(), backbone.model.state_dict())
    assert "its classifier (head.bias, head.weight) aside" in again.origin


def test_a_mean_that_timm_takes_otherwise_has_no_classifier_folder():
    backbone = random_backbone(vit(register_tokens=1))
    backbone.arguments = backbone.arguments | {"pool_include_prefix": True}  # the same tensors, another mean
    assert classifier_tensors(backbone, nn.Linear(32, 3), "mean") is None
    assert classifier_tensors(backbone, nn.Linear(32, 3), "cls") is not None


def test_a_head_without_bias_gets_zeros():
    tensors = classifier_tensors(random_backbone(vit()), nn.Linear(32, 3, bias=False), "mean")
    assert tensors is not None and torch.equal(tensors["head.bias"], torch.zeros(3))


def bare(path, tensors):
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    return str(path)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.pth", "w.bin"])
def test_a_bare_file_of_every_format_fills_a_backbone_that_stands(tmp_path, name):
    theirs, ours = random_backbone(vit()), build_backbone(vit(), 3, 1)
    tensors = theirs.model.state_dict() | {"head.weight": torch.zeros(5, 32), "head.bias": torch.zeros(5)}
    said = load_into(ours, bare(tmp_path / name, tensors))
    assert equal(ours.model.state_dict(), theirs.model.state_dict())
    assert "states no grid: taken as 4x4" in said and "its classifier (head.bias, head.weight) aside" in said
    with pytest.raises(ValueError, match="names no architecture"):
        load_backbone(str(tmp_path / name))


def test_a_bare_file_of_another_size_is_square_or_refused(tmp_path):
    theirs = random_backbone(vit(image_size=48))
    path = bare(tmp_path / "w.pt", theirs.model.state_dict())
    assert "6x6 -> 2x4" in load_into(build_backbone(vit(image_size=(16, 32)), 3, 0), path)
    with pytest.raises(ValueError, match=r"w.pt: 37 positions can be 1 \+ 4x9 or \+ 6x6"):
        load_into(build_backbone(vit(image_size=(32, 72)), 3, 0), path)
    with pytest.raises(ValueError, match="37 positions are not 0 prefix tokens"):
        load_into(build_backbone(vit(class_token=False, image_size=40), 3, 0), path)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: {"model": t, "epoch": 3},
        lambda t: {"state_dict": {f"module.{k}": v for k, v in t.items()}, "lr": 0.1},
        lambda t: {"state_dict": {"model": {f"_orig_mod.{k}": v for k, v in t.items()}}},
        lambda t: {f"module.backbone.model.{k}": v for k, v in t.items()},
    ],
)
def test_wrappers_of_training_scripts_are_taken_off(tmp_path, wrap):
    theirs, ours = random_backbone(vit()), build_backbone(vit(), 3, 1)
    load_into(ours, bare(tmp_path / "w.pt", wrap(theirs.model.state_dict())))
    assert equal(ours.model.state_dict(), theirs.model.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {"model": t, "state_dict": t}, r"under each of \['model', 'state_dict'\]"),
        (lambda t: {"weights": t}, "entries that are no tensors .weights."),
        (lambda t: t | {"epoch": 3}, "entries that are no tensors .epoch."),
        (lambda t: [t], "holds a list"),
        (lambda t: t | {"module.norm.bias": t["norm.bias"]}, "two tensors for norm.bias"),
        (lambda t: t | {"head.fc.weight": t["norm.bias"]}, "unexpected: head.fc.weight"),
        (lambda t: t | {"head_dist.weight": t["norm.bias"]}, "unexpected: head_dist.weight"),
        (lambda t: t | {"mask_token": t["norm.bias"]}, "unexpected: mask_token"),
        (lambda t: t | {"fc_norm.weight": t["norm.bias"]}, "norm behind the pooling"),
        (lambda t: {k: v for k, v in t.items() if k != "norm.bias"}, "missing: norm.bias"),
        (lambda t: t | {"norm.bias": torch.zeros(31)}, r"norm.bias \(31,\) instead of \(32,\)"),
    ],
)
def test_a_bare_file_that_is_not_the_backbone_is_refused_and_changes_nothing(tmp_path, change, message):
    ours = build_backbone(vit(), 3, 1)
    before = {name: tensor.clone() for name, tensor in ours.model.state_dict().items()}
    path = bare(tmp_path / "w.pt", change(random_backbone(vit()).model.state_dict()))
    with pytest.raises(ValueError, match=message):
        load_into(ours, path)
    assert equal(ours.model.state_dict(), before)


@dataclass
class Attack:
    path: str

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "w.bin"])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path, name):
    torch.save({"model": Attack(str(tmp_path / "made"))}, tmp_path / name)
    with pytest.raises(ValueError, match=r"could run code \(unsupported GLOBAL \w+\.mkdir\); save its") as refused:
        load_into(build_backbone(vit(), 3, 1), str(tmp_path / name))
    (tmp_path / "old.bin").write_bytes(pickle.dumps(Attack(str(tmp_path / "made")), protocol=2))
    with pytest.raises(ValueError, match="could run code"):
        load_into(build_backbone(vit(), 3, 1), str(tmp_path / "old.bin"))
    (tmp_path / "new.bin").write_bytes(pickle.dumps(Attack(str(tmp_path / "made"))))
    with pytest.raises(ValueError, match=r"could run code \(Unsupported operand \d+\)"):
        load_into(build_backbone(vit(), 3, 1), str(tmp_path / "new.bin"))
    assert "weights_only" not in str(refused.value)  # torch's own text tells how to open it nevertheless
    assert not (tmp_path / "made").exists()


class Evaluated:
    def __reduce__(self):
        return eval, ("__import__('os').mkdir('made')",)


@pytest.mark.parametrize("hidden", ["value", "key", "nested bytes", "storage"])
def test_no_place_in_a_pickle_hides_code(tmp_path, monkeypatch, hidden):
    monkeypatch.chdir(tmp_path)
    inner = io.BytesIO()
    torch.save({"w": Evaluated()}, inner)
    value = {
        "value": {"model": {"w": torch.ones(2), "x": Evaluated()}},
        "key": {"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: Evaluated()}}},
        "nested bytes": {"model": inner.getvalue()},
        "storage": {"model": {"w": torch.ones(2)}, "rng_state": [Evaluated()]},
    }[hidden]
    torch.save(value, "w.pt")
    with pytest.raises(ValueError, match=r"could run code|no named tensors|no tensors"):
        load_into(build_backbone(vit(), 3, 1), "w.pt")
    assert not (tmp_path / "made").exists()


def test_a_torch_with_a_flaw_reads_no_pickle_unless_told_to(tmp_path, monkeypatch):
    ours = build_backbone(vit(), 3, 1)
    torch.save(ours.model.state_dict(), tmp_path / "w.pt")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ValueError, match=r"GHSA-63cw-57p8-fm3p.*torch 2.10.*MPP_TRUST_PICKLES=1"):
        load_into(ours, str(tmp_path / "w.pt"))
    monkeypatch.setenv("MPP_TRUST_PICKLES", "1")
    load_into(ours, str(tmp_path / "w.pt"))
    monkeypatch.delenv("MPP_TRUST_PICKLES")
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    load_into(ours, str(tmp_path / "w.pt"))


def test_a_pickle_that_would_swell_is_refused(tmp_path):
    ours = build_backbone(vit(), 3, 1)
    torch.save({"w": torch.ones(1).expand(10**12)}, tmp_path / "wide.pt")
    with pytest.raises(ValueError, match="w claims more values than the file holds"):
        load_into(ours, str(tmp_path / "wide.pt"))
    torch.save(ours.model.state_dict(), tmp_path / "w.pt")
    with (
        zipfile.ZipFile(tmp_path / "w.pt") as old,
        zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    with pytest.raises(ValueError, match=r"is compressed, which torch never does"):
        load_into(ours, str(tmp_path / "z.pt"))


def test_what_is_no_file_of_weights_is_refused(tmp_path):
    ours = build_backbone(vit(), 3, 1)
    for name in ("w.pt", "w.safetensors", "w.npy", "plain"):
        (tmp_path / name).write_bytes(b"no weights in here")
        with pytest.raises(ValueError, match=str(tmp_path / name)):
            load_into(ours, str(tmp_path / name))


def test_a_spec_that_names_nothing_is_refused_with_the_grammar(tmp_path):
    with pytest.raises(ValueError, match="expected a run folder.*timm:NAME"):
        load_backbone(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="did you mean timm:vit_tiny_patch16_224"):
        load_backbone("vit_tiny_patch16_224")
    with pytest.raises(ValueError, match="has no checkpoint"):
        load_backbone(str(tmp_path))


def test_a_config_that_is_wrong_is_refused_by_name(tmp_path):
    theirs = random_backbone(vit())
    for changes, message in (
        ({"architecture": "resnot50"}, "names no architecture .*resnot50"),
        ({"architecture": "hf-hub:some/thing"}, "names no architecture"),
        ({"architecture": "resnet18", "model_args": {}}, "resnet18"),
        ({"model_args": theirs.arguments | {"checkpoint_path": "x.pt"}}, "model_args.checkpoint_path is not accepted"),
        ({"model_args": theirs.arguments | {"img_size": 48}}, "17 positions are not 1 prefix|does not fit"),
        ({"model_args": theirs.arguments | {"nonsense": 1}}, "nonsense"),
        ({"mean": None}, "pretrained_cfg.mean has 0 values for 3 channels"),
        ({"std": [0.5]}, "pretrained_cfg.std has 1 values for 3 channels"),
    ):
        spec = write_folder(tmp_path / "m", theirs, **changes)
        with pytest.raises(ValueError, match=message):
            load_backbone(spec)
        if "img_size" in message or "positions" in message:
            with pytest.raises(ValueError, match="17 positions are not 1 prefix tokens and a grid of 6x6"):
                load_backbone(spec, image_size=32)
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        load_backbone(spec)
    (tmp_path / "m" / "model.safetensors").unlink()
    (tmp_path / "m" / "config.json").write_text(json.dumps(timm_config(theirs)))
    with pytest.raises(ValueError, match="no model.safetensors beside it"):
        load_backbone(spec)


def test_a_model_whose_norm_follows_the_pooling_is_refused_and_not_filled_halfway(tmp_path):
    theirs = build_backbone(vit(), 3, 1)
    tensors = {name.replace("norm.", "fc_norm.") if name.startswith("norm.") else name: tensor
               for name, tensor in theirs.model.state_dict().items()}  # fmt: skip
    with pytest.raises(ValueError, match="norm behind the pooling"):
        load_backbone(write_folder(tmp_path / "m", theirs, tensors))


def test_attention_pooling_stands_behind_the_tokens_and_stays_behind(tmp_path):
    """SigLIP: what timm pools with is no part of the tokens. A bare file does not say that it is such a model."""
    arguments = {"img_size": 32, "depth": 1, "embed_dim": 24, "num_heads": 2}
    model = timm.create_model("vit_base_patch16_siglip_224", num_classes=0, **arguments).eval()
    spec = Timm(
        name="vit_base_patch16_siglip_224", image_size=32, arguments={k: arguments[k] for k in list(arguments)[1:]}
    )
    folder = write_folder(tmp_path / "m", build_backbone(spec, 3, 0), model.state_dict())
    ours = load_backbone(folder).eval()
    images = ours.normalize(pictures(ours))
    with torch.no_grad():
        assert torch.equal(ours.model.forward_features(images), model.forward_features(images))
    assert "its classifier (attn_pool." in ours.origin
    with pytest.raises(ValueError, match=r"unexpected: attn_pool\."):
        load_into(ours, f"{folder}/model.safetensors")


def test_half_precision_is_resampled_in_full(tmp_path):
    theirs = random_backbone(vit())
    half = {name: tensor.half() for name, tensor in theirs.model.state_dict().items()}
    ours = load_backbone(write_folder(tmp_path / "m", theirs, half), image_size=48)
    expected = resample(half["pos_embed"].float(), (4, 4), (6, 6), 1, "bilinear-corners")
    assert ours.model.pos_embed.dtype == torch.float32 and torch.equal(ours.model.pos_embed, expected)


def test_positions_that_nobody_resamples_are_refused_at_another_size(tmp_path, monkeypatch):
    from mpp import weights

    theirs = random_backbone(vit())
    spec = write_folder(tmp_path / "m", theirs)
    monkeypatch.setattr(weights, "_is_position", lambda name: False)
    with pytest.raises(ValueError, match="keeps positions in pos_embed, which nobody"):
        load_backbone(spec, image_size=48)


def test_timm_s_pretrained_weights_come_with_their_statistics_and_without_their_head(tmp_path, monkeypatch):
    """The hub's cache, filled by hand: what a first download leaves behind."""
    from huggingface_hub import constants

    model = timm.create_model("test_vit.r160_in1k")
    home = tmp_path / "models--timm--test_vit.r160_in1k"
    (home / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("a" * 40)
    save_file(model.state_dict(), home / "snapshots" / ("a" * 40) / "model.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    backbone = load_backbone("timm:test_vit.r160_in1k").eval()
    assert backbone.image_size == tuple(model.pretrained_cfg["input_size"][-2:])
    assert backbone.mean.tolist() == pytest.approx(model.pretrained_cfg["mean"])
    assert (
        "timm:test_vit.r160_in1k" in backbone.origin
        and "its classifier (head.bias, head.weight) aside" in backbone.origin
    )
    images = pictures(backbone)
    with torch.no_grad():
        expected = model.eval().forward_features(backbone.normalize(images))
        assert torch.equal(backbone.model.forward_features(backbone.normalize(images)), expected)
    assert "10x10 -> 3x2" in load_backbone("timm:test_vit.r160_in1k", image_size=(48, 32)).origin


def test_without_a_network_timm_s_names_say_what_to_do(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="no weights came: (.|\n)*Without a network, fetch them elsewhere"):
        load_backbone("timm:test_vit.r160_in1k")
    with pytest.raises(ValueError, match="has no model 'vit_smal_patch16_224'; some that it has"):
        load_backbone("timm:vit_smal_patch16_224")
    with pytest.raises(ValueError, match="Invalid pretrained tag"):
        load_backbone("timm:test_vit.nonsense")


def test_a_name_that_is_not_there_is_answered_with_the_nearest(tmp_path):
    (tmp_path / "cifar10_small").mkdir()
    with pytest.raises(ValueError, match=r"did you mean .*/cifar10_small\?"):
        load_backbone(str(tmp_path / "cifar_small"))


def test_another_architecture_is_told_before_anything_is_downloaded(monkeypatch):
    from mpp import weight_files

    made = weight_files.timm.create_model

    def create(name, pretrained=False, **arguments):
        assert not pretrained, "a download"
        return made(name, pretrained=pretrained, **arguments)

    monkeypatch.setattr(weight_files.timm, "create_model", create)
    spec = ViT(size="tiny", patch_size=8, image_size=32, pixel_mean=0.5, pixel_std=0.5)
    with pytest.raises(ValueError, match=r"another architecture"):
        load_into(build_backbone(spec, 3, seed=0), "timm:vit_tiny_patch16_224.augreg_in21k")
