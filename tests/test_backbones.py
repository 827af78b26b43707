"""The short way equals the general one, in values and gradients; families of timm; features; export."""

import pytest
import timm
import torch

from mpp.architectures import Timm, ViT
from mpp.backbones import build_backbone
from mpp.masking import Corruption, RandomMasking
from mpp.targets import MeanColor
from mpp.tasks import MaskedPatchPrediction


def small(**more):
    return ViT(
        **(
            {
                "size": "tiny",
                "embed_dim": 32,
                "depth": 3,
                "num_heads": 2,
                "patch_size": 8,
                "image_size": (48, 80),
            }
            | more
        )
    )


def task_of(spec, channels=3, **corruption):
    torch.manual_seed(0)
    backbone = build_backbone(spec, channels, seed=0)
    task = MaskedPatchPrediction(backbone, RandomMasking(), Corruption(**corruption), MeanColor(bits=2))
    with torch.no_grad():  # zero-initialised or constant parts would hide a missing term
        for parameter in task.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return task


def batch_of(backbone, count=3):
    images = torch.randint(0, 256, (count, backbone.channels, *backbone.image_size), dtype=torch.uint8)
    return {"image": images, "id": torch.arange(count), "epoch": torch.zeros(count, dtype=torch.int64)}


def loss_and_gradients(task, batch, plain):
    task.plain = plain
    task.zero_grad()
    loss = task(batch)["loss"]
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in task.named_parameters()}


@pytest.mark.parametrize(
    "spec",
    [
        small(),
        small(class_token=False),
        small(register_tokens=2),
        small(pixel_mean=(0.4, 0.5, 0.6), pixel_std=(0.2, 0.25, 0.3)),
        Timm(
            name="deit3_small_patch16_224",
            image_size=32,
            arguments={"depth": 2, "embed_dim": 48, "num_heads": 3},
        ),
        Timm(
            name="vit_small_patch16_224",
            image_size=32,
            arguments={"depth": 2, "embed_dim": 48, "num_heads": 3, "qk_norm": True, "init_values": 0.5},
        ),
        Timm(
            name="vit_base_patch16_clip_224",
            image_size=32,
            arguments={"depth": 2, "embed_dim": 48, "num_heads": 3},
        ),
    ],
    ids=lambda spec: f"{spec}"[:60],
)
@pytest.mark.parametrize("pool", ["image", "batch"])
def test_the_short_way_equals_the_general_one(spec, pool):
    task = task_of(spec, pool=pool)
    assert task.backbone.is_plain
    batch = batch_of(task.backbone)
    loss, gradients = loss_and_gradients(task, batch, plain=True)
    expected, expected_gradients = loss_and_gradients(task, batch, plain=False)
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected_gradients[name], rtol=1e-3, atol=2e-4), name


def test_unfused_attention_gives_the_same():
    task = task_of(small())
    batch = batch_of(task.backbone)
    fused, _ = loss_and_gradients(task, batch, plain=True)
    for block in task.backbone.model.blocks:
        block.attn.fused_attn = False
    assert loss_and_gradients(task, batch, plain=True)[0] == pytest.approx(fused, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("eva02_tiny_patch14_224", {"depth": 2}),
        ("beit_base_patch16_224", {"depth": 2, "embed_dim": 48, "num_heads": 3}),
        ("cait_xxs24_224", {"depth": 2}),
        ("vit_small_patch16_dinov3", {"depth": 2, "embed_dim": 64, "num_heads": 2}),
        ("vit_small_patch16_rope_224", {"depth": 2, "embed_dim": 64, "num_heads": 2}),
        ("vit_tiny_r_s16_p8_224", {"depth": 2}),
        ("flexivit_small", {"depth": 2}),
    ],
)
def test_families_of_timm_train_every_parameter(name, arguments):
    size = 56 if "patch14" in name else 64
    task = task_of(Timm(name=name, image_size=size, arguments=arguments))
    backbone = task.backbone
    assert backbone.grid[0] * backbone.patch_size[0] == size
    batch = batch_of(backbone, 2)
    _, gradients = loss_and_gradients(task, batch, plain=True)
    assert all(g.isfinite().all() for g in gradients.values())
    assert gradients["mask_token"].abs().sum() > 0
    assert backbone.features(batch["image"])["mean", -1].shape == (2, backbone.embed_dim)


