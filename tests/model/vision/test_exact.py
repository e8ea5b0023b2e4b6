"""Vision-language models under any plan: loss and every gradient are those of the stock model, document by document."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from longspan.layout import Layout
from longspan.testing import run_ranks
from tests.model.vision.documents import answer_of
from tests.model.vision.joined import BOUND, Case, errors_of
from tests.model.vision.models import here

FEW = [
    Case("gemma3", Layout(2), Layout(2), cp=2),
    Case("qwen2.5-vl", Layout(2, tp=2), Layout(2), cp=1),
    Case("qwen3-vl", Layout(2), Layout(2, tp=2)),
    Case("qwen3-vl", Layout(2, pp=2), Layout(2), cp=1, options=(("activation_checkpointing", True),)),
]


def all_of(ranks: int) -> list[Case]:
    """Every model under the plans of so many ranks."""
    one, names = Layout(ranks), here()
    cases = [Case(name, one, one, cp) for name in names for cp in (0, ranks)]
    cases += [Case(name, one, one, 1, "text") for name in names]
    if ranks == 2:
        cases += [Case(name, Layout(2, tp=2), Layout(2, tp=2), 1) for name in names]
        cases += [Case(name, Layout(2, pp=2), one, 1) for name in names]
        cases += [Case(name, one, one, 2, options=(("shard_parameters", False),)) for name in names]
    if ranks == 4:
        cases += [
            Case("qwen3-vl", Layout(4, tp=2), Layout(4, tp=2), 2, options=(("sequence_parallel", True),)),
            Case("qwen3-vl-untied", Layout(4, pp=2, tp=2), Layout(4), 1),
            Case("qwen2.5-vl", Layout(4, pp=2), Layout(4, tp=2), 2, options=(("virtual_stages", 2),)),
        ]
    return cases


def of_videos(ranks: int) -> list[Case]:
    """Videos and images mixed, and text: every model that has videos, under the plans of so many ranks."""
    one, names = Layout(ranks), [name for name in here() if name.startswith("qwen")]
    cases = [Case(name, one, one, cp, "videos") for name in names for cp in (0, ranks)]
    if ranks == 2:
        cases += [Case(name, Layout(2, tp=2), Layout(2, tp=2), 1, "videos") for name in names]
        cases += [Case(name, Layout(2, pp=2), one, 1, "videos") for name in names]
    return cases


SPANS = ("gemma3", "paligemma2")


def of_spans(ranks: int) -> list[Case]:
    """Images whose tokens see each other, cut everywhere: every type and partition, and both homes split."""
    one, kinds = Layout(ranks), ["all_gather", *([] if ranks == 3 else ["a2a"])]
    ways: list[tuple[tuple[str, Any], ...]]
    ways = [
        (("cp_comm_type", kind), ("partition", rows), ("heads", 4))
        for kind in kinds
        for rows in ("zigzag", "contiguous")
    ]
    ways.append((("partition", "contiguous"),))
    if ranks == 4:
        ways.append((("cp_comm_type", "a2a+p2p"), ("hierarchical_context_parallel_sizes", (2, 2))))
    cases = [Case(name, one, one, cp, planning=way) for name in SPANS for way in ways for cp in (0, ranks)]
    if ranks == 4:
        sequence, recomputed = (("sequence_parallel", True),), (("activation_checkpointing", True),)
        cases.append(Case("gemma3", Layout(4, tp=2), Layout(4, tp=2), 2, options=sequence))
        cases.append(Case("gemma3", Layout(4, pp=2), Layout(4), 2, options=recomputed))
    return cases


@cache
def _errors(ranks: int, cases: tuple[Case, ...]) -> dict[str, float]:
    answers = {key: answer_of(*key) for key in {(case.name, case.documents) for case in cases}}
    results: list[dict[str, float]] = run_ranks(errors_of(cases, answers), ranks, timeout=280)
    return {label: max(errors[label] for errors in results) for label in results[0]}


def _check(ranks: int, cases: Sequence[Case]) -> None:
    errors = _errors(ranks, tuple(cases))
    assert errors and max(errors.values()) < BOUND, errors


def test_a_step_is_that_of_the_stock_model() -> None:
    _check(2, FEW)


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_model_under_every_plan(ranks: int) -> None:
    _check(ranks, all_of(ranks))


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_videos_under_every_plan(ranks: int) -> None:
    _check(ranks, of_videos(ranks))


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_images_that_see_each_other_under_every_type(ranks: int) -> None:
    _check(ranks, of_spans(ranks))
