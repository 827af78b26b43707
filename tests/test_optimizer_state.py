"""An optimizer goes on from its stored state as if it had never stopped, and takes no other's state."""

import copy

import pytest
import timm.optim
import torch
from torch import nn

from mpp.checkpoint import load_optimizer_state, newest, optimizer_state, parameter_names, save


def network() -> nn.Module:
    """Vectors, matrices, a convolution in another memory order, a tied, a frozen and an unused parameter."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 16))
    net.append(nn.Unflatten(1, (4, 2, 2))).append(nn.Conv2d(4, 3, 2).to(memory_format=torch.channels_last))
    net.append(nn.Linear(2, 2))
    net[3].weight = net[0].weight = nn.Parameter(torch.randn(8, 8))
    net[4].bias.requires_grad_(False)
    return net


def groups(net: nn.Module) -> list[dict]:
    """Two groups with different weight decay, so that the optimizer's order is not the module's."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "lr_scale": 0.5},
    ]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        optimizer.zero_grad()
        net[:-1](torch.randn(5, 8, generator=generator)).square().sum().backward()
        optimizer.step()


def timms(name: str, **options):
    return lambda groups: timm.optim.create_optimizer_v2(groups, opt=name, lr=1e-2, **options)


OPTIMIZERS = {
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True),
    "adamw loop": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=False, foreach=False),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True, amsgrad=True),
    "adam, tensor lr": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(1e-2), fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "sgd momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "timm lamb": timms("lamb"),  # counts its steps in the groups, in tensors
    "timm lion": timms("lion"),
    "timm adan": timms("adan"),  # counts its steps in the groups, in ints
    "timm adabelief": timms("adabelief"),  # counts its steps in the state, in ints
    "timm adafactorbv": timms("adafactorbv"),  # factored state; a dtype among the hyperparameters
    "timm lookahead": timms("lookahead_radam"),
}


def stored(tmp_path, net, optimizer):
    """(weights, optimizer tensors, optimizer document) by way of the disk."""
    tensors, document = optimizer_state(optimizer, parameter_names(optimizer, net))
    files = {"model.safetensors": net.state_dict(), "state/optimizer.safetensors": tensors}
    save(tmp_path, 3, files, {"state/optimizer.json": document}, {})
    checkpoint, _ = newest(tmp_path)
    assert checkpoint is not None
    return *(checkpoint.tensors(name) for name in files), checkpoint.document("state/optimizer.json")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resuming_changes_nothing(tmp_path, kind):
    twin, net, fresh = network(), network(), network()
    train(twin, optimizer := OPTIMIZERS[kind](groups(twin)), range(6))
    train(net, interrupted := OPTIMIZERS[kind](groups(net)), range(3))
    weights, tensors, document = stored(tmp_path, net, interrupted)
    fresh.load_state_dict(weights)
    resumed = OPTIMIZERS[kind](groups(fresh))
    load_optimizer_state(resumed, parameter_names(resumed, fresh), tensors, document)
    train(fresh, resumed, range(3, 6))
    for name, value in twin.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name]), name
    ours, theirs = (optimizer_state(o, parameter_names(o, n)) for o, n in [(optimizer, twin), (resumed, fresh)])
    assert ours[1] == theirs[1] and ours[0].keys() == theirs[0].keys()
    assert all(torch.equal(tensor, theirs[0][name]) for name, tensor in ours[0].items())
    assert not torch.equal(fresh[0].weight, weights["0.weight"])


def trained(kind: str = "adamw fused"):
    net = network()
    optimizer = OPTIMIZERS[kind](groups(net))
    train(net, optimizer, range(2))
    return net, optimizer, parameter_names(optimizer, net)


def test_state_goes_by_the_names_of_parameters():
    net, optimizer, names = trained()
    expected = [
        "0.weight",
        "4.weight",
        "6.weight",
        "7.weight",
    ]  # the tied one has its first name, the frozen none
    expected += ["0.bias", "1.weight", "1.bias", "3.bias", "6.bias", "7.bias"]
    assert names == expected
    tensors, document = optimizer_state(optimizer, names)
    used = [name for name in expected if not name.startswith("7.")]  # the unused layer never had a gradient
    assert tensors.keys() == {f"{n}.{key}" for n in used for key in ("exp_avg", "exp_avg_sq", "step")}
    assert tensors["1.weight.exp_avg"] is not None
    assert torch.equal(tensors["1.weight.exp_avg"], optimizer.state[net[1].weight]["exp_avg"])
    assert document["optimizer"] == "AdamW" and document["groups"][1]["values"]["weight_decay"] == 0.0
    assert document["groups"][0]["names"] == expected[:4]
    assert document["parameters"]["7.bias"] == {"shape": [2], "values": {}, "tensors": {}}


@pytest.mark.parametrize("stored_fused, fused", [(True, False), (False, True)])
def test_how_it_is_computed_is_not_taken_from_the_checkpoint(stored_fused, fused):
    net, optimizer, names = trained("adamw fused" if stored_fused else "adamw loop")
    other = torch.optim.AdamW(groups(net), lr=7.0, fused=fused)
    load_optimizer_state(other, names, *optimizer_state(optimizer, names))
    assert [group["fused"] for group in other.param_groups] == [fused] * 2
    assert other.param_groups[0]["lr"] == 0.005 and other.param_groups[1]["lr_scale"] == 0.5
    assert type(other.param_groups[0]["betas"]) is tuple
    train(net, other, range(2, 3))


