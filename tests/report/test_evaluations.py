"""Evaluations in the page of a run: several sets, loss by position and by length, memory of degrees."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspan.errors import ConfigError
from longspan.report import RunFolder, write_report
from longspan.report.evaluation_sections import evaluations_by_set
from longspan.report.run_folder import BucketRow, EvalRow, last_evaluations
from tests.report.runs import write_run
from tests.report.test_report_pages import Page, page_of


def row_of(step: int, loss: float, name: str = "", **keys: Any) -> dict[str, Any]:
    """A row of metrics.jsonl of an evaluation at degree 2."""
    row = {"step": step, "eval_loss": loss, "eval_tokens": 900, "eval_documents": 7, "cp": 2, "planner": "fixed"}
    row |= {"eval_token_accuracy": 0.25, "eval_bits_per_byte": 1.5}
    buckets = [[0, 127, loss, 500, 7], [128, 255, loss + 0.5, 300, 3], [256, 511, None, 0, 0], [1024, 2047, 9.0, 9, 1]]
    row |= {"by_position": buckets, "by_length": buckets}
    return row | ({"eval_name": name} if name else {}) | keys


def run_with(path: Path, *rows: dict[str, Any]) -> Path:
    """A run whose metrics have these rows too."""
    run = write_run(path)
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return run


def charts_by_title(page: Page, html: str) -> dict[str, dict[str, Any]]:
    titles = [part.split("</b>")[0] for part in html.split("<figcaption><b>")[1:]]
    return dict(zip(titles, page.charts, strict=True))


def test_sets_are_curves_and_rows_of_a_table(tmp_path: Path) -> None:
    rows = [row_of(step, 5 - step / 60, "books", eval_top_five=0.5) for step in (20, 40, 60)]
    rows += [row_of(step, 6 - step / 60, "code<>", planner="dynamic") for step in (30, 60)]
    run = run_with(tmp_path / "run", *rows)
    html = write_report(run).read_text()
    charts, page = charts_by_title(Page(html), html), page_of(run)
    curves = {curve["name"]: curve for curve in charts["Loss of each set"]["series"]}
    assert list(curves) == ["held out", "books", "code<>"] and curves["books"]["x"] == [20, 40, 60]
    assert [curve["name"] for curve in charts["Training and evaluation"]["series"]][-1] == "evaluation, cp 4"
    for words in ("bits per byte", "top_five", "25.00%", "dynamic", "4.000000", "5.000000"):
        assert words in page.content, words


def test_loss_by_position_and_length_shows_where_a_model_fails(tmp_path: Path) -> None:
    sets = [row_of(61, 4.0), row_of(61, 5.0, "books")]
    html = write_report(run_with(tmp_path / "run", *sets)).read_text()
    charts = charts_by_title(Page(html), html)
    for title in ("Loss by position", "Loss by document length"):
        held_out, books = charts[title]["series"]
        assert (held_out["x"], held_out["y"]) == ([0, 1, 2], [4, 4.5, 9]) and books["y"] == [5, 5.5, 9]
        assert charts[title]["xNames"] == ["0", "128", "1K"]


def test_a_single_set_shows_how_far_it_came(tmp_path: Path) -> None:
    html = write_report(run_with(tmp_path / "run", row_of(30, 6.0), row_of(61, 4.0))).read_text()
    curves = charts_by_title(Page(html), html)["Loss by position"]["series"]
    assert [(curve["name"], curve["y"][0]) for curve in curves] == [("after step 61", 4), ("after step 30", 6)]
    assert "Evaluation sets" not in html


def test_what_an_evaluation_added_to_memory_is_in_the_table_of_degrees(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    table = [row_of(60, 4.0, cp=cp, eval_activation_bytes=(8 << 30) // cp) for cp in (1, 2)]
    (run / "summary.json").write_text(json.dumps({"eval_at_degrees": table}))
    content = page_of(run).content
    assert "added memory of a GPU" in content and "8 GiB" in content and "4 GiB" in content


def test_a_row_is_an_evaluation_or_none_or_is_refused_by_name() -> None:
    assert (
        EvalRow.from_row({"step": 3, "loss": 2.0}) is None
        and EvalRow.from_row(row_of(3, 0.0) | {"eval_loss": None}) is None
    )
    bare = row_of(3, 2.0, by_position=[], by_length=[])
    del bare["eval_token_accuracy"], bare["eval_bits_per_byte"]
    assert EvalRow.from_row(bare) == EvalRow(3, 2, 2.0, 900, 7, "fixed")
    with pytest.raises(ConfigError, match=r"no planner, eval_documents, by_position, by_length: it is of a version"):
        EvalRow.from_row({"step": 3, "eval_loss": 2.0, "cp": 4, "eval_tokens": 900})
    with pytest.raises(ConfigError, match="its counts are no numbers"):
        EvalRow.from_row(row_of(3, 2.0, cp=None))
    row = EvalRow.from_row(row_of(3, 2.0, by_position=[[1, 2], "x", [0, 127, 2.0, 5, 1]], by_length=7))
    assert row is not None and row.by_length == () and row.by_position == (BucketRow(0, 127, 2.0, 5, 1),)
    assert dict(row.metrics) == {"token_accuracy": 0.25, "bits_per_byte": 1.5}


def test_an_older_evaluation_is_left_out_and_named_once(tmp_path: Path) -> None:
    old = {"eval_loss": 2.0, "cp": 4, "eval_tokens": 900}
    run = run_with(tmp_path / "run", {"step": 1, **old}, {"step": 2, **old}, row_of(30, 6.0))
    folder = RunFolder.read(run)
    assert [row.step for row in folder.held_out] == [30, 60] and len(folder.notes) == 1
    assert "an evaluation of metrics.jsonl is left out: it has no planner, eval_documents" in page_of(run).content


def test_the_last_evaluations_are_of_one_step(tmp_path: Path) -> None:
    run = RunFolder.read(run_with(tmp_path / "run", row_of(30, 6.0), row_of(70, 4.0, "books"), row_of(60, 5.0, cp=1)))
    assert [row.cp for row in last_evaluations(run.held_out)] == [1, 4] and [r.step for r in run.held_out] == [
        30,
        60,
        60,
    ]
    assert {name: [row.step for row in rows] for name, rows in evaluations_by_set(run).items()} == {
        "": [30, 60],
        "books": [70],
    }
