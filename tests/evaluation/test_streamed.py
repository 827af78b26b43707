"""Probes on augmented views: each image once, rates that do not meet, a choice without test, the same on 1, 2, 3 ranks.

Run as a script it is one rank of the last test.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from mpp.architectures import ViT
from mpp.backbones import build_backbone
from mpp.config import load_recipe
from mpp.data.sources import Splits, Subset
from mpp.evaluation.attentive import AttentiveProbe
from mpp.evaluation.augmented import AugmentedProbe
from mpp.evaluation.features import CHUNK, Features
from mpp.evaluation.fewshot import FewShot
from mpp.evaluation.knn import KNN
from mpp.evaluation.linear import LinearProbe
from mpp.evaluation.softmax_regression import SGD
from mpp.evaluation.streamed import _Where
from mpp.runtime import Runtime, StopSignal, start

ROOT = Path(__file__).parent.parent.parent
FAST = {"epochs": 6, "warmup_epochs": 1, "batch_size": 8, "micro_batch_size": 2}
PROBES = [
    AugmentedProbe(optimizer="sgd", learning_rates=(3.0,), **FAST),
    AttentiveProbe(learning_rates=(0.1,), num_heads=2, **FAST),
]
BOTH = pytest.mark.parametrize("probe", PROBES, ids=["augmented", "attentive"])


class Colours:
    """Noisy 16 x 16 pictures; the class is a colour. Those in `bad` are no pictures; `grey`: all are the same.

    shift: added to the labels. confused: labels have nothing to do with colours.
    """

    description = "colours"

    def __init__(self, count, classes=2, bad=(), seed=0, grey=False):
        self.count, self.bad, self.seed, self.grey = count, set(bad), seed, grey
        self.classes = tuple(f"colour {i}" for i in range(classes))
        self.shift, self.confused = 0, False

    def __len__(self):
        return self.count

    def read(self, ids):
        return [b"broken" if i in self.bad else self.picture(i) for i in ids]

    def picture(self, i):
        if self.grey:
            return np.full((16, 16, 3), 128, dtype=np.uint8)
        random = np.random.default_rng([self.seed, i])
        base = 40 + 175 * np.array([i % len(self.classes) >> bit & 1 for bit in range(3)])
        return (base + random.integers(-40, 40, (16, 16, 3))).clip(0, 255).astype(np.uint8)

    def labels(self):
        numbers = np.arange(self.count) // (2 if self.confused else 1)
        return (numbers + self.shift) % len(self.classes)

    def name(self, id):
        return str(id)

    def fingerprint(self):
        return "0"


class Source:
    kind, channels, range, path = "colours", 3, None, "data/colours"

    def __repr__(self):
        return "colours"


def features_of(probes, train, test, runtime=None):
    splits = Splits(*(Subset(part) for part in (train, test)))
    backbone = build_backbone(ViT(size="tiny", embed_dim=32, depth=2, num_heads=2, patch_size=8, image_size=16), 3, 0)
    runtime = runtime or Runtime(Accelerator(cpu=True), 1, StopSignal())
    return Features(backbone, runtime, probes, Source(), {"colours": splits})


def rows_of(probe, train, test):
    rows = list(probe(features_of([probe], train, test)))
    for row in rows:
        del row["seconds"]
    return rows


@BOTH
def test_colours_are_told_apart_and_a_row_says_how(probe):
    rows = rows_of(probe, Colours(60, classes=6), Colours(31, classes=6, seed=1))
    assert [(row["metric"], row["value"], row["images"]) for row in rows] == [("top1", 1.0, 31), ("top5", 1.0, 31)]
    assert rows[0].keys() >= {"evaluation", "dataset", "setting", "metric", "value", "spread", "interval", "seeds"}
    assert rows[0]["dataset"] == "colours" and rows[0]["seeds"] == 1 and rows[0]["spread"] is None
    assert rows[0]["setting"]["layer"] == -1 and rows[0]["setting"]["epochs"] == 6
    (chosen,) = rows[0]["chosen"]
    assert chosen.pop("train_loss") < 1.0
    assert chosen == {"learning_rate": probe.learning_rates[0], "validation": None, "at_edge": False, "learned": True}


@BOTH
def test_the_backbone_is_frozen_and_in_eval_mode(probe):
    features = features_of([probe], Colours(24), Colours(10))
    features.backbone.train()
    before = {name: values.clone() for name, values in features.backbone.state_dict().items()}
    list(probe(features))
    assert not features.backbone.training and all(p.grad is None for p in features.backbone.parameters())
    assert all(torch.equal(values, before[name]) for name, values in features.backbone.state_dict().items())


@BOTH
def test_one_rate_of_a_sweep_is_trained_as_if_alone(probe):
    """The better of two is trained again: its row is that of the rate alone. The larger diverges."""
    rate = probe.learning_rates[0]
    train, test = Colours(40), Colours(20, seed=1)
    swept = rows_of(replace(probe, learning_rates=(rate, 1e30)), train, test)[0]
    alone = rows_of(probe, train, test)[0]
    assert swept["chosen"][0]["learning_rate"] == rate and swept["chosen"][0]["validation"] == 1.0
    assert swept["chosen"][0]["train_loss"] == alone["chosen"][0]["train_loss"] and swept["value"] == alone["value"]


@BOTH
def test_many_rates_in_one_pass_equal_separate_passes(probe):
    rates, losses = (0.01, 0.1), {}
    train = Colours(24)
    for some in (rates, rates[:1], rates[1:]):
        features = features_of([probe], train, train)
        learner = probe.learner(
            features.backbone.eval(), features.runtime, dict.fromkeys(probe.places(features.backbone), some), 2, 0
        )
        place = probe.places(features.backbone)[0]
        batches = list(probe._batches(_Where.of(probe, features), features.open(None or Source()).train, 0, 5))
        losses[some] = torch.stack([learner.learn(mine, 8, 1.0)[place].double() for mine in batches])
    assert torch.allclose(losses[rates][:, 0], losses[rates[:1]][:, 0], atol=1e-6)
    assert torch.allclose(losses[rates][:, 1], losses[rates[1:]][:, 0], atol=1e-6)
    assert (losses[rates][1:, 0] != losses[rates][1:, 1]).all()


@BOTH
def test_test_labels_choose_nothing(probe):
    probe = replace(probe, learning_rates=(0.003, 0.1, 1.0), epochs=2)
    test, other = Colours(20, seed=1), Colours(20, seed=1)
    other.shift = 1
    ours, theirs = rows_of(probe, Colours(40), test)[0], rows_of(probe, Colours(40), other)[0]
    assert ours["chosen"] == theirs["chosen"] and ours["value"] + theirs["value"] == 1.0


@BOTH
def test_unreadable_pictures_are_replaced_in_train_left_out_of_test_and_named(probe):
    features = features_of([probe], Colours(30, bad=[3]), Colours(CHUNK + 9, bad=[0, CHUNK], seed=1))
    row = next(iter(probe(features)))
    assert row["images"] == CHUNK + 7 and row["value"] == 1.0
    named = {(where, skip.id) for where, skip in features.skipped}
    assert named == {("colours train", 3), ("colours test", 0), ("colours test", CHUNK)}


@BOTH
def test_value_and_spread_are_over_seeds(probe):
    probe = replace(probe, seeds=2, epochs=2)
    row = rows_of(probe, Colours(40, classes=6), Colours(60, classes=6, seed=1))[0]
    losses = [chosen["train_loss"] for chosen in row["chosen"]]
    assert row["seeds"] == 2 and len(set(losses)) == 2 and row["interval"][0] <= row["value"] <= row["interval"][1]


@BOTH
def test_a_rate_that_learns_nothing_is_refused(probe):
    with pytest.raises(ValueError, match=r"on colours: .*training loss is .* not below ln\(2\)"):
        train = Colours(24)
        train.confused = True
        rows_of(replace(probe, learning_rates=(1e30,)), train, Colours(10))


@BOTH
def test_features_that_are_all_the_same_are_refused(probe):
    with pytest.raises(ValueError, match="training loss is .* not below"):
        rows_of(probe, Colours(24, grey=True), Colours(10, grey=True))


@BOTH
def test_labels_are_checked(probe):
    with pytest.raises(ValueError, match="expected 2 or more classes, got 1"):
        rows_of(probe, Colours(24, classes=1), Colours(10, classes=1))
    several = replace(probe, learning_rates=(0.1, 1.0))
    with pytest.raises(ValueError, match="every class has one train image"):
        rows_of(several, Colours(5, classes=5), Colours(5, classes=5))


@BOTH
def test_faults(probe):
    assert list(type(probe)().faults()) == []
    faults = dict(replace(probe, warmup_epochs=6, learning_rates=(1.0, 1.0), layers=(-1, -1)).faults())
    assert faults.keys() == {"warmup_epochs", "learning_rates", "layers"}


@BOTH
def test_one_place_that_learned_nothing_is_marked_and_said_and_the_others_stand(probe):
    lines = []
    features = SimpleNamespace(note=lambda kind, name, text: lines.append(f"{kind} on {name}: {text}"))
    where = SimpleNamespace(classes=2, name="colours", features=features)
    learned = probe._learned(where, {("mean", 0): 0.7, ("mean", 1): 0.69, ("mean", 2): float("nan")})
    assert learned == {("mean", 0): False, ("mean", 1): True, ("mean", 2): False}
    assert [line.split(": ")[1] for line in lines] == ["('mean', 0) learned nothing", "('mean', 2) learned nothing"]


def ranks(out: Path) -> None:
    """What each of several processes does in the test below."""
    runtime = start("fp32", threads=1)
    probes = [
        replace(PROBES[0], epochs=1, warmup_epochs=0, learning_rates=(3.0, 0.3), pool=("mean", "cls"), layers=(0, -1)),
        replace(PROBES[1], epochs=1, warmup_epochs=0),
        LinearProbe(),
        LinearProbe(solver=SGD(epochs=3, batch_size=8)),
        FewShot(shots=(5, "all")),
        KNN(k=(5,)),
    ]
    features = features_of(probes, Colours(97, classes=6), Colours(97, classes=6, seed=1, bad=[5]), runtime)
    rows = [{k: v for k, v in row.items() if k != "seconds"} for probe in probes for row in probe(features)]
    out.with_suffix(f".{runtime.rank}").write_text(json.dumps(rows))


def run_ranks(out: Path, processes: int) -> list[list[dict]]:
    launch = [
        "-m", "accelerate.commands.launch", "--multi_gpu", f"--num_processes={processes}", "--num_machines=1",
        "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0",
    ]  # fmt: skip
    words = [sys.executable, *(launch if processes > 1 else []), __file__, str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[dict]:
    (rows,) = run_ranks(tmp_path_factory.mktemp("ranks") / "rows", 1)
    assert len(rows) > 12 and {row["images"] for row in rows} == {96}
    return rows


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_97_images_in_batches_of_8_give_the_same_digits_on_every_process(alone, tmp_path, processes):
    for rows in run_ranks(tmp_path / "rows", processes):
        assert rows == alone


@BOTH
def test_a_recipe_can_name_it(probe, tmp_path):
    recipe = tmp_path / "probe.yaml"
    recipe.write_text("epochs: 7\nwarmup_epochs: 2\nlearning_rates: [0.1, 0.2]\naugment: {horizontal_flip: false}\n")
    loaded = load_recipe(type(probe), [str(recipe), "--layers=[0,-1]"])
    assert (loaded.epochs, loaded.learning_rates, loaded.layers) == (7, (0.1, 0.2), (0, -1))
    assert not loaded.augment.horizontal_flip and loaded.augment.crop.scale == (0.08, 1.0)


if __name__ == "__main__":
    ranks(Path(sys.argv[1]))
