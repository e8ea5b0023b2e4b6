"""`train.profile_steps`: traces of all ranks and the table of the step in the run's folder, its log and its report."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longspan.run import profile
from longspan.run.profile import FOLDER, TABLE_FILE
from longspan.testing import run_ranks
from tests.report.pages import parts_of, report_of
from tests.train.small import small_config, train_rank


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = {"train__steps": 2, "train__profile_steps": (2, 3), "evaluation__every": 0}
    config = small_config(tmp_path_factory.mktemp("profiled"), **keys)
    run_ranks(train_rank, 2, config, 2)
    return Path(config.run.dir)


def test_each_rank_has_a_trace_of_each_step(run: Path) -> None:
    (folder,) = (run / FOLDER).iterdir()
    assert folder.name == "step-000002"
    assert {file.name for file in folder.iterdir()} == {"rank-0.json.gz", "rank-1.json.gz", TABLE_FILE}
    for rank in (0, 1):
        events = json.loads(gzip.decompress((folder / f"rank-{rank}.json.gz").read_bytes()))["traceEvents"]
        names = {event.get("name", "") for event in events}
        assert any(name.startswith("aten::") for name in names), "operators of the forward pass"
        assert any("gloo:" in name for name in names) and any("Optimizer" in name for name in names), names


def test_the_table_of_the_first_rank_is_in_the_report(run: Path) -> None:
    table = (run / FOLDER / "step-000002" / TABLE_FILE).read_text()
    assert table.startswith("step 2, rank 0\n") and "Self CPU time total" in table
    assert "aten::" in table and len(table.splitlines()) < 2 * profile.LONGEST
    assert parts_of(report_of(run), "text") == [table]


def test_a_step_that_is_not_asked_for_is_not_slowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("profiled")

    monkeypatch.setattr("torch.profiler.profile", refuse)
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    profiles = profile.StepProfiles((3,), tmp_path, world, print)
    with profiles.profile_step(2):
        pass
    profiles.write_files()
    with pytest.raises(AssertionError, match="profiled"), profiles.profile_step(3):
        pass
