"""`longspan report`: the page of a run, or of a plan."""

import json
from pathlib import Path

import pytest

from longspan.cli.main import main
from tests.report.pages import parts_of, value_of
from tests.report.runs import mixed_plan, write_run


def test_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "first")
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out.strip() == str(path / "report.html")
    assert main(["report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(path / "report.html")}


def test_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(mixed_plan(4).to_json())
    assert main(["report", str(tmp_path / "plan.json")]) == 0
    (plans,) = parts_of(value_of((tmp_path / "plan.html").read_text()), "plans")
    assert plans["plans"][0]["pictures"].keys() == {"seconds", "rows"}
    assert main(["report", str(tmp_path / "plan.json"), "--out", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").is_file() and capsys.readouterr().out.endswith("other.html\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere is not the folder of a run: no such folder"),
        (["."], "is not the folder of a run"),
        ([".", "--out", "x.html"], "--out is for plans"),
        (["bad.json"], "JSON"),
    ],
)
def test_bad_input(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text("{")
    assert main(["report", *words]) == 2
    assert message in capsys.readouterr().err
