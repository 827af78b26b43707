"""The ladder's cells and its table."""

import json

from mpp.evaluation.scores import summary
from mpp.ladder_table import Cell, answer, frozen_cells, write


def test_a_cell_says_how_many_of_its_seeds_are_done():
    whole = Cell("mpp", 2, {"value": 0.5, "spread": None, "seeds": 1, "wanted_seeds": 1})
    half = Cell("mpp", 2, {"value": 0.5, "spread": 0.01, "seeds": 2, "wanted_seeds": 3})
    gain = Cell("mpp", 2, {"value": 0.5, "spread": 0.01, "seeds": 3, "wanted_seeds": 3}, "top1_gain")
    assert (whole.text, half.text, gain.text) == ("50.0", "50.0 ±1.0 (2 of 3)", "+50.0 ±1.0")


def test_a_frozen_score_s_name_says_what_tells_it_from_others_of_its_kind(tmp_path):
    rows = [
        {
            "evaluation": kind,
            "dataset": "demo",
            "backbone": "trained",
            "metric": metric,
            "setting": setting,
            "value": 0.5,
        }
        for kind, metric, setting in (
            ("knn", "top1", {"k": 3, "shots": 10, "pool": "mean"}),
            ("knn", "top1", {"k": 3, "shots": "all", "pool": "mean"}),
            ("knn", "top1", {"k": 9, "shots": "all", "pool": "mean"}),
            ("knn", "top5", {"k": 9, "shots": "all", "pool": "mean"}),
            ("fewshot", "top1", {"shots": 10, "l2": 1024.0}),
            ("attentive", "top1", {"steps": 5}),
        )
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(cell.method, cell.budget) for cell in frozen_cells(tmp_path / "results.jsonl", "demo")] == [
        ("kNN (k 3), trained features", 10),
        ("kNN (k 3), trained features", "all"),
        ("kNN (k 9), trained features", "all"),
        ("few-shot, trained features", 10),
        ("attentive, trained features", "all"),
    ]


def test_the_table_has_a_column_for_every_budget_and_a_line_for_every_method(tmp_path):
    cells = [
        Cell("a", 2, {"value": 0.5, "spread": None, "seeds": 1}),
        Cell("b", "all", {"value": 0.25, "spread": 0.01, "seeds": 2}),
    ]
    text = write(
        tmp_path,
        {"run": "runs/x", "step": 3, "dataset": "demo"},
        [2],
        cells,
        lambda budget: 100 if budget == "all" else 10,
    )
    assert text.splitlines() == ["test accuracy, %  2 per class        all", "a                        50.0          -",
                                 "b                           -  25.0 ±1.0"]  # fmt: skip
    assert (tmp_path / "ladder.txt").read_text() == text + "\n"
    rows = [json.loads(line) for line in (tmp_path / "ladder.jsonl").read_text().splitlines()]
    assert [(row["run"], row["method"], row["budget"], row["value"]) for row in rows] == [
        ("runs/x", "a", 2, 0.5), ("runs/x", "b", "all", 0.25),
    ]  # fmt: skip


def test_the_answer_says_whether_the_interval_leaves_out_chance():
    def told(*values):
        return answer(Cell("gain over scratch", 10, summary(values), "top1_gain"))

    assert told(0.075, 0.079, 0.087) == (
        "gain over scratch, 10 per class: +8.0, 95 % interval +6.5 to +9.6 (3 seeds): it helped"
    )
    assert told(0.01, 0.09).endswith("(2 seeds): cannot be told from chance")
    assert told(-0.07, -0.08, -0.075).endswith("it harmed")
    assert (
        told(0.05) == "gain over scratch, 10 per class: +5.0 with one seed; more seeds would say how far that is chance"
    )