@pytest.mark.parametrize(
    ("name", "arguments", "pool"),
    [
        ("eva02_tiny_patch14_224", {"depth": 1}, "mean"),
        ("beit_base_patch16_224", {"depth": 1, "embed_dim": 48, "num_heads": 3}, "mean"),
        ("deit3_small_patch16_224", {"depth": 1, "embed_dim": 48, "num_heads": 3}, "mean"),
        ("vit_tiny_r_s16_p8_224", {"depth": 1}, "mean"),
        ("vit_small_patch16_rope_224", {"depth": 1, "embed_dim": 64, "num_heads": 2}, "mean"),
        ("flexivit_small", {"depth": 1}, "mean"),
    ],
)
def test_exports_open_in_timm_with_features_pooled_over_patches(tmp_path, name, arguments, pool):
    import json

    from safetensors.torch import save_file

    from mpp.weights import timm_config

    backbone = build_backbone(Timm(name=name, image_size=56 if "patch14" in name else 64, arguments=arguments), 3, 0)
    (tmp_path / "config.json").write_text(json.dumps(timm_config(backbone)))
    save_file({k: v.contiguous() for k, v in backbone.model.state_dict().items()}, tmp_path / "model.safetensors")
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = batch_of(backbone, 2)["image"]
    with torch.no_grad():
        ours = backbone.eval().features(images, (pool,))[pool, -1]
        assert torch.allclose(model(backbone.normalize(images)), ours, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Timm(name="vit_tiny_patch16_224", image_size=230), "does not divide the image size 230x230"),
        (Timm(name="vit_tiny_patch16_224", image_size=32, arguments={"patch_drop_rate": 0.5}), "PatchDropout"),
        (Timm(name="xcit_nano_12_p16_224", image_size=32), "BatchNorm"),
        (Timm(name="vit_tiny_patch16_224", arguments={"no_such": 1}), "no_such"),
    ],
)
def test_what_cannot_work_is_refused_when_the_model_is_made(spec, message):
    with pytest.raises(ValueError, match=message):
        build_backbone(spec, 3, seed=0)


def test_arguments_that_other_fields_set_are_faults():
    spec = Timm(name="vit_tiny_patch16_224", arguments={"global_pool": "avg", "img_size": 32})
    assert [path for path, _ in spec.faults()] == ["arguments.global_pool", "arguments.img_size"]


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "resnet18", "naflexvit_base_patch16_gap"])
def test_models_without_one_token_per_patch_are_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        build_backbone(Timm(name=name), 3, seed=0)


def test_an_unknown_model_is_a_fault_of_the_recipe():
    assert next(Timm(name="vit_smal_patch16_224").faults())[0] == "name"
    assert not list(Timm(name="vit_small_patch16_224").faults())


def test_features_leave_no_trace_of_corruption_and_layers_are_counted_from_both_ends():
    task = task_of(small())
    backbone, images = task.backbone.eval(), batch_of(task.backbone)["image"]
    before = backbone.features(images)["mean", -1]
    task.plain = False
    task(batch_of(backbone))
    outputs = backbone.features(images, ("mean", "cls"), (0, -1, 2))
    assert torch.equal(outputs["mean", -1], before)
    assert torch.equal(outputs["mean", 2], outputs["mean", -1])
    assert not torch.allclose(outputs["mean", 0], outputs["mean", -1])
    tokens = backbone.model.forward_features(backbone.normalize(images))
    assert torch.allclose(outputs["cls", -1], tokens[:, 0], atol=1e-6)
    assert torch.allclose(outputs["mean", -1], tokens[:, 1:].mean(1), atol=1e-6)


def test_asking_for_what_is_not_there_is_refused():
    backbone = build_backbone(small(class_token=False), 3, seed=0)
    images = batch_of(backbone)["image"]
    with pytest.raises(ValueError, match="class token"):
        backbone.features(images, ("cls",))
    with pytest.raises(ValueError, match="expected -3 .. 2"):
        backbone.features(images, ("mean",), (3,))
    with pytest.raises(ValueError, match="2 values for 3 channels"):
        build_backbone(small(pixel_mean=(0.5, 0.5)), 3, seed=0)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pixels_are_normalised_per_channel(channels):
    mean = tuple(0.1 * (c + 1) for c in range(channels))
    backbone = build_backbone(small(pixel_mean=mean, pixel_std=0.25), channels, seed=0)
    images = batch_of(backbone)["image"]
    expected = (images.float() / 255 - torch.tensor(mean)[:, None, None]) / 0.25
    assert torch.allclose(backbone.normalize(images), expected, atol=1e-5)


