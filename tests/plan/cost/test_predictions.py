"""The table of predictions: seconds and bytes are those of the record, and decisions by price within the bar."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from longspan.plan import Machine

BENCH = Path(__file__).resolve().parents[3] / "bench"
MACHINE = Machine.known("H200")


@pytest.fixture(scope="module")
def predictions() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH / "plans"))
        import predictions  # pyright: ignore[reportMissingImports]

        return predictions  # pyright: ignore[reportUnknownVariableType]


@pytest.fixture(scope="module", params=[9, pytest.param(1, marks=pytest.mark.whole)])
def share(request: pytest.FixtureRequest) -> int:
    """Daily every ninth record, with all of its plans of the same documents."""
    return request.param


@pytest.fixture(scope="module")
def rows(predictions: Any, share: int) -> list[Any]:
    measured = list(predictions.measured_rows())
    records = [*dict.fromkeys(row.record for row in measured)][::share]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictions, "measured_rows", lambda: [row for row in measured if row.record in records])
        return predictions.predict_all(MACHINE)


def test_ratios_are_those_of_the_record(predictions: Any, rows: list[Any], share: int) -> None:
    recorded = ratios((BENCH / "records" / "predictions.md").read_text().splitlines())
    now = ratios("\n".join(predictions.text_of(rows, [])).splitlines())
    wanted = {name: recorded[name] for name in (now if share > 1 else recorded)}
    assert len(now) > 100 // share and now == pytest.approx(wanted, abs=0.011), "prices have changed: make predictions"


def test_adapters_and_weights_on_the_host_are_within_six_percent(predictions: Any) -> None:
    """Without what adapters read and write, long rows are 6 to 8 % short."""
    rows = [row for row in predictions.measured_rows() if not row.older]
    adapted = [row for row in rows if row.record == "frozen-H200"]
    on_host = [row for row in rows if "weights and states on the host" in row.settings and row.rows == "65,536"]
    assert (len(adapted), len(on_host)) == (7, 1)
    assert [row.predict(MACHINE) / row.seconds for row in adapted + on_host] == pytest.approx([1.0] * 8, abs=0.06)


def ratios(lines: Iterable[str]) -> dict[str, float]:
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ") and " --- " not in line]
    return {" | ".join(row[:6]): float(row[8]) for row in cells if len(row) == 10 and row[0] != "record"}


def test_peaks_of_memory_are_those_of_the_record(predictions: Any) -> None:
    """Of dense models, mixtures, hybrids and adapters; compiled layers, states on the host, two ranks of each type."""
    now = "\n".join(predictions.text_of([], predictions.predict_peaks()))
    texts = (now, (BENCH / "records" / "predictions.md").read_text())
    planned, recorded = (text.partition("## Peaks of memory")[2].strip() for text in texts)
    assert planned == recorded and len(planned.splitlines()) > 40, "plans of memory have changed: make predictions"


def test_seconds_and_choices_are_within_the_bar(predictions: Any, rows: list[Any], share: int) -> None:
    current = [p for p in rows if not p.row.older]
    assert len(current) >= 131 // share and sum(p.row.is_training_step for p in current) >= 69 // share
    assert not [p for p in current if p.is_off]
    chosen = predictions.choices(rows)
    assert len(chosen) >= (4 if share > 1 else 24)
    assert not [c for c in chosen if c.is_off]
