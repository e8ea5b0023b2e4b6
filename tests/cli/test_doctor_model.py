"""Where a named model is proven, in which types, and what is printed."""

from dataclasses import replace
from typing import Any

import pytest

from longspan.cli import doctor_model, processes
from longspan.doctor.cases import Case
from longspan.doctor.proof import Outcome, Proof, proof_json, proof_text
from longspan.model import preset_config

PLACES = [
    (0, 0, "auto", [(4, "gloo")]),
    (1, 0, "auto", [(4, "gloo"), (1, "nccl")]),
    (8, 0, "auto", [(4, "nccl")]),
    (8, 8, "auto", [(8, "nccl")]),
    (1, 2, "gloo", [(2, "gloo")]),
    (1, 0, "nccl", [(1, "nccl")]),
]


@pytest.mark.parametrize(("gpus", "world", "backend", "places"), PLACES)
def test_places(
    gpus: int, world: int, backend: Any, places: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (processes, doctor_model):
        monkeypatch.setattr(module, "usable_gpus", lambda: gpus)
    made, config = list(doctor_model._list_proof_processes(world, backend)), preset_config("qwen3-tiny", vocab_size=61)
    assert [(place.ranks, place.backend) for place in made] == places
    for place in made:
        dtypes = list(dict.fromkeys(case.dtype for case in doctor_model._choose_cases("whole", place, config)))
        assert dtypes == (["float64", "float32"] if place.backend == "gloo" else ["bfloat16", "float32"])


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
