"""Learning rates as functions of the step; which parameters decay, how fast each layer learns; every optimiser."""

import copy
import json
import math
from dataclasses import dataclass, field, replace

import pytest
import timm.optim
import torch
from torch import nn

from mpp.architectures import Timm, ViT
from mpp.backbones import build_backbone
from mpp.config import RecipeError, dump_recipe, load_recipe
from mpp.masking import Corruption, RandomMasking
from mpp.optim import SGD, AdamW, Extend, LearningRate, Optim, TimmOptimizer, parameter_groups
from mpp.optimizer_state import load_optimizer_state, optimizer_state
from mpp.targets import MeanColor
from mpp.tasks import MaskedPatchPrediction


def test_warm_up_rises_to_the_peak_and_cosine_falls_to_zero():
    lr = LearningRate(AdamW(lr=1.0, warmup_steps=10), 110)
    assert [lr(0), lr(4), lr(9), lr(10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert lr(60) == pytest.approx(0.5) and lr(35) == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))
    assert 0 < lr(109) < 1e-3 and lr(110) == 0


def test_linear_and_constant():
    linear = LearningRate(AdamW(lr=1.0, schedule="linear", final_lr=0.2), 100)
    assert [linear(0), linear(50), linear(100)] == pytest.approx([1.0, 0.6, 0.2])
    constant = LearningRate(AdamW(lr=1.0, schedule="constant", warmup_steps=2), 100)
    assert [constant(0), constant(1), constant(99)] == [0.5, 1.0, 1.0]


def test_extensions_follow_each_other():
    lr = LearningRate(AdamW(lr=1.0), 10, (Extend(steps=5), Extend(steps=4, schedule="linear", lr=0.5)))
    assert lr.total_steps == 19
    assert [lr(9), lr(10), lr(14), lr(15), lr(17)] == pytest.approx(
        [LearningRate(AdamW(lr=1.0), 10)(9), 1, 1, 0.5, 0.25]
    )


def test_biases_norms_positions_and_tokens_do_not_decay_and_every_parameter_is_covered_once():
    spec = ViT(size="tiny", embed_dim=32, depth=2, num_heads=2, patch_size=8, image_size=32, register_tokens=1)
    task = MaskedPatchPrediction(build_backbone(spec, 3, 0), RandomMasking(), Corruption(), MeanColor())
    groups = parameter_groups(task, 0.05)
    assert [(group.weight_decay, group.lr_scale) for group in groups] == [(0.05, 1.0), (0.0, 1.0)]
    decayed, rest = groups[0].parameters, groups[1].parameters
    assert sorted([*decayed, *rest]) == sorted(name for name, _ in task.named_parameters())
    assert all(name.endswith("weight") and p.ndim >= 2 for name, p in decayed.items())
    assert {
        "mask_token",
        "backbone.model.pos_embed",
        "backbone.model.cls_token",
        "backbone.model.reg_token",
    } <= set(rest)
    assert "head.weight" in decayed and "backbone.model.patch_embed.proj.weight" in decayed and "head.bias" in rest


def test_decay_is_decoupled():
    """With zero gradients Adam's moments stay zero, so that only lr * decay shrinks the weights."""
    layer = torch.nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    optimizer, names = AdamW(lr=0.1, weight_decay=0.5).build(layer)
    assert names == ["weight", "bias"]
    layer(torch.zeros(1, 3)).sum().mul(0).backward()
    optimizer.step()
    assert torch.allclose(layer.weight, before * (1 - 0.1 * 0.5))


