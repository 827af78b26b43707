"""One feature function: every readable image once, labels beside their own features, asked for once."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from mpp.architectures import ViT
from mpp.backbones import build_backbone
from mpp.data.sources import Splits, Subset
from mpp.evaluation.features import CHUNK, Features, name_of
from mpp.evaluation.knn import KNN
from mpp.runtime import Runtime, StopSignal


class Numbered:
    """Pictures whose grey tells their id; those in `bad` are no pictures."""

    classes = ("even", "odd")
    description = "numbers"

    def __init__(self, count, bad=()):
        self.count, self.bad, self.reads = count, set(bad), 0

    def __len__(self):
        return self.count

    def read(self, ids):
        self.reads += len(ids)
        return [b"broken" if i in self.bad else np.full((16, 16, 3), i, dtype=np.uint8) for i in ids]

    def labels(self):
        return np.arange(self.count) % 2

    def name(self, id):
        return str(id)

    def fingerprint(self):
        return "0"


class Source:
    """Stands for a recipe's source."""

    kind, channels, range, path = "numbers", 3, None, "data/numbers"

    def __repr__(self):
        return "numbers"


@pytest.fixture
def setting():
    train, test = Numbered(2 * CHUNK + 5, bad=[3, CHUNK]), Numbered(7)
    splits = Splits(*(Subset(d) for d in (train, test)))
    backbone = build_backbone(ViT(size="tiny", embed_dim=32, depth=2, num_heads=2, patch_size=8, image_size=16), 3, 0)
    runtime = Runtime(Accelerator(cpu=True), 1, StopSignal())
    evaluations = [KNN(k=(1,), pool=("mean", "cls"), layers=(-1,)), KNN(k=(1,), layers=(0,))]
    features = Features(backbone, runtime, evaluations, Source(), {"numbers": splits})
    return features, train, backbone


def test_every_readable_image_is_there_once_beside_its_label(setting):
    features, train, backbone = setting
    split = features.get(None, "mean", -1)
    ids = [i for i in range(len(train)) if i not in train.bad]
    assert split.train_x.shape == (len(ids), 32) and split.train_y.tolist() == [i % 2 for i in ids]
    images = torch.stack([torch.full((3, 16, 16), i, dtype=torch.uint8) for i in ids])
    with torch.no_grad():
        expected = backbone.eval().features(images)["mean", -1]
    assert torch.allclose(split.train_x, expected, atol=1e-5)
    assert (split.classes, split.name) == (("even", "odd"), "numbers")
    assert [(where, skip.id) for where, skip in features.skipped] == [("numbers train", 3), ("numbers train", CHUNK)]


def test_one_pass_serves_all_evaluations_of_a_source(setting):
    features, train, _ = setting
    for pool, layer in (("mean", -1), ("cls", -1), ("mean", 0), ("mean", -1)):
        features.get(None, pool, layer)
    assert train.reads == len(train)


def test_names_of_sources_are_short():
    assert name_of(Source()) == "numbers"


def test_sources_with_the_same_last_name_are_told_apart():
    from mpp.data.sources import ClassFolders, HuggingFace
    from mpp.evaluation.features import names_of

    sources = [
        ClassFolders(path="a/x/cells"),
        ClassFolders(path="b/x/cells"),
        HuggingFace(path="org/set", name="one"),
        HuggingFace(path="org/set", name="two"),
        HuggingFace(path="data/birds/*.parquet"),
        ClassFolders(path="c/birds", channels=1),
    ]
    names = [names_of(sources)[repr(source)] for source in sources]
    assert names == ["a/x/cells", "b/x/cells", "set/one", "set/two", "data/birds", "c/birds"]
    assert len(set(names_of([HuggingFace(path="s"), HuggingFace(path="s", train_split="val")]).values())) == 2
