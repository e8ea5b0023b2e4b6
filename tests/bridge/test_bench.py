"""The bench of the bridge on a few ranks over gloo, and its table of bytes against formulas."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.bridge.bridge_layouts import CASES, STUDY, BridgeCase, received_rows

from longspan.testing import backend

ROOT = Path(__file__).parents[2]
SMALL = ["--ranks", "4", "--device", "cpu", "--rows", "32", "--hidden", "8", "--repeats", "1"]


@pytest.mark.whole
def test_both_designs_give_the_same_and_every_row_is_recorded(tmp_path: Path) -> None:
    """The bench refuses to time designs that differ."""
    if backend() == "nccl":
        pytest.skip("on the CPU")
    out = tmp_path / "bridge.json"
    command = [sys.executable, "bench/bridge/bridge.py", *SMALL, "--layouts", "fan-in,fan-out", "--out", str(out)]
    page = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout
    record = json.loads(out.read_text())
    assert [(row["layout"], row["rows"]) for row in record["rows"]] == [("fan-in", 32), ("fan-out", 32)]
    designs = ("bridge", "gathering", "own bytes", "uneven")
    for row in record["rows"]:
        assert set(row["seconds"]) == {f"{name} {way}" for name in designs for way in ("forward", "backward")}
    assert page.strip() == out.with_suffix(".md").read_text().strip()
    assert "| fan-out | 4·1 → 1·2·2 | 32 | both |" in page


@pytest.mark.parametrize("case", [*CASES[8], *STUDY[:3]], ids=lambda case: f"{case.name} {case.label}")
def test_received_rows_are_those_of_the_closed_forms(case: BridgeCase) -> None:
    """Of N rows of a replica, cp c and s encoder replicas to one of the language model, or one to s."""
    rows, cp = case.rows, case.cp
    fan_in, fan_out = case.replicas
    there, back = (1 - 1 / fan_in) * rows / cp, (fan_out - 1 / cp) * rows / fan_in
    assert received_rows(case) == (there, back)
    gathered_there, gathered_back = case.gathered_rows()
    assert gathered_there == cp * there and gathered_back >= back * (4 / 3 if fan_out > 1 else 2 * fan_in) - 1e-9
