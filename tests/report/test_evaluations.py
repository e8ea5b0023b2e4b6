"""Evaluations on pages: several sets, loss by position and by length; and the page of `longspan eval`."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspan.errors import ConfigError
from longspan.report import RunFolder
from longspan.report.evaluation_page import eval_page, evaluations_by_set
from longspan.report.run_folder import EvalRow
from tests.report.pages import charts_of, parts_of, report_of, value_of, words_of
from tests.report.runs import DIFFERENCE, RECORD, write_run


def row_of(step: int, loss: float, name: str = "", **keys: Any) -> dict[str, Any]:
    row = {"step": step, "eval_loss": loss, "eval_tokens": 900, "eval_documents": 7, "cp": 2, "planner": "fixed"}
    row |= {"eval_token_accuracy": 0.25, "eval_bits_per_byte": 1.5, "eval_perplexity": 2.0}
    buckets = [[0, 127, loss, 500, 7], [128, 255, loss + 0.5, 300, 3], [256, 511, None, 0, 0], [1024, 2047, 9.0, 9, 1]]
    row |= {"by_position": buckets, "by_length": buckets}
    return row | ({"eval_name": name} if name else {}) | keys


def run_with(path: Path, *rows: dict[str, Any]) -> Path:
    run = write_run(path)
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return run


def test_sets_are_curves_and_rows_of_a_table(tmp_path: Path) -> None:
    rows = [row_of(step, 5 - step / 60, "books", eval_top_five=0.5) for step in (20, 40, 60)]
    rows += [row_of(step, 6 - step / 60, "code<>", planner="dynamic") for step in (30, 60)]
    value = report_of(run_with(tmp_path / "run", *rows))
    curves = {curve["name"]: curve for curve in charts_of(value)["Loss of each set"]["series"]}
    assert list(curves) == ["held out", "books", "code<>"] and curves["books"]["x"] == [20, 40, 60]
    for title in ("Loss by position", "Loss by document length"):
        books = charts_of(value)[title]["series"][1]
        assert (books["x"], books["y"]) == ([0, 1, 2], [4, 4.5, 9])
        assert charts_of(value)[title]["x_names"] == ["0", "128", "1K"]
    table = next(table for table in parts_of(value, "table") if table["names"][0] == "set")
    assert table["names"][4:] == ["accuracy", "bits per byte", "top_five", "documents", "tokens", "cp"]
    assert table["rows"][2] == ["code<>", "60", "5.000000", "148.413", "25.00%", "1.5", "–", "7", "900", "dynamic"]


def test_a_single_set_shows_how_far_it_came(tmp_path: Path) -> None:
    value = report_of(run_with(tmp_path / "run", row_of(30, 6.0), row_of(61, 4.0)))
    curves = charts_of(value)["Loss by position"]["series"]
    assert [(curve["name"], curve["y"][0]) for curve in curves] == [("after step 61", 4), ("after step 30", 6)]
    assert "Evaluation sets" not in words_of(value)


def test_a_row_is_an_evaluation_or_none_or_is_refused_by_name() -> None:
    no_loss = row_of(3, 0.0) | {"eval_loss": None}
    assert EvalRow.from_row({"step": 3, "loss": 2.0}) is None and EvalRow.from_row(no_loss) is None
    bare = row_of(3, 2.0, by_position=[], by_length=[])
    del bare["eval_token_accuracy"], bare["eval_bits_per_byte"]
    assert EvalRow.from_row(bare) == EvalRow(3, 2, 2.0, 900, 7, "fixed")
    del bare["eval_perplexity"]  # of a model that scores
    row = EvalRow.from_row(bare)
    assert row is not None and row.perplexity == "–"
    with pytest.raises(ConfigError, match="no planner, eval_documents, by_position, by_length"):
        EvalRow.from_row({"step": 3, "eval_loss": 2.0, "cp": 4, "eval_tokens": 900})
    with pytest.raises(ConfigError, match="its counts are no numbers"):
        EvalRow.from_row(row_of(3, 2.0, cp=None))
    row = EvalRow.from_row(row_of(3, 2.0, by_position=[[1, 2], "x", [0, 127, 2.0, 5, 1]], by_length=7))
    assert row is not None and row.by_length == () and row.by_position == ((0, 127, 2.0, 5, 1),)
    assert dict(row.metrics) == {"token_accuracy": 0.25, "bits_per_byte": 1.5}


def test_the_last_evaluations_are_of_one_step(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", row_of(30, 6.0), row_of(70, 4.0, "books"), row_of(65, 5.0, cp=1), row_of(65, 5.0))
    folder = RunFolder.read(run)
    assert [row.cp for row in folder.newest_by_degree] == [1, 2] and [row.step for row in folder.held_out] == [
        30,
        60,
        65,
        65,
    ]
    assert [row.step for row in evaluations_by_set(folder)["books"]] == [70]
    rows = [row_of(65, 4.0, cp=cp, eval_activation_bytes=(8 << 30) // cp) for cp in (1, 2)]
    (run / "summary.json").write_text(json.dumps({"eval_at_degrees": rows}))
    table = parts_of(report_of(run), "table")[0]
    assert table["names"][6] == "added memory of a GPU" and [row[6] for row in table["rows"]] == ["8 GiB", "4 GiB"]
    verdicts = [row[2] for row in table["rows"]]  # what matters is within a phone's width
    assert table["names"][:3] == ["cp", "loss", ""] and verdicts == [["reference", ""], ["✓ equal", "good"]]


def test_the_page_of_an_evaluation() -> None:
    page = eval_page(RECORD)
    value, words = value_of(page), words_of(value_of(page))
    assert value["head"]["title"] == "runs/<b>" and "<b>runs" not in page and "runs/&lt;b&gt;" in page
    for part in ("run, step 4 · 2 ranks · tp 2", "parallel.tp 4 became 2", "accuracy", "500 ms"):
        assert part in words
    (table,) = parts_of(value, "table")
    cells = ["runs/<b>", "held out", "p2p", "500 ms", "258", "3.250000", "25.790", "12.50%", "3", "261", "2"]
    assert table["rows"] == [cells] and table["names"][:5] == ["weights", "set", "type", "seconds", "targets"]
    (chart,) = charts_of(value).values()  # of one bucket there is no curve
    assert chart["title"] == "Loss by document length" and chart["series"][0]["y"] == [3.5, 3.0]
    other = {**RECORD, "target": "base", "kind": "folder", "differences": [DIFFERENCE]}
    words = words_of(value_of(eval_page({**RECORD, "compare": other})))
    assert "loss of base minus that of runs/<b>: -0.250000; 2 of 3 documents have a lower value." in words
    assert "base, held out" in words and "-0.400000" in words
    margins = {**DIFFERENCE, "figure": "rewards/margins", "unit": "pair", "standard_error": 0.5, "by_length": []}
    scored = [{k: v for k, v in row.items() if k != "eval_perplexity"} for row in RECORD["evaluations"]]
    preferences = {**RECORD, "loss": "dpo, beta 0.1", "evaluations": scored}
    value = value_of(eval_page({**preferences, "compare": {**other, "evaluations": scored, "differences": [margins]}}))
    words = words_of(value)
    assert "Difference of the rewards/margins, held out" in words and "loss: dpo, beta 0.1" in words
    assert "-0.250000 ± 0.500000 (standard error over pairs); 2 of 3 pairs have a lower value." in words
    assert {chart["unit"] for chart in charts_of(value).values()} == {"mean of what is scored"}