def test_weights_are_a_function_of_the_seed_and_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    a, b, c = (build_backbone(small(), 3, seed=s).model.state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert any(not torch.equal(a[k], c[k]) for k in a)


def test_sizes_are_those_of_the_paper():
    names = {"tiny": "vit_tiny_patch16_224", "small": "vit_small_patch16_224", "base": "vit_base_patch16_224"}
    for size, name in names.items():
        with torch.device("meta"):
            theirs = timm.create_model(name, num_classes=0, global_pool="").state_dict()
        arguments = ViT(size=size).architecture(3)
        with torch.device("meta"):
            ours = timm.create_model(arguments[0], num_classes=0, global_pool="", **arguments[1]).state_dict()
        assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}


def test_the_paper_s_initialisation_is_xavier():
    """Xavier uniform: the bound is sqrt(6 / (in + out)); timm's own is a normal of 0.02."""
    weights = {
        kind: build_backbone(small(weight_init=kind), 3, 0).model.blocks[0].mlp.fc1.weight for kind in ("jax", "timm")
    }
    bound = (6 / (32 + 128)) ** 0.5
    assert weights["jax"].abs().max() <= bound and weights["jax"].std().item() == pytest.approx(
        bound / 3**0.5, rel=0.05
    )
    assert weights["timm"].std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("name", ["vit_relpos_small_patch16_224", "vit_relpos_base_patch16_clsgap_224"])
def test_the_final_norm_sits_on_the_tokens_also_where_timm_puts_it_behind_the_pooling(name):
    spec = Timm(name=name, image_size=64, arguments={"depth": 1, "embed_dim": 24, "num_heads": 2})
    backbone = build_backbone(spec, 3, 0)
    tokens = backbone.model.forward_features(torch.randn(2, 3, 64, 64))[:, backbone.num_prefix_tokens :]
    assert torch.allclose(tokens.mean(-1), torch.zeros(()), atol=1e-5)
    assert torch.allclose(tokens.std(-1, correction=0), torch.ones(()), atol=1e-2)


def test_parameters_that_no_token_depends_on_are_refused_by_name(monkeypatch):
    import timm

    made = timm.create_model

    def with_a_spare(*args, **more):
        model = made(*args, **more)
        model.spare = torch.nn.Linear(2, 2)
        return model

    monkeypatch.setattr(timm, "create_model", with_a_spare)
    spec = Timm(name="eva02_tiny_patch14_224", image_size=56, arguments={"depth": 1, "embed_dim": 24, "num_heads": 2})
    with pytest.raises(ValueError, match=r"spare\.weight"):
        build_backbone(spec, 3, 0)


def test_models_that_fail_at_this_size_are_refused_by_name():
    with pytest.raises(ValueError, match="hiera_tiny_224"):
        build_backbone(Timm(name="hiera_tiny_224", image_size=64), 3, 0)


@pytest.mark.parametrize("argument", ["checkpoint_path", "pretrained_cfg", "features_only"])
def test_arguments_that_read_other_weights_are_refused(argument):
    spec = Timm(name="vit_tiny_patch16_224", arguments={argument: "x"})
    assert [field for field, _ in spec.faults()] == [f"arguments.{argument}"]


def test_bf16_embeds_as_well_by_the_short_way_as_by_the_general_one():
    """Filters with a mean and pixel statistics off the middle: folded in, they would cancel in half precision."""
    from mpp.plain_vit import embed

    torch.manual_seed(0)
    projection = torch.nn.Conv2d(3, 64, 8, 8)
    projection.weight.data += 0.02
    images = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8)
    mean, std = torch.tensor([0.48, 0.46, 0.41]), torch.tensor([0.22, 0.22, 0.22])
    pixels = images.permute(0, 2, 3, 1).flatten(1)[:, None]
    normal = (images / 255 - mean[:, None, None]) / std[:, None, None]
    exact = projection(normal).flatten(1)
    with torch.autocast("cpu", torch.bfloat16):
        short, general = embed(projection, pixels, mean, std)[:, 0], projection(normal).flatten(1)
    assert torch.allclose(embed(projection, pixels, mean, std)[:, 0], exact, atol=1e-4)
    error = lambda values: (values.float() - exact).abs().mean()  # noqa: E731
    assert error(short) < 1.5 * error(general)
