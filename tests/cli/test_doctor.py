"""`longspan doctor`: what it checks, and that something wrong is found."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.cli import doctor
from longspan.cli.doctor import Check, rank_checks, version_checks
from longspan.cli.main import main
from longspan.doctor.cases import Case
from longspan.doctor.proof import Outcome, outcome_text
from longspan.errors import CommError

FLAT = ["p2p", "all_gather", "a2a", "auto"]
TYPES = {1: ["p2p"], 2: FLAT, 3: [], 4: [*FLAT, "a2a+p2p (2, 2)"]}  # by degree


@pytest.mark.parametrize(
    ("installed", "good"),
    [
        ({"torch": "2.11.0", "transformers": "5.17.0", "numpy": "2.0"}, True),
        ({"torch": "2.15.0+cpu", "transformers": "5.24.0", "numpy": "2.0"}, True),
        ({"torch": "2.10.1", "transformers": "5.17.0", "numpy": "2.0"}, False),
        ({"torch": "2.16.0", "transformers": "5.17.0", "numpy": "2.0"}, False),
        ({"torch": "2.13.0", "transformers": "6.0", "numpy": "2.0"}, False),
        ({"torch": "2.13.0", "numpy": "2.0"}, False),
    ],
)
def test_versions(installed: dict[str, str], good: bool) -> None:
    assert all(check.good is not False for check in version_checks(installed)) == good


def _parity(case: Case, **changes: Any) -> dict[str, Any]:
    outcome = replace(Outcome(case, "exact", 1e-16, 1e-15, "weight", 1e-12), **changes)
    return outcome.row() | {"found": outcome_text(outcome)}


def test_ranks() -> None:
    groups = [{"ranks": [0, 1], "kind": "parent", "seconds": 0.01}]
    details = {"ranks": 2, "device": "cpu", "backend": "gloo", "groups": groups}
    wrong = _parity(Case(cp=2), status="wrong", loss_error=float("nan"))
    checks = list(rank_checks(details | {"parity": [_parity(Case(cp=2)), wrong]}))
    assert [check.good for check in checks] == [None, True, False]
    assert checks[0] == Check("group", "parent of 2", "made in 10 ms (2 ranks on cpu, gloo)", None)
    assert "loss nan" in checks[2].found and "allowed 1.0e-12" in checks[1].found


def test_levels_are_said_once_whatever_the_dtype() -> None:
    levels = "level one, a2a: (0, 1) (2, 3); level two, p2p: (0, 2) (1, 3)"
    hierarchical = _parity(Case(cp=4, cp_comm_type="a2a+p2p", sizes=(2, 2)), levels=(levels,))
    details = {"ranks": 4, "device": "cpu", "backend": "gloo", "groups": []}
    checks = list(rank_checks(details | {"parity": [hierarchical, hierarchical | {"dtype": "float32"}]}))
    assert checks[0].name == "float64, cp 4, a2a+p2p (2, 2)"
    assert checks[2:] == [Check("group", "cp 4, a2a+p2p (2, 2)", f"ranks of {levels}", None)]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.whole)])
def test_it_runs_and_is_good(capsys: pytest.CaptureFixture[str], ranks: int) -> None:
    assert main(["doctor", "--world", str(ranks), "--backend", "gloo", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("comparing a small ") and "with the stock one: a minute or more" in err
    result = json.loads(out)
    names = {(check["area"], check["name"]): check["good"] for check in result["checks"]}
    assert result["good"] and names["backend", "gloo"] and names["version", "torch"]
    combinations = {
        f"{t}, cp {cp}, {w}" for t in ("float64", "float32") for cp in range(1, ranks + 1) for w in TYPES[cp]
    }
    assert {name for (area, name), good in names.items() if area == "parity" and good} == combinations
    assert [record["kind"] for record in result["ranks"]["groups"]][:2] == ["control", "parent"]
    levels = [check["found"] for check in result["checks"] if "level one" in check["found"]]
    assert levels == ["ranks of level one, a2a: (0, 1) (2, 3); level two, p2p: (0, 2) (1, 3)"] * (ranks == 4)
    assert any(name == "fa4" and good is None for (area, name), good in names.items() if area == "kernel")


def test_a_failure_is_a_cross_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(flags: object) -> dict:
        raise CommError("rank 1 left")

    monkeypatch.setattr(doctor, "_compare_small_model", fail)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "✗  parity" in out and "rank 1 left" in out and "1 check failed" in out


def test_nccl_needs_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("longspan.cli.processes.usable_gpus", lambda: 1)
    assert main(["doctor", "--world", "2", "--backend", "nccl"]) == 1
    assert (
        "2 processes on this machine need a GPU each, and it has 1 GPU; start at most 1, or give --backend gloo"
        in capsys.readouterr().out
    )


def _qwen3_folder(folder: Path) -> Path:
    values = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 36, "head_dim": 128}))
    return folder


def test_a_folder_is_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["doctor", "--model", str(_qwen3_folder(tmp_path)), "--cases", "basic", "--world", "2"]
    assert main([*command, "--backend", "gloo", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("comparing a small ") and "with the stock one: a minute or more" in err
    result = json.loads(out)
    assert result["good"] and {row["status"] for row in result["cases"]} == {"exact"}
    assert [row["name"] for row in result["cases"]][:2] == ["float64, cp 2, p2p", "float64, cp 2, all_gather"]
    kernel = result["model"]["kernels"][0]
    assert kernel["attention"] == "heads of 128" and kernel["layers"] == 36 and kernel["here"].startswith("cpu_flash")
    assert kernel["on_gpus"].startswith("fa4 (needs")


def test_a_refused_model_fails_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "FalconForCausalLM", "--cases", "basic", "--world", "2"]) == 1
    out = capsys.readouterr().out
    assert "NOT proven" in out and "bypasses transformers' AttentionInterface" in out and "✗  float64, cp 2" in out


def test_unknown_models_name_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "qwen33"]) == 2
    assert "'qwen33'; did you mean qwen3" in capsys.readouterr().err
