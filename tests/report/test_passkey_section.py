"""Passkey retrieval in the report of a run: the newest grid of each set, and curves where there are several steps."""

from pathlib import Path
from typing import Any

from longspan.evaluation.result import PasskeyGrid
from longspan.report import write_report
from longspan.report.passkey import passkey_grids
from tests.report.runs import train_row, write_run


def row(step: int, retrieved: int, name: str = "keys") -> dict[str, Any]:
    grid = PasskeyGrid((512, 1024), (0.0, 1.0), 4, ((4, 4), (retrieved, 0)), ((0.1, 0.1), (2.0, 0.7)), step=step, cp=2)
    return {"step": step, "eval_name": name, "eval_loss": 1.0, "eval_tokens": 9, "cp": 2, "passkey": grid.to_json()}


def test_the_newest_grid_of_each_set_is_drawn_and_the_steps_as_curves(tmp_path: Path) -> None:
    rows = [train_row(step) for step in range(1, 5)]
    rows += [row(2, 1), row(4, 3), row(2, 2), row(4, 0, "other")]  # step 2 was repeated
    html = write_report(write_run(tmp_path / "run", rows=rows)).read_text()
    assert html.count("<h2>Passkey retrieval</h2>") == 1
    assert html.count("Passkey retrieval (keys): 11 of 16 keys retrieved</text>") == 1
    assert html.count("Passkey retrieval (other): 8 of 16 keys retrieved</text>") == 1
    assert html.count("<b>Keys retrieved (keys)</b>") == 1
    assert "Keys retrieved (other)" not in html
    grids = passkey_grids(rows)
    assert [(name, grid.step, grid.retrieved[1][0]) for name, grid in grids] == [
        ("keys", 2, 2),
        ("keys", 4, 3),
        ("other", 4, 0),
    ]


def test_a_run_without_it_has_no_section_and_a_damaged_grid_is_left_out(tmp_path: Path) -> None:
    rows = [train_row(1), row(1, 0) | {"passkey": {"lengths": [1]}}]
    assert "Passkey retrieval" not in write_report(write_run(tmp_path / "run", rows=rows)).read_text()