TINY = {"depth": 2, "embed_dim": 48, "num_heads": 3}
# What begins with which name is how many layers below the head, by hand: two blocks, the embedding below them.
SHARED = {
    "mask_token": 0,
    "head.": 0,
    "backbone.model.norm.": 0,
    "backbone.model.blocks.1.": 1,
    "backbone.model.blocks.0.": 2,
    "backbone.model.patch_embed.": 3,
    "backbone.model.cls_token": 3,
}
POSITIONS = {"backbone.model.pos_embed": 3}
REGISTERS = {"backbone.model.reg_token": 3}
BELOW = {
    "vit": (
        ViT(size="tiny", depth=2, embed_dim=48, num_heads=3, patch_size=16, image_size=32, register_tokens=2),
        SHARED | POSITIONS | REGISTERS,
    ),
    "deit3": (
        Timm(name="deit3_small_patch16_224", image_size=32, arguments=TINY | {"reg_tokens": 1}),
        SHARED | POSITIONS | REGISTERS,
    ),
    "eva02": (Timm(name="eva02_tiny_patch14_224", image_size=28, arguments=TINY), SHARED | POSITIONS),
    "beit": (Timm(name="beit_base_patch16_224", image_size=32, arguments=TINY), SHARED),  # positions in the blocks
    "rope_mixed": (
        Timm(name="vit_small_patch16_rope_mixed_224", image_size=32, arguments=TINY),
        SHARED | {"backbone.model.rope.freqs": 3},
    ),
    "clip": (
        Timm(name="vit_base_patch16_clip_224", image_size=32, arguments=TINY),
        SHARED | POSITIONS | {"backbone.model.norm_pre.": 3},
    ),
}


def task_of(spec: ViT | Timm) -> MaskedPatchPrediction:
    return MaskedPatchPrediction(build_backbone(spec, 3, 0), RandomMasking(), Corruption(), MeanColor())


@pytest.mark.parametrize("family", BELOW)
def test_each_layer_learns_at_half_the_rate_of_the_one_above_it(family):
    spec, below = BELOW[family]
    task = task_of(spec)
    groups = parameter_groups(task, 0.05, layer_decay=0.5)
    scales = {name: group.lr_scale for group in groups for name in group.parameters}
    assert sum(len(group.parameters) for group in groups) == len(scales) == len(list(task.parameters()))
    found = {name: [n for start, n in below.items() if name.startswith(start)] for name in scales}
    assert scales == {name: 0.5**n for name, (n,) in found.items()}
    assert all(any(name.startswith(start) for name in scales) for start in below)


@pytest.mark.parametrize("family", BELOW)
def test_layer_decay_does_not_change_what_decays(family):
    task = task_of(BELOW[family][0])
    plain, layered = (
        {n: g.weight_decay for g in parameter_groups(task, 0.05, d) for n in g.parameters} for d in (None, 0.7)
    )
    assert plain == layered and set(plain.values()) == {0.0, 0.05}


def test_scales_are_those_of_timm_but_for_the_final_norm():
    """timm counts the final norm to the last block; BEiT and MAE, and we, to the head."""
    task = nn.Module()
    task.backbone = nn.Module()
    task.backbone.model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=5)
    theirs = {
        id(p): g["lr_scale"]
        for g in timm.optim.param_groups_layer_decay(task.backbone.model, layer_decay=0.65)
        for p in g["params"]
    }
    for group in parameter_groups(task, 0.05, 0.65):
        for name, parameter in group.parameters.items():
            above = 0.65 if ".model.norm." in name else 1.0
            assert group.lr_scale * above == pytest.approx(theirs[id(parameter)])


