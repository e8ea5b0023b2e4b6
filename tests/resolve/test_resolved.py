"""One search decides: the table of choices from before, and a dry run that prints the keys that a run takes."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from longspan.cli.plans.answer import answer_ways, run_keys
from longspan.cli.plans.gpu_run import GpuRun
from longspan.cli.plans.gpus import Gpus
from longspan.config.file import load_config, to_toml
from longspan.config.keys import key_value
from longspan.resolve.planner_config import PlannerConfig
from longspan.resolve.resolved import resolve
from longspan.resolve.ways import set_default_mode
from tests.resolve.choices import FILE, Case, cases, choose, facts_of

PINNED: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
QUICK = (
    "qwen3-30b-a3b, 4 layers, 2 h200, pp 1: 18 documents of 108,411 tokens",
    "qwen3-8b, 36 layers, 4 h200, pp 1: 1 of 16,384 tokens",
    "qwen3-8b, 8 layers, 2 h100, pp 2: 8 of 65,536 tokens",
)
RECIPE = "gemma-3-12b-lora-128k, 4 h200"
ROOM = 1.01  # of the predicted seconds of the pinned choice


@cache
def _cases() -> dict[str, Case]:
    return {case.name: case for case in cases()}


def _check_choice(name: str) -> None:
    pinned, chosen = PINNED[name], choose(_cases()[name])
    assert ("refused" in pinned) == ("refused" in chosen), (pinned, chosen)
    if "seconds" in pinned:
        assert chosen["seconds"] <= ROOM * pinned["seconds"], (pinned, chosen)


@pytest.mark.parametrize("name", QUICK)
def test_choices_are_as_fast_as_the_pinned_ones(name: str) -> None:
    _check_choice(name)


@pytest.mark.whole
@pytest.mark.parametrize("name", [name for name in PINNED if name not in QUICK])
def test_all_choices_are_as_fast_as_the_pinned_ones(name: str) -> None:
    _check_choice(name)


def _check_dry_run(case: Case) -> None:
    """The keys of an answer are those that a run of the same facts takes; config.toml has them behind open keys."""
    config, facts = facts_of(case)
    resolved = resolve(config, facts).config
    gpus = Gpus(machine=case.machine, count=len(case.home.ranks), bytes=1, host_bytes=1, name=case.gpu)
    answer = answer_ways("", GpuRun(config, gpus, case.model), facts)
    keys = run_keys(answer.config, frozenset())
    for full_name, value in keys.items():
        section, _, key = full_name.partition(".")
        of_run = key_value(getattr(resolved, section), key)
        if full_name != "model.rope_scaling":  # which an answer sets where documents are longer than the positions
            assert value == (list(of_run) if isinstance(of_run, tuple) else of_run), full_name
    text = to_toml(config, chosen=resolved)
    for key in ("planner", "max_tokens_per_slot", "mode"):
        before, chosen = (key_value(x.context, key) for x in (config, resolved))
        comment = f"  # chosen: {json.dumps(chosen)}" if chosen != before else ""
        assert f"\n{key} = {json.dumps(before)}{comment}\n" in text, key


@pytest.mark.parametrize("name", [RECIPE, pytest.param(QUICK[0], marks=pytest.mark.whole)])
def test_a_dry_run_prints_the_keys_that_the_run_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.resolve.facts.TIMED_STEPS", 2)
    _check_dry_run(_cases()[name])


@pytest.mark.whole
@pytest.mark.parametrize("name", [n for n in PINNED if ("-full-" in n or "-lora-" in n) and "seconds" in PINNED[n]])
def test_dry_runs_of_all_recipes_print_the_keys_that_the_run_takes(name: str) -> None:
    _check_dry_run(_cases()[name])


def test_nothing_is_planned_where_nothing_is_open() -> None:
    _, facts = facts_of(_cases()[QUICK[1]])
    given = load_config(None, {"model.config": "x", "optimizer.lr": 1e-5, "context.context_parallel_size": 2})
    given = replace(given, context=replace(given.context, max_tokens_per_slot=8192))
    fail = replace(facts, budget=None, lengths_of_step=lambda step: pytest.fail("no step is looked at"))
    resolved = resolve(given, fail)
    assert resolved.config == set_default_mode(given) and resolved.memory is None and not resolved.reasons.ways
    assert PlannerConfig.training(resolved.config).degree == 2


def test_what_is_open_is_decided_without_torch() -> None:
    code = "import sys, longspan.resolve.resolved, longspan.resolve.kept_rows; "
    words = [sys.executable, "-c", code + "print('torch' in sys.modules)"]
    assert subprocess.run(words, check=True, capture_output=True, text=True).stdout == "False\n"
