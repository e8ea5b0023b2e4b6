"""The table of predictions: it can be made, and decisions by price stay within the bar."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.plan import Machine

BENCH = Path(__file__).resolve().parents[3] / "bench"
MACHINE = Machine.known("H200")


@pytest.fixture(scope="module")
def predictions() -> Any:
    """The module bench/plans/predictions.py, which imports its neighbours by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH / "plans"))
        import predictions  # pyright: ignore[reportMissingImports]

        return predictions  # pyright: ignore[reportUnknownVariableType]


@pytest.fixture(scope="module")
def rows(predictions: Any) -> list[Any]:
    return predictions.predict_all(MACHINE)


def test_ratios_are_those_of_the_record(predictions: Any, rows: list[Any]) -> None:
    recorded = ratios((BENCH / "records" / "predictions.md").read_text().splitlines())
    now = ratios("\n".join(predictions.text_of(rows, [])).splitlines())
    assert len(now) > 100 and now == pytest.approx(recorded, abs=0.011), "prices have changed: make predictions"


def ratios(lines: Iterable[str]) -> dict[str, float]:
    """Predicted over measured of each row of a table, by the columns before the seconds."""
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ") and " --- " not in line]
    return {" | ".join(row[:6]): float(row[8]) for row in cells if len(row) == 10 and row[0] != "record"}


def test_seconds_and_choices_are_within_the_bar(predictions: Any, rows: list[Any]) -> None:
    current = [p for p in rows if not p.row.older]
    assert len(current) >= 131 and sum(p.row.is_training_step for p in current) >= 69
    assert not [p for p in current if p.is_off]
    chosen = predictions.choices(rows)
    assert len(chosen) >= 25
    assert not [c for c in chosen if c.is_off]


def test_the_chosen_of_a_set_is_the_one_of_least_predicted_seconds(predictions: Any, rows: list[Any]) -> None:
    layers = [p for p in rows if p.row.record == "attention-2xH200" and p.row.rows == "65,536"]
    slow = [p._replace(row=replace(p.row, seconds=p.row.seconds * (1 + (p.row.kind == "a2a")))) for p in layers]
    (choice,) = predictions.choices(slow)
    assert choice.chosen.row.kind == "a2a" != choice.best.row.kind and choice.plans == 3
    assert choice.regret == pytest.approx(choice.chosen.row.seconds / choice.best.row.seconds - 1) and choice.is_off
    assert predictions.choices(layers[:1]) == [] == predictions.choices([layers[0]] * 2)


def test_layers_of_today_are_in_no_burst(rows: list[Any]) -> None:
    bursts = {p.row.record for p in rows if p.row.older.startswith("in a burst")}
    assert bursts and all(p.row.seconds < 0.25 / 13 for p in rows if p.row.older.startswith("in a burst"))
    assert not bursts & {"attention-2xH100", "attention-packed-2xH100", "attention-window-2xH100"}


def test_a_price_that_changes_is_noticed(rows: list[Any]) -> None:
    long = [p.row for p in rows if p.row.record == "step-64k-2xH200" and not p.row.older]
    slower = Machine.from_json(MACHINE.to_json() | {"product_flops_per_second": 500e12})
    assert long and all(row.predict(slower) > 1.05 * row.seconds for row in long)