def test_groups_run_from_the_embedding_to_the_head_and_reach_the_optimiser():
    task = task_of(BELOW["vit"][0])
    optimizer, names = AdamW(layer_decay=0.5, weight_decay=0.1).build(task)
    assert [(g["lr_scale"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (scale, decay) for scale in (0.125, 0.25, 0.5, 1.0) for decay in (0.1, 0.0)
    ]
    own = dict(task.named_parameters())
    assert [id(own[name]) for name in names] == [id(p) for g in optimizer.param_groups for p in g["params"]]


def test_frozen_parameters_are_in_no_group_and_move_no_other():
    task = task_of(BELOW["vit"][0])
    before = {n: g.lr_scale for g in parameter_groups(task, 0.0, 0.5) for n in g.parameters}
    frozen = {name for name in before if ".blocks.1." in name or "patch_embed" in name}
    for name in frozen:
        task.get_parameter(name).requires_grad_(False)
    after = {n: g.lr_scale for g in parameter_groups(task, 0.0, 0.5) for n in g.parameters}
    assert after == {name: scale for name, scale in before.items() if name not in frozen}
    task.requires_grad_(False)
    with pytest.raises(ValueError, match="every parameter is frozen"):
        parameter_groups(task, 0.0)


def test_layers_that_cannot_be_told_are_refused():
    with pytest.raises(ValueError, match=r"optim\.layer_decay: cannot tell the layers of backbone\.model.*null"):
        AdamW(layer_decay=0.5).build(nn.Linear(2, 2))
    task = nn.Module()
    task.backbone = nn.Module()
    task.backbone.model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Linear has no group_matcher"):
        parameter_groups(task, 0.0, 0.5)
    task.backbone.model = timm.create_model("resnet18")
    with pytest.raises(ValueError, match=r"the blocks of ResNet into the layers \[\]"):
        parameter_groups(task, 0.0, 0.5)


def test_layer_decay_one_is_none():
    task = task_of(BELOW["vit"][0])
    assert [g.parameters.keys() for g in parameter_groups(task, 0.1, 1.0)] == [
        g.parameters.keys() for g in parameter_groups(task, 0.1)
    ]


def small(seed: int = 0) -> nn.Module:
    """A convolution, matrices, vectors and a layer that never gets a gradient."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 2), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 3), nn.Linear(5, 5))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        images = torch.randn(6, 1, 3, 3, generator=torch.Generator().manual_seed(step))
        net[:-1](images).square().sum().backward()
        optimizer.step()


def values(net: nn.Module, optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, torch.Tensor]:
    return {**net.state_dict(), **optimizer_state(optimizer, names)[0]}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture
def garbage():
    """Memory that nobody wrote to holds NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "spec", [AdamW(weight_decay=0.1), SGD(weight_decay=0.1), SGD(nesterov=True), SGD(momentum=0.0)]
)
@pytest.mark.parametrize("skipped", [0, 2])
def test_an_update_with_found_inf_is_as_if_it_had_never_been(spec, skipped, garbage):
    """The first one above all: torch's fused SGD would keep uninitialised memory as momentum."""
    assert spec.heeds_found_inf
    net, twin = small(), small()
    (optimizer, names), (other, _) = spec.build(net), spec.build(twin)
    for step in range(4):
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(step == skipped)), None
        before = copy.deepcopy(net.state_dict())
        if step == skipped:
            for parameter in net[:-1].parameters():
                parameter.grad = torch.full_like(parameter, float("nan"))
            optimizer.step()
            assert_same(net.state_dict(), before)
        else:
            train(net, optimizer, range(step, step + 1))
            train(twin, other, range(step, step + 1))
            assert not torch.equal(net[3].weight, before["3.weight"])
    assert_same(values(net, optimizer, names), values(twin, other, names))


def test_timm_optimisers_do_not_heed_found_inf():
    net = small()
    optimizer, _ = TimmOptimizer(name="lamb", lr=0.1).build(net)
    optimizer.found_inf, before = torch.ones(()), net[3].weight.detach().clone()
    train(net, optimizer, range(1))
    assert not TimmOptimizer.heeds_found_inf and not torch.equal(net[3].weight, before)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_the_textbook_recursion_with_coupled_decay(nesterov):
    layer, lr, momentum, decay = nn.Linear(1, 1, bias=False), 0.1, 0.9, 0.01
    optimizer, _ = SGD(lr=lr, momentum=momentum, weight_decay=decay, nesterov=nesterov).build(layer)
    weight, velocity = layer.weight.item(), 0.0
    for gradient in (1.0, -2.0, 0.5):
        layer.weight.grad = torch.tensor([[gradient]])
        optimizer.step()
        total = gradient + decay * weight
        velocity = momentum * velocity + total
        weight -= lr * (total + momentum * velocity if nesterov else velocity)
        assert layer.weight.item() == pytest.approx(weight, rel=1e-6)


