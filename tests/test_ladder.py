"""The ladder: one command from a pretraining run to the table, resumed row by row."""

import json
from pathlib import Path

import pytest
import yaml

from mpp import ladder as job
from mpp import pretrain as pretraining
from mpp.config import RecipeError, load_recipe
from mpp.ladder import LadderConfig
from mpp.pretrain_recipe import PretrainConfig
from mpp.run_folder import FolderInUse

PRETRAIN = """
backbone: {kind: vit, patch_size: 8, image_size: 32, embed_dim: 32, depth: 2, num_heads: 2}
optim: {lr: 1.0e-3, warmup_steps: 1}
train: {steps: 4, batch_size: 8, threads: 1}
heldout: {images: 10, train_images: 20, pictures: 0, min_information: 0}
"""
LADDER = """
budgets: [2, all]
seeds: 2
frozen: [{kind: knn, k: [3]}]
learning_rates: [1.0e-3, 3.0e-3]
choose_on: 0.34
finetune:
  augment: {crop: {kind: shifted_crop, padding: 2}}
  view: {crop: 1.0}
  optim: {kind: adamw, lr: 1.0e-3, warmup_steps: 1}
  train: {steps: 6, batch_size: 6, threads: 1, log_every: 3}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, write_classes) -> Path:
    folder = tmp_path_factory.mktemp("ladder")
    write_classes(folder / "data", train=8, test=4)
    (folder / "recipe.yaml").write_text(PRETRAIN)
    words = ["--data.kind=class_folders", f"--data.path={folder / 'data'}", f"--out={folder / 'run'}"]
    assert pretraining.pretrain(load_recipe(PretrainConfig, [str(folder / "recipe.yaml"), *words])) == 0
    (folder / "ladder.yaml").write_text(LADDER)
    return folder / "run"


def config(run, out, *words) -> LadderConfig:
    return load_recipe(LadderConfig, [str(run.parent / "ladder.yaml"), f"--out={out}", *words])


def test_the_table_holds_every_method_and_the_same_command_goes_on(run, tmp_path, capsys):
    asked = config(run, tmp_path / "out")
    assert job.begin(str(run), asked).go() == 0
    told = capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "out" / "ladder.jsonl").read_text().splitlines()]
    methods = {row["method"] for row in rows}
    assert methods == {
        "few-shot, untrained features",
        "few-shot, trained features",
        "kNN, untrained features",
        "kNN, trained features",
        "fine-tuned, mpp",
        "fine-tuned, scratch",
        "fine-tuned, scratch, total compute",
        "gain over scratch",
        "gain over scratch, total compute",
    }
    assert {row["budget"] for row in rows} == {2, "all"} and "gain over scratch, total compute" in told
    tuned = next(row for row in rows if (row["method"], row["budget"]) == ("fine-tuned, mpp", 2))
    assert tuned["learning_rate"] in (1e-3, 3e-3) and (tuned["steps"], tuned["seeds"]) == (6, 2)
    assert tuned["value"] == pytest.approx(sum(tuned["values"].values()) / 2) and tuned["dataset"] == "data"
    gain = next(row for row in rows if (row["method"], row["budget"]) == ("gain over scratch", 2))
    scratch = next(row for row in rows if (row["method"], row["budget"]) == ("fine-tuned, scratch", 2))
    differences = [tuned["values"][seed] - scratch["values"][seed] for seed in ("0", "1")]
    assert gain["values"] == {"0": differences[0], "1": differences[1]} and gain["metric"] == "top1_gain"
    assert "is at the edge of learning_rates" in told  # both of two rates are
    assert (tmp_path / "out" / "ladder.png").stat().st_size > 5000
    longer = load_steps(tmp_path / "out" / "runs" / "scratch_total_compute_2_seed1")
    assert longer == 6 + round(4 * 8 / 6)
    states = {file: file.read_bytes() for file in (tmp_path / "out").rglob("manifest.json")}
    assert len(states) == 1 + 2 * 2 + 3 * 2 * 2  # the kept weights, the sweep of two starts, every start, budget, seed
    results = tmp_path / "out" / "runs" / "mpp_2_seed0" / "results.jsonl"
    before = (tmp_path / "out" / "ladder.txt").read_text()
    row = json.loads(results.read_text().splitlines()[0]) | {"evaluation": "knn", "value": 0.123}
    results.write_text(results.read_text() + json.dumps(row) + "\n")  # what evaluate would add
    assert job.begin(str(run), asked).go() == 0
    assert (tmp_path / "out" / "ladder.txt").read_text() == before
    assert states == {file: file.read_bytes() for file in (tmp_path / "out").rglob("manifest.json")}


def load_steps(folder: Path) -> int:
    return max(int(place.name) for place in (folder / "checkpoints").iterdir())


def test_starts_differ_in_their_weights_alone(run, tmp_path):
    ladder = job.begin(str(run), config(run, tmp_path / "out"))
    mpp, scratch = (ladder._config(start, 2, 1, 1e-3) for start in ladder.starts[:2])
    assert (mpp.init, scratch.init) == (str(tmp_path / "out" / "weights"), "scratch")
    from dataclasses import replace

    assert replace(mpp, init="scratch", out=scratch.out) == scratch
    assert (mpp.labels.count, mpp.labels.seed, mpp.train.seed, mpp.labels.validation) == (2, 1, 1, 0)
    assert mpp.backbone.embed_dim == 32


def test_drop_path_and_dropout_are_the_fine_tuning_s_alone(run, tmp_path):
    plain = job.begin(str(run), config(run, tmp_path / "out"))
    asked = job.begin(str(run), config(run, tmp_path / "out", "--drop_path=0.2", "--dropout=0.1"))
    first, second = (ladder._config(ladder.starts[0], 2, 0, 1e-3).backbone for ladder in (plain, asked))
    assert (first.drop_path, first.dropout, second.drop_path, second.dropout) == (0.0, 0.0, 0.2, 0.1)
    assert asked.recipe.backbone.drop_path == 0.0


def test_dropout_of_a_backbone_without_it_is_refused(run, tmp_path):
    recipe = (run / "recipe.yaml").read_text()
    try:
        text = yaml.safe_load(recipe) | {"backbone": {"kind": "timm", "name": "vit_tiny_patch16_224"}}
        (run / "recipe.yaml").write_text(yaml.safe_dump(text))
        with pytest.raises(ValueError, match="dropout: a backbone of kind timm has none"):
            job.begin(str(run), config(run, tmp_path / "out", "--dropout=0.1"))
    finally:
        (run / "recipe.yaml").write_text(recipe)


def test_total_compute_counts_tokens(run, tmp_path):
    ladder = job.begin(str(run), config(run, tmp_path / "out", "--image_size=64"))
    assert ladder.starts[2].more_steps == round(4 * 8 / 4 / 6)


def test_what_is_no_pretraining_run_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match="no pretraining run"):
        job.begin(str(run.parent / "data"), config(run, tmp_path / "out"))
    with pytest.raises(ValueError, match="nowhere: no such file or folder"):
        job.begin("nowhere", config(run, tmp_path / "out"))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--finetune.init=RUN", "finetune.init"),
        ("--finetune.labels.validation=0.2", "finetune.labels"),
        ("--finetune.backbone.size=tiny", "finetune.backbone"),
        ("--finetune.train.seed=3", "finetune.train.seed"),
        ("--choose_on=1.5", "choose_on"),
    ],
)
def test_what_is_the_ladder_s_own_is_refused(run, tmp_path, word, message):
    with pytest.raises(RecipeError, match=message):
        config(run, tmp_path / "out", word)


def test_one_table_is_of_one_state_of_the_run_and_keeps_a_copy_of_it(run, tmp_path):
    ladder = job.begin(str(run), config(run, tmp_path / "out"))
    ladder._pin()
    ladder._pin()
    kept = tmp_path / "out" / "weights" / "checkpoints" / "00000004"
    assert (kept / "model.safetensors").read_bytes() == (ladder.checkpoint.path / "model.safetensors").read_bytes()
    pinned = tmp_path / "out" / "ladder.json"
    pinned.write_text(json.dumps(json.loads(pinned.read_text()) | {"step": 2, "sha256": "other"}))
    with pytest.raises(ValueError, match="ladder of step 2 of"):
        job.begin(str(run), config(run, tmp_path / "out")).go()


def test_a_ladder_goes_on_from_its_own_copy(run, tmp_path):
    job.begin(str(run), config(run, tmp_path / "out"))._pin()
    again = job.begin(str(tmp_path / "out" / "weights"), config(run, tmp_path / "out"))
    again._pin()
    assert again._config(again.starts[0], 2, 0, 1e-3) == job.begin(str(run), config(run, tmp_path / "out"))._config(
        again.starts[0], 2, 0, 1e-3
    )


def test_a_cell_says_how_many_of_its_seeds_are_done(run, tmp_path):
    whole = job.Cell("mpp", 2, {"value": 0.5, "spread": None, "seeds": 1, "wanted_seeds": 1})
    half = job.Cell("mpp", 2, {"value": 0.5, "spread": 0.01, "seeds": 2, "wanted_seeds": 3})
    gain = job.Cell("mpp", 2, {"value": 0.5, "spread": 0.01, "seeds": 3, "wanted_seeds": 3}, "top1_gain")
    assert (whole.text, half.text, gain.text) == ("50.0", "50.0 ±1.0 (2 of 3)", "+50.0 ±1.0")


def test_supervised_weights_that_do_not_fit_are_refused_at_the_start(run, tmp_path):
    with pytest.raises(ValueError, match="no such"):
        job.begin(str(run), config(run, tmp_path / "out", "--supervised=no/such"))


def test_several_processes_are_refused(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one process"):
        job.begin(str(run), config(run, tmp_path / "out"))


def test_a_budget_that_the_data_does_not_have_is_refused_at_the_start(run, tmp_path):
    with pytest.raises(ValueError, match="budgets: 50: .*every class"):
        job.begin(str(run), config(run, tmp_path / "out", "--budgets=[2, 50]"))
    assert not (tmp_path / "out").exists()


def test_what_another_process_is_at_is_left_to_it_and_waited_for(run, tmp_path, monkeypatch, capsys):
    asked = config(run, tmp_path / "out", "--learning_rates=[]", "--budgets=[2]", "--seeds=1", "--total_compute=false")
    busy, order, waits = {"mpp_2_seed0": 2, "scratch_2_seed0": 0}, [], []
    take = job.hold

    def hold(path, patience=20.0):
        if busy.get(path.name, 0):
            raise FolderInUse(str(path))
        if path.name in busy:
            order.append(path.name)
        take(path, patience)

    def sleep(seconds):
        waits.append(seconds)
        busy["mpp_2_seed0"] -= 1

    monkeypatch.setattr(job, "hold", hold)
    monkeypatch.setattr(job.time, "sleep", sleep)
    assert job.begin(str(run), asked).go() == 0
    assert order == ["scratch_2_seed0", "mpp_2_seed0"] and len(waits) == 2
    told = capsys.readouterr().out
    assert told.count("runs are made by other processes") == 1 and "gain over scratch" in told


def test_a_signal_while_waiting_for_others_ends_it(run, tmp_path, monkeypatch):
    asked = config(run, tmp_path / "out", "--learning_rates=[]", "--budgets=[2]", "--seeds=1", "--total_compute=false")
    ladder = job.begin(str(run), asked)

    def hold(path, patience=20.0):
        if path.name.endswith("seed0"):
            raise FolderInUse(str(path))

    monkeypatch.setattr(job, "hold", hold)
    monkeypatch.setattr(job.time, "sleep", lambda seconds: setattr(ladder.stop, "requested", True))
    assert ladder.go() == 75


def test_a_signal_in_the_last_save_of_a_run_stops_the_ladder(run, tmp_path, monkeypatch):
    from mpp.classify import Classifying

    asked = config(run, tmp_path / "out", "--learning_rates=[]", "--budgets=[2]")
    saved = Classifying._save

    def signalled(self, step):
        saved(self, step)
        self.runtime.stop.requested = True

    monkeypatch.setattr(Classifying, "_save", signalled)
    assert job.begin(str(run), asked).go() == 75
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 1