def test_loaded_state_has_the_memory_order_of_its_parameter():
    """torch's fused kernels would silently pair a parameter's elements with other elements' moments."""
    net, optimizer, names = trained()
    tensors, document = optimizer_state(optimizer, names)
    assert not net[6].weight.is_contiguous()
    load_optimizer_state(optimizer, names, {k: v.contiguous() for k, v in tensors.items()}, document)
    assert optimizer.state[net[6].weight]["exp_avg"].stride() == net[6].weight.stride()


def test_state_keeps_its_own_precision_and_is_a_copy():
    net = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[net.weight]["momentum_buffer"] = torch.full((3, 3), 1 + 2**-20)
    tensors, document = optimizer_state(optimizer, ["weight", "bias"])
    load_optimizer_state(optimizer, ["weight", "bias"], tensors, document)
    loaded = optimizer.state[net.weight]["momentum_buffer"]
    assert loaded.dtype == torch.float32 and torch.equal(loaded, tensors["weight.momentum_buffer"])
    assert loaded.data_ptr() != tensors["weight.momentum_buffer"].data_ptr()


def renamed(names, tensors, document):
    return ["x" + name if name == "0.bias" else name for name in names], tensors, document


def swapped_groups(names, tensors, document):
    return names[1:2] + names[:1] + names[2:], tensors, document


def with_tensor(name, tensor):
    return lambda names, tensors, document: (names, {**tensors, name: tensor}, document)


def without_tensor(names, tensors, document):
    return names, {k: v for k, v in tensors.items() if k != "0.bias.exp_avg"}, document


def reshaped(names, tensors, document):
    document["parameters"]["0.bias"]["shape"] = [4, 2]
    return names, tensors, document


def of_another_kind(names, tensors, document):
    return names, tensors, {**document, "optimizer": "SGD"}


@pytest.mark.parametrize(
    "spoil, message",
    [
        (renamed, "missing in it x0.bias; unexpected in it 0.bias"),
        (swapped_groups, "grouped or ordered otherwise"),
        (with_tensor("9.bias.exp_avg", torch.zeros(8)), "missing none; unexpected 9.bias.exp_avg"),
        (without_tensor, "missing 0.bias.exp_avg; unexpected none"),
        (
            with_tensor("0.bias.exp_avg", torch.zeros(1)),
            "another shape than their document says: 0.bias.exp_avg",
        ),
        (reshaped, r"0.bias is \(8,\) here, \(4, 2\) in the state"),
        (of_another_kind, "a state of SGD, the optimizer is AdamW"),
        (lambda names, *state: (names[1:], *state), "has 10 parameters, but 9 names"),
        (lambda names, *state: (names[:1] * 2 + names[2:], *state), "must differ; twice: 0.weight"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(spoil, message):
    _, optimizer, names = trained()
    names, tensors, document = spoil(names, *copy.deepcopy(optimizer_state(optimizer, names)))
    before = copy.deepcopy(optimizer.state_dict())
    for group in document["groups"]:
        group["values"]["lr"] = 9.0
    with pytest.raises(ValueError, match=message):
        load_optimizer_state(optimizer, names, tensors, document)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][i]["exp_avg"], s["exp_avg"]) for i, s in before["state"].items())


@pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'")
@pytest.mark.parametrize("name", ["kron", "adahessian"])
def test_an_optimizer_with_chance_of_its_own_is_refused(name):
    net = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"keeps more than what goes by parameter: (rng_state|generator)"):
        optimizer_state(timms(name)(net.parameters()), ["weight", "bias"])


def test_state_that_cannot_be_stored_is_refused():
    net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[net.weight]["history"] = [torch.zeros(3)]
    with pytest.raises(ValueError, match=r"weight.history: a list is neither"):
        optimizer_state(optimizer, ["weight", "bias"])
    optimizer.state = {"everyone": torch.zeros(3)}
    with pytest.raises(ValueError, match="keeps state elsewhere than by its parameters"):
        optimizer_state(optimizer, ["weight", "bias"])
    optimizer.state, optimizer.state_dict = {}, lambda: {"state": {0: "of an inner optimizer"}, "param_groups": []}
    with pytest.raises(ValueError, match="keeps state elsewhere than by its parameters"):
        optimizer_state(optimizer, ["weight", "bias"])


def test_an_optimizer_inside_a_wrapper_is_found():
    class Wrapper(torch.optim.SGD):
        def __init__(self, optimizer):
            self.optimizer = optimizer
            self.param_groups, self.state = optimizer.param_groups, optimizer.state

    net, optimizer, names = trained()
    tensors, document = optimizer_state(Wrapper(optimizer), names)
    assert document["optimizer"] == "AdamW"
    other = torch.optim.AdamW(groups(net))
    load_optimizer_state(Wrapper(other), names, tensors, document)
    assert torch.equal(other.state[net[1].bias]["exp_avg"], optimizer.state[net[1].bias]["exp_avg"])


def test_names_that_contradict_the_optimizer_are_refused():
    net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
    assert optimizer_state(optimizer, ["weight", "bias"])[0] == {}
    with pytest.raises(ValueError, match="calls its parameters bias, weight, not"):
        optimizer_state(optimizer, ["bias", "weight"])
    with pytest.raises(ValueError, match="not the module's"):
        parameter_names(optimizer, nn.Linear(3, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fused", [True, False])
def test_state_returns_to_the_device(tmp_path, fused):
    net = network().cuda()
    optimizer = torch.optim.AdamW(groups(net), lr=1e-2, fused=fused)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = copy.deepcopy(optimizer.state[net[0].weight])
    _, tensors, document = stored(tmp_path, net, optimizer)
    load_optimizer_state(optimizer, parameter_names(optimizer, net), tensors, document)
    after = optimizer.state[net[0].weight]
    assert all(torch.equal(after[key], value) and after[key].device == value.device for key, value in before.items())
