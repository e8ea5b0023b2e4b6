"""`longspan doctor`: what it checks, and that something wrong is found."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.cli import doctor_model, processes
from longspan.cli.doctor import Check, proof_checks, version_checks
from longspan.cli.main import main
from longspan.doctor.cases import Case
from longspan.doctor.outcomes import Outcome
from longspan.doctor.proof import Proof, ProofRanks, WorldFacts, proof_json, proof_text, run_proof
from longspan.errors import CommError
from longspan.model import preset_config


def test_versions() -> None:
    good = [("2.11.0", "5.17.0"), ("2.15.0+cpu", "5.24.0")]
    bad = [("2.10.1", "5.17.0"), ("2.16.0", "5.17.0"), ("2.13.0", "6.0")]
    for torch, transformers in (*good, *bad):
        checks = version_checks({"torch": torch, "transformers": transformers, "numpy": "2.0"})
        assert all(check.good is not False for check in checks) == ((torch, transformers) in good)
    assert not all(check.good is not False for check in version_checks({"torch": "2.13.0", "numpy": "2.0"}))


def test_ranks() -> None:
    world = WorldFacts(2, "cpu", "gloo", ({"ranks": [0, 1], "kind": "parent", "seconds": 0.01},))
    exact = Outcome(Case(cp=2), "exact", 1e-16, 1e-15, "weight", 1e-12)
    wrong = replace(exact, status="wrong", loss_error=float("nan"))
    checks = list(proof_checks(Proof((exact, wrong), (world,))))
    assert [check.good for check in checks] == [None, True, False]
    assert checks[0] == Check("group", "parent of 2", "made in 10 ms (2 ranks on cpu, gloo)", None)
    assert "loss nan" in checks[2].found and "allowed 1.0e-12" in checks[1].found


def test_it_runs_and_is_good(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All cases are listed, and every sixth one runs: each dtype, degrees 1 and 2."""
    prove, listed = doctor_model._prove_cases, list[Case]()

    def prove_some(config: Any, cases: list[Case], *of: Any) -> Proof:
        listed.extend(cases)
        return prove(config, cases[::6], *of)

    monkeypatch.setattr(doctor_model, "_prove_cases", prove_some)
    assert main(["doctor", "--world", "2", "--backend", "gloo", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("comparing a small ") and "with the stock one: a minute or more" in err
    result = json.loads(out)
    names = {(check["area"], check["name"]): check["good"] for check in result["checks"]}
    assert result["good"] and names["backend", "gloo"] and names["version", "torch"]
    kinds = ("cp 1, p2p", *(f"cp 2, {kind}" for kind in ("p2p", "all_gather", "a2a", "auto")))
    combinations = {f"{dtype}, {kind}" for dtype in ("float64", "float32") for kind in kinds}
    assert {case.name for case in listed} == combinations and len(listed) == 10
    run = {case.name for case in listed[::6]}
    assert {name for (area, name), good in names.items() if area == "parity" and good} == run
    assert [record["kind"] for record in result["ranks"]["groups"]][:2] == ["control", "parent"]
    assert any(name == "fa4" and good is None for (area, name), good in names.items() if area == "kernel")


def test_a_failure_is_a_cross_and_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for module in (processes, doctor_model):
        monkeypatch.setattr(module, "usable_gpus", lambda: 1)
    assert main(["doctor", "--world", "2", "--backend", "nccl"]) == 1
    assert "2 processes on this machine need a GPU each, and it has 1 GPU; " in (out := capsys.readouterr().out)
    assert "start at most 1, or give --backend gloo" in out

    def fail(*_: object) -> Proof:
        raise CommError("rank 1 left")

    monkeypatch.setattr(doctor_model, "compare_preset", fail)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "✗  parity" in out and "rank 1 left" in out and "1 check failed" in out


def test_a_folder_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    choose = doctor_model._choose_cases
    monkeypatch.setattr(doctor_model, "_choose_cases", lambda *of: choose(*of)[:1])
    values = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 36, "head_dim": 128}))
    command = ["doctor", "--model", str(tmp_path), "--cases", "basic", "--world", "1", "--backend", "gloo"]
    assert main([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("comparing a small ") and "with the stock one: a minute or more" in err
    result = json.loads(out)
    assert result["good"] and {row["status"] for row in result["cases"]} == {"exact"}
    assert [row["name"] for row in result["cases"]] == ["float64, cp 1, p2p"]


def test_a_refused_model_has_its_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refused = Proof((Outcome(Case(cp=2), "refused", message="bypasses transformers' AttentionInterface"),))
    monkeypatch.setattr(doctor_model, "run_proof", lambda *_: refused)
    assert main(["doctor", "--model", "Qwen3ForCausalLM", "--cases", "basic", "--world", "2"]) == 1
    out = capsys.readouterr().out
    assert "NOT proven" in out and "bypasses transformers' AttentionInterface" in out and "✗  float64, cp 2" in out


def test_unknown_models_name_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "qwen33"]) == 2
    assert "'qwen33'; did you mean qwen3" in capsys.readouterr().err


