"""The plan of memory on a run's page: bytes by what they are for, what layers keep, and the measured peak."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspan.plan.memory.memory_plan import measures_text
from longspan.report.memory_section import memory_section, peak_of_plan, peak_of_steps
from longspan.report.run_folder import RunFolder
from tests.report.runs import FACTS, write_run

GIB = 1 << 30
NOTHING = dict.fromkeys(
    ("weights", "gradients", "states", "gathered", "kept", "work", "logits", "communicators", "total"), 0
)
DEVICE = NOTHING | {"weights": 4 * GIB, "states": 8 * GIB, "kept": 40 * GIB, "communicators": GIB, "total": 53 * GIB}
MEMORY: dict[str, Any] = {
    "measures": ["selective+host"] * 2 + ["none"] * 3,
    "device": DEVICE,
    "host": NOTHING | {"kept": 3 * GIB, "total": 3 * GIB},
}


def run_with(tmp_path: Path, memory: object) -> RunFolder:
    write_run(tmp_path, steps=8)
    (tmp_path / "run.json").write_text(json.dumps(FACTS | {"memory": memory}))
    return RunFolder.read(tmp_path)


def test_bytes_by_kind_next_to_the_measured_peak(tmp_path: Path) -> None:
    run = run_with(tmp_path, MEMORY)
    page = memory_section(run)
    assert "2 of 5 layers keep their input and attention&#x27;s output in host memory, 3 keep all." in page
    for words in (
        "forward and backward</td><td>40 GiB</td><td>3 GiB</td>",
        "<td>total</td><td>53 GiB</td><td>3 GiB</td>",
    ):
        assert words in page
    assert "<td>total without communicators</td><td>52 GiB</td>" in page and "<td>logits" not in page
    assert peak_of_plan(run) == 52 * GIB and peak_of_steps(run) == 600_000_000
    assert "<td>measured peak</td><td>572.2 MiB</td>" in page


@pytest.mark.parametrize("memory", [{}, {"device": {}}, {"device": {"total": "much"}, "measures": 3}])
def test_a_run_without_a_plan_of_memory_has_no_such_section(memory: object, tmp_path: Path) -> None:
    run = run_with(tmp_path, memory)
    assert memory_section(run) == "" and peak_of_plan(run) == 0


def test_measures_in_words() -> None:
    assert measures_text(["none"] * 4) == "4 of 4 layers keep all"
    assert measures_text(["full", "none", "none"]) == "1 of 3 layers keep their input, 2 keep all"
