"""The runs that need GPUs: their commands are well formed, and a list of runs goes on where it was ended."""

import json
from pathlib import Path

import pytest
from bench.on_gpus import RUNS, GpuRun, choose_runs, take_runs

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_commands_name_files_that_are_there(run: GpuRun, tmp_path: Path) -> None:
    words = run.words(tmp_path)
    assert not any("{" in word for word in words)
    scripts = [word for word in words if word.startswith("bench/")]
    assert all((ROOT / script).is_file() for script in scripts)


def test_runs_go_on_where_they_were_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = GpuRun("good", 1, "{python} -c \"print('fine')\"")
    bad = GpuRun("bad", 1, '{python} -c "raise SystemExit(3)"')
    slow = GpuRun("slow", 1, '{python} -c "import time; time.sleep(60)"')
    long = GpuRun("long", 900, "{python} --version")
    assert not take_runs([good, bad, slow, long], tmp_path, 60)
    rows = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(row["name"], row["status"]) for row in rows] == [("good", 0), ("bad", 3), ("slow", 124)]
    assert "fine" in (tmp_path / "good.log").read_text()
    assert "it takes 900" in capsys.readouterr().out
    assert take_runs([good], tmp_path, 60)
    assert "done before" in capsys.readouterr().out


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"step-33k; runs are first-steps"):
        choose_runs("first-steps,step-33k")
