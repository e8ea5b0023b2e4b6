"""Families chosen from the census: one for each kind of attention on two ranks, and a few that must be refused."""

import json
from functools import cache
from pathlib import Path

import pytest
from bench.census.images import image_names, image_text
from bench.census.models import default_config, names
from bench.census.page import COMMAND, page
from bench.census.record import as_text, changes, failed
from transformers import CONFIG_MAPPING

from longspan.doctor import proof
from longspan.doctor.cases import Case
from longspan.doctor.outcomes import Outcome
from longspan.doctor.proof import ProofRanks, run_proof
from longspan.doctor.stock import ExpectedAnswer, ModelAnswer
from longspan.model.exactness.small_copies import shrink_configuration

EXACT = {
    "gpt_oss": "sinks, a window in every other layer, yarn, experts",
    "gemma2": "soft caps of scores and logits",
    "gemma3_text": "windows, two kinds of rotary positions",
    "deepseek_v3+yarn": "MLA, groups of experts, a bias of the router",
    "llama+llama3": "llama3's rotary positions",
    "qwen3+yarn": "yarn, norms of queries and keys",
    "mistral": "a window in every layer",
    "granite": "multipliers of embeddings, scores, residuals and logits",
    "mixtral": "experts",
    "phi3+longrope": "frequencies by a document's length",
    "gpt2": "learnt positions, tied weights",
    "opt": "learnt positions from 2, a decoder inside its base model",
    "cohere2": "layers without positions, parallel blocks",
    "nemotron": "layers that do not hand keywords down",
    "gemma3n_text": "keys and values shared by the last layers, several streams",
    "minicpm3": "MLA, scaled embeddings",
    "gpt_neox": "attention and network side by side",
    "qwen2_moe": "experts and a shared one behind a gate",
    "deepseek_v4": "entries made of windows of rows, some chosen, several streams, experts by token id",
    "minimax_m3_vl_text": "blocks of keys chosen for each key/value head, full layers",
    "qwen4_exp": "pools of keys, gated delta nets, several streams",
}
REFUSED = {
    "falcon": "bypasses",
    "mamba": "linear_attention",
    "bart": "encoder_attn",
    "gemma3_text+bidirectional": "not causal",
}
WITH_IMAGES = {
    "qwen3_vl_moe": "experts, DeepStack, positions in three parts",
    "llava_next": "tiles, unpadded, and a parameter that ends lines of patches",
    "smolvlm": "tiles in a dim of their own",
}
# In the whole suite: other tests of this kind of attention or router compare these with the stock model in CI.
WHOLE = ("gemma2", "mistral", "mixtral", "opt", "nemotron", "gpt_oss", "deepseek_v3+yarn", "phi3+longrope")
WHOLE += ("granite", "cohere2", "qwen2_moe", "gpt_neox", "smolvlm", "llama+llama3", "qwen3+yarn", "llava_next")
WHOLE += ("gemma3_text", "minicpm3", "gemma3n_text", "qwen3_vl_moe", "deepseek_v4")
WHOLE += ("minimax_m3_vl_text", "qwen4_exp")
CASES = (Case(cp=2, plan="several", recompute="full"), Case(cp=2, cp_comm_type="all_gather"))
IMAGE_CASES = (Case(cp=2, plan="several", recompute="full", encoder=1),)


@cache
def _there() -> set[str]:
    return {*names(), *image_names()}


def _prove(name: str, cases: tuple[Case, ...], ranks: ProofRanks) -> tuple[Outcome, ...]:
    if name not in _there():
        pytest.skip("this transformers has no such class")
    if name in WITH_IMAGES:
        return run_proof(shrink_configuration(CONFIG_MAPPING[name](), images=True), IMAGE_CASES, ranks).outcomes
    return run_proof(shrink_configuration(default_config(name)), cases, ranks).outcomes


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.whole] * (name in WHOLE)) for name in (*EXACT, *WITH_IMAGES)]
)
def test_a_family_is_exact(name: str) -> None:
    outcomes = _prove(name, CASES if name in WHOLE else CASES[:1], ProofRanks(2))
    assert {outcome.status for outcome in outcomes} == {"exact"}, [outcome.row() for outcome in outcomes]


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_is_refused_with_its_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "falcon":  # one stock model is enough to show that a refusal comes after its answer
        answers = {Case().answer_key: ExpectedAnswer(ModelAnswer(1.0, {}), 0.0)}
        monkeypatch.setattr(proof, "compute_expected_answers", lambda *_: answers)
    (outcome,) = _prove(name, (Case(),), ProofRanks(1, launch=lambda run, task, count, seconds: run(0, task)))
    assert outcome.status == "refused" and REFUSED[name] in outcome.message


ROOT = Path(__file__).parents[2]
RECORD = ROOT / "bench" / "records" / "census.json"
RECORD_OF_IMAGES = RECORD.with_stem("census-images")


def test_the_page_and_the_table_are_made_from_the_record() -> None:
    record, of_images = (json.loads(path.read_text(encoding="utf-8")) for path in (RECORD, RECORD_OF_IMAGES))
    assert (ROOT / "docs" / "models.md").read_text(encoding="utf-8") == page(record, of_images), f"run: {COMMAND}"
    assert RECORD.with_suffix(".md").read_text(encoding="utf-8") == as_text(record)
    assert RECORD_OF_IMAGES.with_suffix(".md").read_text(encoding="utf-8") == image_text(of_images)
    assert not failed(record) and not failed(of_images)


def _record(**status: str) -> dict[str, dict[str, object]]:
    row = {"loss_error": 0.1, "gradient_error": 0.2, "parameter": "w", "case": "cp 2", "message": "m"}
    ways = {"tp 2": {"status": "exact", **row}}
    return {"models": {name: {"status": kind, "ways": ways, **row} for name, kind in status.items()}}


def test_what_got_worse_is_said() -> None:
    old = _record(a="exact", b="refused", c="refused", d="exact", e="wrong")
    new = _record(a="exact", b="exact", c="wrong", d="refused", f="wrong")
    found = [(change.what, change.worse) for change in changes(old, new)]
    assert found == [("b", False), ("c", True), ("d", True)]
    assert failed(new) == [f"{name}: wrong, loss off by 1.0e-01, w by 2.0e-01 (cp 2)" for name in "cf"]
    new["models"]["a"] = old["models"]["a"] | {"ways": {"tp 2": {"status": "wrong"}}}
    assert str(changes(old, new)[0]) == "WORSE a, tp 2: exact, now wrong"