@pytest.mark.parametrize(
    "spec, expected",
    [
        (AdamW(lr=0.3, betas=(0.8, 0.9), eps=1e-3), {"lr": 0.3, "betas": (0.8, 0.9), "eps": 1e-3, "fused": True}),
        (SGD(lr=0.3, momentum=0.8, nesterov=True), {"lr": 0.3, "momentum": 0.8, "nesterov": True, "fused": True}),
        (SGD(), {"momentum": 0.9, "nesterov": False, "dampening": 0}),
        (TimmOptimizer(name="lars", lr=0.3, arguments={"trust_coeff": 0.01}), {"lr": 0.3, "trust_coeff": 0.01}),
    ],
)
def test_what_a_section_says_reaches_the_optimiser(spec, expected):
    optimizer, _ = spec.build(small())
    assert all({key: group[key] for key in expected} == expected for group in optimizer.param_groups)


SPECS = [
    AdamW(lr=1e-3, layer_decay=0.75, betas=(0.9, 0.95)),
    SGD(lr=0.03, weight_decay=1e-4, warmup_steps=5),
    TimmOptimizer(name="lamb", lr=5e-3, weight_decay=0.05, arguments={"betas": [0.9, 0.98], "trust_clip": True}),
]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    optim: Optim = field(default_factory=AdamW)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_a_recipe_holds_every_kind(spec, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(Recipe(optim=spec)))
    loaded = load_recipe(Recipe, [str(path)]).optim
    assert loaded == spec
    assert (
        loaded.settings
        == {
            "adamw": "betas 0.9 0.95",
            "sgd": "momentum 0.9",
            "timm": "lamb, betas [0.9, 0.98], trust_clip True",
        }[spec.kind]
    )


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_resuming_changes_nothing(spec):
    spec, whole, net = replace(spec, layer_decay=None), small(), small()
    (optimizer, names), (other, _) = spec.build(net), spec.build(whole)
    train(whole, other, range(4))
    train(net, optimizer, range(2))
    tensors, document = copy.deepcopy(optimizer_state(optimizer, names))
    resumed, _ = spec.build(net)
    load_optimizer_state(resumed, names, tensors, json.loads(json.dumps(document)))
    train(net, resumed, range(2, 4))
    assert_same(values(net, resumed, names), values(whole, other, names))


def test_a_state_from_before_there_were_scales_can_be_resumed():
    net = small()
    optimizer, names = AdamW().build(net)
    train(net, optimizer, range(1))
    tensors, document = copy.deepcopy(optimizer_state(optimizer, names))
    for group in document["groups"]:
        assert group["values"].pop("lr_scale") == 1.0
    resumed, _ = AdamW().build(net)
    load_optimizer_state(resumed, names, tensors, document)
    assert [group["lr_scale"] for group in resumed.param_groups] == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'")
def test_every_optimiser_of_timm_trains_and_can_be_stored_or_is_refused():
    """On a convolution, matrices and vectors; the state is put back to go on to the same bits."""
    refused = set()
    for name in timm.optim.list_optimizers(exclude_filters=["bnb*", "fused*"]):
        spec = TimmOptimizer(name=name, lr=1e-3, weight_decay=0.01)
        if list(spec.faults()):
            refused.add(name)
            continue
        net = small()
        optimizer, names = spec.build(net)
        before = net[3].weight.detach().clone()
        train(net, optimizer, range(2))
        assert net[3].weight.isfinite().all() and not torch.equal(net[3].weight, before), name
        twin = copy.deepcopy(net)
        resumed, _ = spec.build(twin)
        load_optimizer_state(resumed, names, *copy.deepcopy(optimizer_state(optimizer, names)))
        train(net, optimizer, range(2, 3))
        train(twin, resumed, range(2, 3))
        assert_same(net.state_dict(), twin.state_dict())
    assert refused == {"adahessian", "kron", "kronc", "kronw"}


