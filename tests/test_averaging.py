"""The average follows the weights by its recursion, and leaves them as they are."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mpp.architectures import ViT
from mpp.averaging import Average, WeightAverage, averaged, averaged_names, swapped
from mpp.backbones import build_backbone
from mpp.config import dump_recipe, load_recipe


def network() -> nn.Module:
    """With a frozen layer, a tied weight, buffers that are stored (floats, a count) and one that is not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    net[3].weight = net[2].weight
    net[0].weight.requires_grad_(False)
    net.register_buffer("fixed", torch.ones(2), persistent=False)
    return net


NAMES = ["0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "3.bias", "1.running_mean", "1.running_var"]


@torch.no_grad()
def move(net: nn.Module, step: int) -> None:
    """Changes every averaged tensor, as an update would."""
    generator = torch.Generator().manual_seed(step)
    for tensor in [*net.parameters(), net[1].running_mean, net[1].running_var]:
        if tensor.requires_grad or tensor.ndim == 1:
            tensor += torch.randn(tensor.shape, generator=generator)


def bits(net: nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in net.state_dict().items()}


def test_what_is_averaged():
    assert averaged_names(network()) == NAMES
    backbone = build_backbone(ViT(size="tiny", embed_dim=32, depth=1, num_heads=2, patch_size=8, image_size=16), 3, 0)
    assert averaged_names(backbone) == [name for name, _ in backbone.named_parameters()]  # pixel statistics are not


@pytest.mark.parametrize(
    "spec, factors",
    [
        (Average(decay=0.5), [0.5] * 5),
        (Average(decay=0.999, start=2), [0, 0, 0.999, 0.999, 0.999]),
        (Average(decay=0.3, warmup=True), [2 / 11, 3 / 12, 0.3, 0.3, 0.3]),
        (Average(warmup=True, start=3), [0, 0, 0, 2 / 11, 3 / 12]),
    ],
)
def test_the_average_is_the_recursion(spec, factors):
    net = network()
    average = WeightAverage(net, spec)
    expected = {name: net.state_dict()[name].double().numpy() for name in NAMES}
    for step, factor in enumerate(factors, 1):
        move(net, step)
        average.update(step)
        weights = net.state_dict()
        for name in NAMES:
            expected[name] = factor * expected[name] + (1 - factor) * weights[name].double().numpy()
            assert np.allclose(average.state()[name].numpy(), expected[name], rtol=1e-5, atol=1e-6)
            if not factor:
                assert torch.equal(average.state()[name], weights[name])


def test_it_is_torchs_own_to_the_last_bit():
    """torch.optim.swa_utils copies the module; its first update copies the weights, as ours does up to `start`."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    torchs = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    average = WeightAverage(net, Average(decay=0.9, start=1))
    for step in range(1, 6):
        move(net, step)
        torchs.update_parameters(net)
        average.update(step)
    theirs = torchs.module.state_dict()
    assert len(average.state()) == len(theirs) - 1  # num_batches_tracked is a count
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in average.state().items())


def test_weights_of_less_precision_are_averaged_in_float32():
    """1 + n / 1000 is 1 in bfloat16 until n is about 4: an average kept in it would never move."""
    layer = nn.Linear(2, 2).bfloat16()
    nn.init.ones_(layer.weight)
    average = WeightAverage(layer, Average(decay=0.999))
    nn.init.constant_(layer.weight, 2.0)
    average.update(1)
    assert average.state()["weight"].dtype == torch.float32
    assert average.state()["weight"].tolist() == [[pytest.approx(1.001)] * 2] * 2
    with average.applied():
        assert layer.weight.dtype == torch.bfloat16 and layer.weight.float().tolist() == [[1.0] * 2] * 2


def test_applied_puts_the_average_in_and_the_weights_back_bit_for_bit():
    net = network()
    net[0].bias.data[0], net[2].bias.data[0] = -0.0, float("nan")
    average = WeightAverage(net, Average(decay=0.5))
    move(net, 1)
    net[2].bias.data[0] = float("inf")
    before, held, ids = bits(net), {n: t.clone() for n, t in average.state().items()}, [id(p) for p in net.parameters()]
    with average.applied():
        inside = net.state_dict()
        assert all(inside[name].numpy().tobytes() == tensor.numpy().tobytes() for name, tensor in held.items())
        assert inside["0.weight"].numpy().tobytes() == before["0.weight"] and net[3].weight is net[2].weight
    assert bits(net) == before and [id(p) for p in net.parameters()] == ids
    assert all(average.state()[n].numpy().tobytes() == tensor.numpy().tobytes() for n, tensor in held.items())


def test_an_error_inside_brings_the_weights_back_too():
    net = network()
    average = WeightAverage(net, Average(decay=0.5))
    move(net, 1)
    before = bits(net)
    with pytest.raises(KeyboardInterrupt), average.applied():
        net[2].bias.data.zero_()
        raise KeyboardInterrupt
    assert bits(net) == before
    average.update(1)


def test_other_weights_are_swapped_in_and_out_too():
    """The best weights of a run that stopped early; a name that the module does not have changes nothing."""
    net = network()
    assert list(averaged(net)) == NAMES and averaged(net)["0.bias"] is net[0].bias
    before, best = bits(net), {"0.bias": torch.full((4,), 7.0)}
    with pytest.raises(ZeroDivisionError), swapped(net, best):
        assert bits(net) == before | {"0.bias": best["0.bias"].numpy().tobytes()}
        raise ZeroDivisionError
    with pytest.raises(KeyError), swapped(net, best | {"stranger": torch.ones(4)}):
        raise AssertionError("not reached")
    assert bits(net) == before


def test_no_update_and_no_second_swap_inside():
    average = WeightAverage(network(), Average())
    with average.applied():
        with pytest.raises(AssertionError, match="while the module holds the average"):
            average.update(1)
        with pytest.raises(AssertionError, match="already"), average.applied():
            pass


def test_training_goes_on_as_if_nothing_had_been_evaluated():
    def trained(evaluate: bool) -> dict[str, bytes]:
        net = network()
        average = WeightAverage(net, Average(decay=0.5))
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1, fused=True)
        for step in range(1, 4):
            net(torch.randn(5, 3, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()
            average.update(step)
            if evaluate:
                with average.applied(), torch.inference_mode():
                    net.eval()(torch.ones(5, 3))
                net.train()
        return bits(net) | {f"average {n}": tensor.numpy().tobytes() for n, tensor in average.state().items()}

    assert trained(True) == trained(False)


def test_resuming_changes_nothing():
    net, spec = network(), Average(decay=0.9, warmup=True, start=1)
    average = WeightAverage(net, spec)
    for step in (1, 2):
        move(net, step)
        average.update(step)
    stored = {name: tensor.clone() for name, tensor in average.state().items()}
    resumed = WeightAverage(net, spec)
    assert not torch.equal(resumed.state()["0.bias"], stored["0.bias"])
    resumed.load(stored)
    move(net, 3)
    average.update(3)
    resumed.update(3)
    assert stored.keys() == resumed.state().keys()
    assert all(torch.equal(tensor, resumed.state()[name]) for name, tensor in average.state().items())
    assert not torch.equal(resumed.state()["0.bias"], stored["0.bias"])  # a copy was loaded, not the tensor itself


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        ("0.bias", None, r"missing in it \['0.bias'\]; unexpected in it \[\]"),
        ("0.weight", torch.zeros(4, 3), r"missing in it \[\]; unexpected in it \['0.weight'\]"),
        ("0.bias", torch.zeros(1), r"0.bias: expected \(\(4,\), torch.float32\), got \(\(1,\), torch.float32\)"),
        ("0.bias", torch.zeros(4).half(), r"0.bias: expected .*torch.float32\), got .*torch.float16"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(name, tensor, message):
    average = WeightAverage(network(), Average())
    before = {n: t.clone() for n, t in average.state().items()}
    stored = {n: t + 1 for n, t in before.items() if n != name} | ({} if tensor is None else {name: tensor})
    with pytest.raises(ValueError, match=message):
        average.load(stored)
    assert all(torch.equal(t, before[n]) for n, t in average.state().items())


def test_buffers_that_were_moved_are_still_followed():
    """`Module.to` makes new buffers where it keeps parameters."""
    net = network()
    average = WeightAverage(net, Average(decay=0.5))
    net[1].running_mean = torch.full((4,), 8.0)
    average.update(1)
    assert average.state()["1.running_mean"].tolist() == [4.0] * 4


@dataclass(frozen=True, kw_only=True)
class Recipe:
    averaging: Average | None = None


def test_a_recipe_switches_it_on(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("averaging: {kind: ema, decay: 0.99}")
    recipe = load_recipe(Recipe, [str(path)])
    assert recipe == Recipe(averaging=Average(decay=0.99)) and load_recipe(Recipe, []).averaging is None
    path.write_text(dump_recipe(recipe))
    assert load_recipe(Recipe, [str(path)]) == recipe
