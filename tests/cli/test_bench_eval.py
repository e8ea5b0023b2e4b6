"""`longspan bench eval` on four CPU processes: both degrees in both directions, what is left out, what is refused."""

import json
from pathlib import Path

import pytest

from longspan.bench.eval.cases import CASES, cases_of
from longspan.bench.eval.flags import EvalBenchFlags, make_settings
from longspan.bench.eval.record import record_markdown, record_text
from longspan.cli.main import main
from longspan.errors import ConfigError


def test_a_case_on_four_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "eval.json"
    words = ["--world", "4", "--cases", "8k-tp2,8k-pp4", "--preset", "qwen3-tiny", "--tokens", "32", "--layers", "1"]
    words += ["--vocabulary", "64", "--warmup", "0", "--repeats", "1", "--out", str(out), "--json"]
    assert main(["bench", "eval", *words]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record == json.loads(out.read_text()) and record["left_out"] == ["8k-pp4"]
    assert "8k-pp4 is left out: it runs on multiples of 8 ranks, here are 4" in captured.err
    (row,) = record["rows"]
    fixed, planned = row["runs"][:4], row["runs"][4:]
    assert [(run["trained"], run["degree"], run["widest"]) for run in fixed] == [
        (1, 1, 1),
        (1, 2, 2),
        (2, 2, 2),
        (2, 1, 1),
    ]
    assert [run["micro_batches"] for run in fixed] == [2, 4, 4, 2] and planned
    assert all(run["tokens"] == 4 * 32 and run["mean"] == run["median"] == run["seconds"][0] for run in row["runs"])
    assert all(run["peak_bytes"] == 0 for run in row["runs"])  # of GPUs
    assert 0 < row["difference"] <= 1e-6 or fixed[0]["loss"] == fixed[1]["loss"]
    assert fixed[0]["loss"] > fixed[2]["loss"] == pytest.approx(planned[0]["loss"], rel=1e-6)  # a step between them
    assert out.with_suffix(".md").read_text() == record_markdown(record)
    assert "Left out, for they need another number of ranks: 8k-pp4." in record_text(record)


def test_published_figures_stand_beside_unchanged_cases() -> None:
    assert sum(case.known is not None for case in cases_of("", gpu=True)) == 6
    assert not any(case.known for case in cases_of("", gpu=True, tokens=64))
    assert [case.name for case in CASES if case.runs_on(4)] == ["1k-tp2", "8k-tp2", "8k-pp2", "16k-pp2"]
    assert [case.name for case in CASES if not case.runs_on(8)] == []
    assert CASES[0].configuration(10240).num_hidden_layers == 4


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (EvalBenchFlags(cases="9k"), "--cases has 9k; cases are 1k-tp2, 8k-tp2"),
        (EvalBenchFlags(cases="8k-pp4"), "none of the cases runs on 4 ranks; they need multiples of: 8k-pp4 8"),
        (EvalBenchFlags(documents=0), "--documents is 0"),
        (EvalBenchFlags(repeats=0), "--repeats 0"),
    ],
)
def test_refusals(flags: EvalBenchFlags, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_settings(flags, 4, "gloo", ["bench"])
