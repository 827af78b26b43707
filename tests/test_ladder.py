"""The ladder: one command from a pretraining run to the table, resumed row by row."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from mpp import ladder as job
from mpp import pretrain as pretraining
from mpp import shared_work
from mpp.config import RecipeError, load_recipe
from mpp.ladder_recipe import LadderConfig
from mpp.ladder_rows import Judged
from mpp.lock import FolderInUse
from mpp.pretrain_recipe import PretrainConfig

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
        "fine-tuned from MPP",
        "trained from scratch",
        "trained from scratch, total compute",
        "gain over scratch",
        "gain over scratch, total compute",
    }
    assert {row["budget"] for row in rows} == {2, "all"} and "gain over scratch, total compute" in told
    tuned = next(row for row in rows if (row["method"], row["budget"]) == ("fine-tuned from MPP", 2))
    assert tuned["learning_rate"] in (1e-3, 3e-3) and (tuned["steps"], tuned["seeds"]) == (6, 2)
    assert tuned["value"] == pytest.approx(sum(tuned["values"].values()) / 2) and tuned["dataset"] == "data"
    gain = next(row for row in rows if (row["method"], row["budget"]) == ("gain over scratch", 2))
    scratch = next(row for row in rows if (row["method"], row["budget"]) == ("trained from scratch", 2))
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
    mpp, scratch = (ladder.rows.row(start, 2, 1, 1e-3) for start in ladder.rows.starts[:2])
    assert (mpp.init, scratch.init) == (str(tmp_path / "out" / "weights"), "scratch")
    from dataclasses import replace

    assert replace(mpp, init="scratch", out=scratch.out) == scratch
    assert (mpp.labels.count, mpp.labels.seed, mpp.train.seed, mpp.labels.validation) == (2, 1, 1, 0)
    assert mpp.backbone.embed_dim == 32


def test_drop_path_and_dropout_are_the_fine_tuning_s_alone(run, tmp_path):
    plain = job.begin(str(run), config(run, tmp_path / "out"))
    asked = job.begin(str(run), config(run, tmp_path / "out", "--drop_path=0.2", "--dropout=0.1"))
    first, second = (ladder.rows.row(ladder.rows.starts[0], 2, 0, 1e-3).backbone for ladder in (plain, asked))
    assert (first.drop_path, first.dropout, second.drop_path, second.dropout) == (0.0, 0.0, 0.2, 0.1)
    assert asked.rows.recipe.backbone.drop_path == 0.0


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
    assert ladder.rows.starts[2].more_steps == round(4 * 8 / 4 / 6)


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
    pinned.write_text(json.dumps(json.loads(pinned.read_text()) | {"step": 2, "mpp": "other"}))
    with pytest.raises(ValueError, match="other weights, of .* at step 2.*own copy"):
        job.begin(str(run), config(run, tmp_path / "out")).go()


def test_a_ladder_goes_on_from_its_own_copy(run, tmp_path):
    job.begin(str(run), config(run, tmp_path / "out"))._pin()
    again = job.begin(str(tmp_path / "out" / "weights"), config(run, tmp_path / "out"))
    again._pin()
    first = job.begin(str(run), config(run, tmp_path / "out"))
    assert again.rows.row(again.rows.starts[0], 2, 0, 1e-3) == first.rows.row(first.rows.starts[0], 2, 0, 1e-3)


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
    take = shared_work.hold

    def hold(path, patience=20.0):
        if busy.get(path.name, 0):
            raise FolderInUse(str(path))
        if path.name in busy:
            order.append(path.name)
        take(path, patience)

    def sleep(seconds):
        waits.append(seconds)
        busy["mpp_2_seed0"] -= 1

    monkeypatch.setattr(shared_work, "hold", hold)
    monkeypatch.setattr(shared_work.time, "sleep", sleep)
    assert job.begin(str(run), asked).go() == 0
    assert order == ["scratch_2_seed0", "mpp_2_seed0"] and len(waits) == 2
    told = capsys.readouterr().out
    assert told.count("that other processes are at") == 1 and "gain over scratch" in told


def test_a_signal_while_waiting_for_others_ends_it(run, tmp_path, monkeypatch):
    asked = config(run, tmp_path / "out", "--learning_rates=[]", "--budgets=[2]", "--seeds=1", "--total_compute=false")
    ladder = job.begin(str(run), asked)

    def hold(path, patience=20.0):
        if path.name.endswith("seed0"):
            raise FolderInUse(str(path))

    monkeypatch.setattr(shared_work, "hold", hold)
    monkeypatch.setattr(shared_work.time, "sleep", lambda seconds: setattr(ladder.work.stop, "requested", True))
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


def test_a_signal_between_two_runs_stops_the_ladder(run, tmp_path, monkeypatch):
    asked = config(run, tmp_path / "out", "--learning_rates=[]", "--budgets=[2]", "--total_compute=false")
    ladder = job.begin(str(run), asked)
    write = ladder._write

    def signalled():
        ladder.work.stop.requested = True
        return write()

    monkeypatch.setattr(ladder, "_write", signalled)
    assert ladder.go() == 75
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 1


def test_a_learning_rate_that_diverges_is_out_and_the_others_go_on(run, tmp_path, capsys):
    words = ("--learning_rates=[1.0e-3, 1.0e+12]", "--budgets=[2]", "--seeds=1", "--finetune.optim.clip=null")
    asked = config(run, tmp_path / "out", *words, "--total_compute=false")
    assert job.begin(str(run), asked).go() == 0
    told = capsys.readouterr().out
    assert "learning rate 1e+12 diverged" in told
    record = json.loads((tmp_path / "out" / "sweep_mpp.json").read_text())
    assert record["chosen"] == 1e-3 and record["validation_accuracy"]["1000000000000.0"] is None
    assert job.begin(str(run), asked).go() == 0  # and is not tried again
    assert "diverged" not in capsys.readouterr().out


def test_rows_of_another_recipe_are_told_at_the_start(run, tmp_path):
    words = ("--learning_rates=[]", "--budgets=[2]", "--seeds=1", "--total_compute=false")
    assert job.begin(str(run), config(run, tmp_path / "out", *words)).go() == 0
    with pytest.raises(ValueError, match="rows of another recipe .*steps: 6 -> 7"):
        job.begin(str(run), config(run, tmp_path / "out", *words, "--finetune.train.steps=7"))


def test_other_budgets_join_the_table_with_steps_of_their_own(run, tmp_path):
    words = ("--learning_rates=[]", "--seeds=1", "--total_compute=false", "--frozen=[]")
    assert job.begin(str(run), config(run, tmp_path / "out", *words, "--budgets=[2]")).go() == 0
    more = config(run, tmp_path / "out", *words, "--budgets=[all, 4]", "--steps=[8, 7]")
    assert job.begin(str(run), more).go() == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "ladder.jsonl").read_text().splitlines()]
    steps = {row["budget"]: row["steps"] for row in rows if row["method"] == "fine-tuned from MPP"}
    assert list(steps.items()) == [(2, 6), (4, 7), ("all", 8)]
    assert {row["budget"] for row in rows if row["method"].startswith("few-shot")} == {2, 4, "all"}
    assert load_steps(tmp_path / "out" / "runs" / "scratch_4_seed0") == 7


def test_a_moved_ladder_goes_on(run, tmp_path, capsys):
    words = ("--learning_rates=[]", "--budgets=[2]", "--seeds=1", "--total_compute=false")
    words += ("--finetune.train.checkpoint_every=3",)
    assert job.begin(str(run), config(run, tmp_path / "out", *words)).go() == 0
    (tmp_path / "out").rename(tmp_path / "moved")
    row = tmp_path / "moved" / "runs" / "mpp_2_seed0"
    shutil.rmtree(row / "checkpoints" / "00000006")
    capsys.readouterr()
    assert job.begin(str(run), config(run, tmp_path / "moved", *words)).go() == 0
    told = capsys.readouterr().out
    assert "[1 of 2] fine-tuned from MPP" in told and "frozen features" not in told and "step 6/6" in told
    assert str(tmp_path / "moved") in (row / "recipe.yaml").read_text()


def test_other_data_are_told(run, tmp_path):
    ladder = job.begin(str(run), config(run, tmp_path / "out"))
    ladder._pin()
    ladder.prints["data"] = "others"
    with pytest.raises(ValueError, match="begun with other data"):
        ladder._pin()


def test_more_blocks_frozen_than_there_are_is_told(run, tmp_path):
    with pytest.raises(ValueError, match="3 of a backbone with 2 blocks"):
        job.begin(str(run), config(run, tmp_path / "out", "--finetune.frozen_blocks=3"))


def test_what_a_row_would_refuse_is_told_at_the_start(run, tmp_path):
    with pytest.raises(ValueError, match="choose_on"):
        job.begin(str(run), config(run, tmp_path / "out", "--budgets=[1]"))
    with pytest.raises(ValueError, match="mix"):
        words = ("--finetune.mix.mixup=0.5", "--finetune.train.micro_batch_size=1")
        job.begin(str(run), config(run, tmp_path / "out", *words))
    with pytest.raises(RecipeError, match="extend"):
        config(run, tmp_path / "out", "--finetune.train.extend.steps=4")


def test_a_frozen_score_without_an_answer_costs_no_fine_tuning(run, tmp_path, monkeypatch, capsys):
    from mpp.evaluation.knn import KNN

    def none(self, features):
        raise ValueError("no neighbours")
        yield

    monkeypatch.setattr(KNN, "__call__", none)
    words = ("--learning_rates=[]", "--budgets=[2]", "--seeds=1", "--total_compute=false")
    assert job.begin(str(run), config(run, tmp_path / "out", *words)).go() == 1
    told = capsys.readouterr().out
    assert "knn gave no score" in told and "fine-tuned from MPP" in told
    monkeypatch.undo()
    assert job.begin(str(run), config(run, tmp_path / "out", *words)).go() == 0
    assert "kNN, trained features" in (tmp_path / "out" / "ladder.txt").read_text()


def test_frozen_scores_of_several_settings_stand_side_by_side(run, tmp_path):
    words = ("--learning_rates=[]", "--budgets=[2]", "--seeds=1", "--total_compute=false", "--frozen.0.k=[1, 3]")
    assert job.begin(str(run), config(run, tmp_path / "out", *words)).go() == 0
    text = (tmp_path / "out" / "ladder.txt").read_text()
    assert "kNN (k 1), trained features" in text and "kNN (k 3), untrained features" in text


def test_the_rate_that_was_best_on_the_slice_is_chosen_and_of_equal_ones_by_loss(run, tmp_path, capsys):
    ladder = job.begin(str(run), config(run, tmp_path / "out", "--learning_rates=[1.0e-3, 2.0e-3, 3.0e-3, 4.0e-3]"))
    start = ladder.rows.starts[0]
    (tmp_path / "out").mkdir()
    found = {1e-3: Judged(0.5, -0.1), 2e-3: Judged(0.6, -0.3), 3e-3: Judged(0.6, -0.2), 4e-3: None}
    assert ladder._chosen(start, found) == 3e-3
    told = capsys.readouterr().out
    assert "learning rate 0.003 (on 2 images: 0.001 50.0 %, 0.002 60.0 %, 0.003 60.0 %)" in told
    assert "2 images decide that" in told
    record = json.loads((tmp_path / "out" / "sweep_mpp.json").read_text())
    assert (record["chosen"], record["at_edge"], record["images"]) == (3e-3, False, 2)
    assert record["validation_loss"] == {"0.001": 0.1, "0.002": 0.3, "0.003": 0.2, "0.004": None}
    with pytest.raises(ValueError, match="diverged with each"):
        ladder._chosen(start, {1e-3: None, 2e-3: None})


def test_gains_are_paired_by_seed_and_of_what_is_done_alone(run, tmp_path):
    ladder = job.begin(str(run), config(run, tmp_path / "out", "--seeds=3", "--budgets=[2]"))
    ladder.rates = {start.name: 1e-3 for start in ladder.rows.starts}
    values = {"mpp": [0.5, 0.7, 0.6], "scratch": [0.1, 0.4, None], "scratch_total_compute": [0.6, None, 0.5]}
    for name, accuracies in values.items():
        for seed, value in enumerate(accuracies):
            if value is not None:
                folder = tmp_path / "out" / "runs" / f"{name}_2_seed{seed}"
                folder.mkdir(parents=True)
                steps = 6 + (ladder.rows.starts[2].more_steps if name.endswith("compute") else 0)
                row = {"evaluation": "classification", "metric": "top1", "value": value, "step": steps}
                later = row | {"step": steps + 1, "value": 0.99}  # trained on by hand
                (folder / "results.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(later) + "\n")
                (folder / "recipe.yaml").write_text("optim: {lr: 1.0e-3}")
    gains = {cell.method: cell.row for cell in ladder._gains()}
    assert gains["gain over scratch"]["values"] == pytest.approx({0: 0.4, 1: 0.3})
    assert gains["gain over scratch"]["value"] == pytest.approx(0.35)
    assert gains["gain over scratch, total compute"]["values"] == pytest.approx({0: -0.1, 2: 0.1})
    tuned = {cell.method: cell.row["value"] for cell in ladder._tuned_cells()}
    assert tuned == pytest.approx(
        {
            "fine-tuned from MPP": 0.6,
            "trained from scratch": 0.25,
            "trained from scratch, total compute": 0.55,
        }
    )


def plain(run, out, *words) -> LadderConfig:
    """One budget, one seed, two starts; the words say otherwise."""
    usual = {"learning_rates": "[]", "budgets": "[2]", "seeds": "1", "total_compute": "false"}
    given = dict(word.removeprefix("--").split("=", 1) for word in words)
    return config(run, out, *(f"--{name}={value}" for name, value in (usual | given).items()))


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "ladder.jsonl").read_text().splitlines()]


def test_rows_made_at_another_learning_rate_are_told(run, tmp_path):
    out = tmp_path / "out"
    assert job.begin(str(run), plain(run, out)).go() == 0
    with pytest.raises(ValueError, match=r"optim.lr: 0.001 -> 0.01"):
        job.begin(str(run), plain(run, out, "--finetune.optim.lr=0.01", "--seeds=2"))
    other = plain(run, out, "--finetune.optim.lr=0.01", "--budgets=[4]")
    assert job.begin(str(run), other).go() == 0
    rates = {row["budget"]: row["learning_rate"] for row in rows_of(out) if row["method"] == "fine-tuned from MPP"}
    assert rates == {2: 0.001, 4: 0.01}


def test_rates_that_a_sweep_chose_later_must_be_those_of_the_rows(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert job.begin(str(run), plain(run, out, "--finetune.optim.lr=0.5")).go() == 0
    swept = plain(run, out, "--learning_rates=[1.0e-3, 3.0e-3]", "--choose_on=0.34")
    with pytest.raises(ValueError, match=r"rows of another recipe .*optim.lr: 0.5 -> 0.00"):
        job.begin(str(run), swept).go()


def test_one_learning_rate_is_taken_without_a_sweep(run, tmp_path):
    ladder = job.begin(str(run), plain(run, tmp_path / "out", "--learning_rates=[0.002]"))
    assert list(ladder._trials()) == []
    ladder._choose_rates()
    assert set(ladder.rates.values()) == {0.002}


def test_fewer_seeds_or_starts_take_nothing_out_of_the_table(run, tmp_path):
    out = tmp_path / "out"
    assert job.begin(str(run), plain(run, out, "--seeds=2", "--total_compute=true")).go() == 0
    before = (out / "ladder.txt").read_text()
    assert job.begin(str(run), plain(run, out)).go() == 0
    assert (out / "ladder.txt").read_text() == before and "total compute" in before


def test_a_process_that_was_begun_for_other_budgets_keeps_those_of_all(run, tmp_path):
    out = tmp_path / "out"
    first = job.begin(str(run), plain(run, out))
    first._pin()
    assert job.begin(str(run), plain(run, out, "--budgets=[4]")).go() == 0
    frozen = (out / "frozen" / "results.jsonl").read_text()
    assert first.go() == 0
    assert {row["budget"] for row in rows_of(out) if row["method"] == "fine-tuned from MPP"} == {2, 4}
    assert (out / "frozen" / "results.jsonl").read_text() == frozen  # measured once, at both


def test_frozen_scores_once_measured_stay_whatever_a_later_command_asks_for(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert job.begin(str(run), plain(run, out)).go() == 0
    first = (out / "frozen" / "results.jsonl").read_text()
    assert job.begin(str(run), plain(run, out, "--frozen=[{kind: linear}]")).go() == 0
    second = (out / "frozen" / "results.jsonl").read_text()
    assert second.startswith(first) and {
        json.loads(row)["evaluation"] for row in second[len(first) :].split("\n")[:-1]
    } == {"linear"}
    capsys.readouterr()
    assert job.begin(str(run), plain(run, out, "--frozen=[]")).go() == 0
    assert "frozen features" not in capsys.readouterr().out
    text = (out / "ladder.txt").read_text()
    assert "kNN, trained features" in text and "linear probe, trained features" in text
    assert job.begin(str(run), plain(run, out, "--frozen=[]", "--seeds=2")).go() == 0
    seeds = {(row["method"], row["budget"]): row["seeds"] for row in rows_of(out) if "features" in row["method"]}
    assert seeds["kNN, trained features", 2] == seeds["linear probe, untrained features", 2] == 2
    assert len(seeds) == sum("features" in row["method"] for row in rows_of(out))  # each cell once


def test_frozen_scores_that_a_signal_cut_short_are_measured_again(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert job.begin(str(run), plain(run, out)).go() == 0
    whole = (out / "ladder.txt").read_text()
    ladder = job.begin(str(run), plain(run, out, "--seeds=2"))
    begin = job.evaluate.begin

    def signalled(*arguments):
        made = begin(*arguments)
        made.runtime.stop.requested = True
        return made

    with monkeypatch.context() as patch:
        patch.setattr(job.evaluate, "begin", signalled)
        assert ladder.go() == 75
    assert job.begin(str(run), plain(run, out)).go() == 0
    lines = (out / "ladder.txt").read_text().splitlines()
    assert [line.split("  ")[0] for line in lines] == [line.split("  ")[0] for line in whole.splitlines()]


def test_a_checkpoint_that_comes_while_the_data_are_opened_is_not_the_ladder_s(run, tmp_path, monkeypatch):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    opened = job.open_splits

    def meanwhile(source):
        if not (copy / "checkpoints" / "00000008").exists():
            recipe = [str(copy / "recipe.yaml"), f"--out={copy}", "--train.extend.steps=4"]
            assert pretraining.pretrain(load_recipe(PretrainConfig, recipe)) == 0
        return opened(source)

    monkeypatch.setattr(job, "open_splits", meanwhile)
    ladder = job.begin(str(copy), plain(run, tmp_path / "out"))
    ladder._pin()
    monkeypatch.undo()
    assert [place.name for place in (tmp_path / "out" / "weights" / "checkpoints").iterdir()] == ["00000004"]
    job.begin(str(tmp_path / "out" / "weights"), plain(run, tmp_path / "out"))._pin()
    with pytest.raises(ValueError, match="own copy"):
        job.begin(str(copy), plain(run, tmp_path / "out"))._pin()


def test_supervised_weights_that_change_meanwhile_are_told(run, tmp_path):
    weights = tmp_path / "weights.safetensors"
    shutil.copy(run / "checkpoints" / "00000004" / "model.safetensors", weights)
    ladder = job.begin(str(run), plain(run, tmp_path / "out", f"--supervised={weights}"))
    tensors = load_file(weights)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, weights)
    with pytest.raises(ValueError, match="other weights than when the ladder was begun"):
        ladder.go()
    with pytest.raises(ValueError, match=r"begun with other weights in .*weights.safetensors"):
        job.begin(str(run), plain(run, tmp_path / "out", f"--supervised={weights}")).go()


def test_another_image_size_is_told_as_such(run, tmp_path):
    out = tmp_path / "out"
    assert job.begin(str(run), plain(run, out)).go() == 0
    with pytest.raises(ValueError, match=r"rows of another recipe .*backbone.image_size"):
        job.begin(str(run), plain(run, out, "--image_size=48"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--finetune.train.trackers=[wandb]",), "train.trackers: wandb not installed"),
        (("--finetune.train.precision=fp16",), "fp16 does not train on a CPU"),
        (("--supervised=timm:test_vit.r160_in1k",), "every row has the backbone of"),
        (("--frozen=[{kind: linear, layers: [7]}]",), "frozen: linear: .*7"),
    ],
)
def test_what_no_row_could_be_made_with_is_told_before_anything_is_written(run, tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        job.begin(str(run), plain(run, tmp_path / "out", *words))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--frozen=[{kind: fewshot, shots: [2]}]", "frozen.0: is few-shot, which comes by itself"),
        ("--frozen=[{kind: knn}, {kind: knn}]", "frozen: names .* more than once"),
        ("--learning_rates=[1.0e-3, 1.0e-3]", "learning_rates: names .* more than once"),
        ("--budgets=[2, 2]", "budgets: names 2 more than once"),
        ("--steps=[2, 2, 2]", "steps: 3 numbers for 2 budgets"),
    ],
)
def test_what_would_stand_there_twice_is_refused(run, tmp_path, word, message):
    with pytest.raises(RecipeError, match=message):
        config(run, tmp_path / "out", word)


def test_no_drop_path_over_that_of_the_pretraining(run, tmp_path):
    recipe = (run / "recipe.yaml").read_text()
    try:
        text = yaml.safe_load(recipe)
        text["backbone"]["drop_path"] = 0.2
        (run / "recipe.yaml").write_text(yaml.safe_dump(text))
        ladder = job.begin(str(run), config(run, tmp_path / "out", "--drop_path=0"))
        assert ladder.rows.backbone.drop_path == 0.0
    finally:
        (run / "recipe.yaml").write_text(recipe)
