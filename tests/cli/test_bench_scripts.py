"""The scripts bench/attention/attention_types.py and bench/evaluation/evaluation_degrees.py, on a few CPU processes."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench.attention import attention_types
from bench.attention.attention_types import AttentionFlags, AttentionSettings, forward_flops
from bench.evaluation import evaluation_degrees
from bench.evaluation.evaluation_degrees import CASES, EvalBenchFlags, cases_of, make_settings

from longspan.errors import ConfigError


def settings(**changes: Any) -> AttentionSettings:
    return attention_types.make_settings(AttentionFlags(**changes), 2, "gloo", ["bench"])


def test_flops_of_the_lower_half() -> None:
    """4 * S^2 * heads * head size / 2, for each document."""
    assert forward_flops(settings(heads=32, head_size=128), 16384) == 4 * 16384**2 * 32 * 128 / 2
    assert forward_flops(settings(heads=1, head_size=1, documents=3), 10) == 2 * (16 + 9 + 9)
    assert forward_flops(settings(heads=1, head_size=1, window=4), 10) == 4 * (10 * 4 - 8)
    assert forward_flops(settings(heads=1, head_size=1, window=400), 10) == 2 * 100


def test_attention_on_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "records" / "a.json"
    words = ["--world", "2", "--lengths", "96,130", "--repeats", "2", "--warmup", "1", "--documents", "2"]
    assert attention_types.main([*words, "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(out.read_text())
    of_longspan = [row for row in record["rows"] if row["name"].startswith("longspan")]
    assert [(row["name"], row["length"]) for row in of_longspan] == [
        (f"longspan {kind}", length) for kind in ("p2p", "all_gather", "a2a", "a2a+p2p") for length in (96, 130)
    ]
    assert all(row["seconds"] > row["forward_seconds"] > 0 and row["tflops_per_device"] > 0 for row in of_longspan)
    checks = {row["name"]: row for row in record["checks"]}
    assert checks["longspan p2p"]["good"] and checks["longspan p2p"]["errors"].keys() == {"output", "dq", "dk", "dv"}
    peers = [row for row in record["rows"] if "missing" in row]
    assert len(peers) == 4 and all(row["name"].startswith("torch context_parallel") for row in peers)
    assert {"machine", "versions", "command"} <= record.keys() and record["command"].startswith(
        f"python {attention_types.PROGRAM}"
    )
    table = out.with_suffix(".md").read_text()
    assert (
        table == attention_types.record_markdown(record)
        and "| longspan p2p | 96 |" in table
        and "2 packed documents" in table
    )
    assert "not available: ValueError: its attention kernels run on CUDA only" in attention_types.record_text(record)


def test_contiguous_rows_are_in_the_record_and_its_title(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--world", "2", "--lengths", "41", "--repeats", "1", "--warmup", "0", "--no-peers", "--types", "a2a,p2p"]
    assert attention_types.main([*words, "--partition", "contiguous", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["partition"] == "contiguous" and all(row["good"] for row in record["checks"])
    assert "float32, longspan's rows contiguous, kernel" in attention_types.record_text(record)
    assert "contiguous" not in attention_types.record_text(record | {"partition": "zigzag"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--types", "p2p,ring"], "--types 'p2p,ring': this release has p2p and all_gather and a2a and a2a+p2p"),
        (["--world", "2", "--hierarchical", "2,2"], "give two sizes whose product is the 2 ranks"),
        (["--lengths", "16K"], "--lengths '16K' is not a list of integers"),
        (["--world", "2", "--cuda-graph"], "--cuda-graph needs a GPU for each rank; these 2 talk through gloo"),
        (["--lengths", "0"], "1 documents do not share 0 rows"),
        (["--dtyp", "x"], "attention_types.py has no flag --dtyp: did you mean '--dtype'?"),
    ],
)
def test_bad_input(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        attention_types.main(words)
    assert message in str(error.value)


def test_a_case_on_four_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "eval.json"
    words = ["--world", "4", "--cases", "8k-tp2", "--preset", "qwen3-tiny", "--tokens", "32", "--layers", "1"]
    words += ["--vocabulary", "64", "--warmup", "0", "--repeats", "1", "--out", str(out), "--json"]
    assert evaluation_degrees.main(words) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record == json.loads(out.read_text()) and record["left_out"] == []
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
    assert out.with_suffix(".md").read_text() == evaluation_degrees.record_markdown(record)
    left = evaluation_degrees.record_text(record | {"left_out": ["8k-pp4"]})
    assert "Left out, for they need another number of ranks: 8k-pp4." in left


def test_published_figures_stand_beside_unchanged_cases() -> None:
    assert sum(case.known is not None for case in cases_of("", gpu=True)) == 6
    assert not any(case.known for case in cases_of("", gpu=True, tokens=64))
    assert [case.name for case in CASES if case.runs_on(4)] == [case.name for case in CASES if case.ranks <= 4]
    assert [case.name for case in CASES if case.degrees(4) == (1, 2)] == [
        "1k-tp2",
        "8k-tp2",
        "1k-tp1",
        "8k-tp1",
        "8k-pp2",
        "16k-pp2",
    ]
    assert all(case.runs_on(8) and case.degrees(8) == (1, 2) for case in CASES)
    assert CASES[0].configuration(10240).num_hidden_layers == 4


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (EvalBenchFlags(cases="9k"), "--cases has 9k; cases are 1k-tp2, 8k-tp2"),
        (EvalBenchFlags(cases="8k-pp4"), "none of the cases runs on 2 ranks; they need multiples of: 8k-pp4 4"),
        (EvalBenchFlags(documents=0), "--documents is 0"),
        (EvalBenchFlags(repeats=0), "--repeats 0"),
    ],
)
def test_evaluations_that_cannot_run(flags: EvalBenchFlags, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_settings(flags, 2, "gloo", ["bench"])