@pytest.mark.parametrize(
    "name, arguments", [("sgd", {}), ("momentum", {}), ("lars", {}), ("lamb", {"betas": (0.8, 0.9)})]
)
def test_timm_makes_the_same_optimiser(name, arguments):
    net, twin = small(), small()
    ours, names = TimmOptimizer(name=name, lr=0.1, weight_decay=0.2, arguments=arguments).build(net)
    groups = [group.entries() for group in parameter_groups(twin, 0.2)]
    theirs = timm.optim.create_optimizer_v2(groups, name, lr=0.1, **arguments)
    train(net, ours, range(3))
    train(twin, theirs, range(3))
    assert_same(values(net, ours, names), values(twin, theirs, names))


@pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'")
@pytest.mark.parametrize(
    "words, message",
    [
        ("{kind: timm, lr: 1, name: lamp}", "optim.name: timm has no optimiser 'lamp'; the nearest that it has: lamb"),
        ("{kind: timm, lr: 1, name: adahessian}", "optim.name: timm's adahessian needs second derivatives"),
        ("{kind: timm, lr: 1, name: kron}", "optim.name: timm's kron does not work here: .*keeps more than"),
        ("{kind: timm, lr: 1, name: lion, arguments: {eps: 1}}", "optim.arguments: .*keyword argument 'eps'"),
        ("{kind: timm, lr: 1, name: lars, arguments: {betas: [1, 1]}}", "optim.arguments: .*argument 'betas'"),
        ("{kind: timm, lr: 1, name: lion, arguments: {momentum: 1}}", "optim.arguments: .*argument 'momentum'"),
        (
            "{kind: timm, lr: 1, name: lamb, arguments: {betas: [2, 2]}}",
            "optim.arguments: timm's lamb with .* not work",
        ),
        ("{kind: timm, lr: 1, name: lamb, arguments: {lr: 1}}", "optim.arguments.lr: is set by other fields"),
        ("{kind: timm, name: lamb}", "optim.lr: missing"),
        ("{kind: sgd, momentum: 0, nesterov: true}", "optim.nesterov: looks ahead"),
        ("{kind: sgd, layer_decay: 1.5}", "optim.layer_decay: expected number > 0 and <= 1 | null, got 1.5"),
        ("{kind: adamw, momentum: 0.9}", "optim.momentum: unknown name"),
    ],
)
def test_what_an_optimiser_cannot_do_is_told_with_the_recipe(words, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(Recipe, [f"--optim={words}"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="timm asks for CUDA first, which is here")
@pytest.mark.parametrize("name, package", [("fusedlamb", "apex"), ("bnblion8bit", "bitsandbytes")])
def test_optimisers_of_packages_that_are_not_here_load_but_do_not_build(name, package):
    """A recipe is read on machines that do not train, too."""
    spec = TimmOptimizer(name=name, lr=1e-3)
    assert list(spec.faults()) == []
    with pytest.raises(ValueError, match=f"optim.name: timm's {name}: .*needs a GPU and the package {package}"):
        spec.build(small())


def test_checking_a_recipe_draws_nothing():
    before = torch.get_rng_state()
    assert list(TimmOptimizer(name="muon", lr=1e-3).faults()) == []
    assert torch.equal(torch.get_rng_state(), before)


def test_what_timm_spares_from_decay_does_not_decay():
    """Learned rotary frequencies are positions, and matrices by their shape."""
    from mpp.architectures import Timm

    spec = Timm(
        name="vit_small_patch16_rope_mixed_224", image_size=64, arguments={"depth": 1, "embed_dim": 48, "num_heads": 2}
    )
    task = MaskedPatchPrediction(build_backbone(spec, 3, 0), RandomMasking(), Corruption(), MeanColor())
    decayed = [name for group in parameter_groups(task, 0.05) if group.weight_decay for name in group.parameters]
    assert any("rope" in name for name, _ in task.named_parameters()) and not any("rope" in name for name in decayed)
