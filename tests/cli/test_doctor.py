"""`longspan doctor`: what it checks, and that something wrong is found."""

import json

import pytest

from longspan.cli import doctor
from longspan.cli.doctor import Check, rank_checks, version_checks
from longspan.cli.main import main
from longspan.errors import CommError


@pytest.mark.parametrize(
    ("found", "good"),
    [
        ({"torch": "2.11.0", "transformers": "5.17.0", "numpy": "2.0"}, True),
        ({"torch": "2.13.0+cpu", "transformers": "5.23.0", "numpy": "2.0"}, True),
        ({"torch": "2.10.1", "transformers": "5.17.0", "numpy": "2.0"}, False),
        ({"torch": "2.14.0", "transformers": "5.17.0", "numpy": "2.0"}, False),
        ({"torch": "2.13.0", "transformers": "6.0", "numpy": "2.0"}, False),
        ({"torch": "2.13.0", "numpy": "2.0"}, False),
    ],
)
def test_versions(found: dict[str, str], good: bool) -> None:
    assert all(check.good is not False for check in version_checks(found)) == good


def _parity(**changes: object) -> dict:
    found = {"dtype": "float64", "cp": 2, "cp_comm_type": "p2p", "loss_error": 1e-16, "gradient_error": 1e-15}
    return found | {"tolerance": 1e-12, "good": True} | changes


def test_ranks() -> None:
    groups = [{"ranks": [0, 1], "kind": "parent", "seconds": 0.01}]
    details = {"ranks": 2, "device": "cpu", "backend": "gloo", "groups": groups}
    checks = list(rank_checks(details | {"parity": [_parity(), _parity(good=False, loss_error=float("nan"))]}))
    assert [check.good for check in checks] == [None, True, False]
    assert checks[0] == Check("group", "parent of 2", "made in 10 ms (2 ranks on cpu, gloo)", None)
    assert "loss nan" in checks[2].found and "allowed 1.0e-12" in checks[1].found


def test_it_runs_and_is_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--world", "2", "--backend", "gloo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {(check["area"], check["name"]): check["good"] for check in found["checks"]}
    assert found["good"] and names["backend", "gloo"] and names["version", "torch"]
    wanted = {f"{t}, cp {cp}, {c}" for t in ("float64", "float32") for cp in (1, 2) for c in ("p2p", "all_gather")}
    assert {name for (area, name), good in names.items() if area == "parity" and good} == wanted
    assert [record["kind"] for record in found["ranks"]["groups"]][:2] == ["control", "parent"]


def test_a_failure_is_a_cross_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(flags: object) -> dict:
        raise CommError("rank 1 left")

    monkeypatch.setattr(doctor, "_run_ranks", fail)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "✗  parity" in out and "rank 1 left" in out and "1 check failed" in out


def test_nccl_needs_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert main(["doctor", "--world", "2", "--backend", "nccl"]) == 1
    assert "there are 1 GPUs for 2 ranks" in capsys.readouterr().out