PLACES = [
    (0, 0, "auto", [(4, "gloo")]),
    (1, 0, "auto", [(4, "gloo"), (1, "nccl")]),
    (8, 0, "auto", [(4, "nccl")]),
    (8, 8, "auto", [(8, "nccl")]),
    (1, 2, "gloo", [(2, "gloo")]),
    (1, 0, "nccl", [(1, "nccl")]),
]


@pytest.mark.parametrize(("gpus", "world", "backend", "places"), PLACES)
def test_places(gpus: int, world: int, backend: Any, places: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (processes, doctor_model):
        monkeypatch.setattr(module, "usable_gpus", lambda: gpus)
    made, config = list(doctor_model._list_proof_processes(world, backend)), preset_config("qwen3-tiny", vocab_size=61)
    assert [(place.ranks, place.backend) for place in made] == places
    for place in made:
        dtypes = list(dict.fromkeys(case.dtype for case in doctor_model._choose_cases("whole", place, config)))
        assert dtypes == (["float64", "float32"] if place.backend == "gloo" else ["bfloat16", "float32"])


def test_a_refusal_is_said_once() -> None:
    refused = Outcome(Case(cp=2), "refused", message="attention of\nlayer 0 does not run here")
    others = [replace(refused, case=replace(refused.case, cp=cp)) for cp in (3, 4)]
    different = replace(refused, case=Case(cp=2, tp=2), message="tp 2 does not divide 3 heads")
    text = proof_text(Proof((refused, *others, different)), ["a model"], 3.0)
    assert text.count("attention of layer 0 does not run here") == 1 and text.count("tp 2 does not") == 1
    assert text.count(f"refused  as {refused.case.name}") == 2 and "of 4 cases 4 refused" in text


def test_progress_in_a_file_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = ProofRanks(1, launch=lambda run, task, count, seconds: run(0, task))

    def run(config: Any, cases: list[Case], ranks: ProofRanks, *_: Any) -> Proof:
        return run_proof(config, cases, replace(alone, show=ranks.show))

    monkeypatch.setattr(doctor_model, "run_proof", run)
    monkeypatch.setattr(doctor_model, "SHOWN_IN_FILES", 2)
    cases = [Case(), Case(recompute="full"), Case()]
    config, chosen = preset_config("qwen3-tiny", vocab_size=97), processes.choose_processes(1, "cpu")
    assert doctor_model._prove_cases(config, cases, chosen, 30.0).good
    first, third = capsys.readouterr().err.splitlines()
    assert first.startswith("float64, cp 1, p2p: exact (") and third.startswith("float64, cp 1, p2p: exact (")


def test_text_and_json() -> None:
    exact = Outcome(Case(cp=2), "exact", 1e-16, 2e-15, "weight", 1e-12)
    wrong = replace(exact, status="wrong", gradient_error=0.5)
    refused, crashed = Outcome(Case(tp=2), "refused", message="heads"), Outcome(Case(), "crashed", message="rank 1")
    text = proof_text(Proof((exact, wrong, refused, crashed)), ["a model"], 3.0)
    assert "✓  float64, cp 2, p2p" in text and "gradients 5.0e-01 (weight) from the stock model" in text
    assert "·  float64, tp 2, cp 1, p2p  refused  heads" in text and "✗  float64, cp 1, p2p" in text
    assert text.endswith("NOT proven on this machine: of 4 cases 1 exact, 1 refused, 1 wrong, 1 crashed (3 s)")
    assert Proof((exact, refused)).good and not Proof((exact, replace(refused, case=Case()))).good
    rows = proof_json(Proof((exact, refused)), {}, 3.0)["cases"]
    assert [(row["name"], row["tp"], row["good"]) for row in rows][1] == ("float64, tp 2, cp 1, p2p", 2, True)
