"""Encoders and a language model in homes of their own: every gradient is that of one process without parallelism."""

import pytest

from longspan.plan import plan_dynamic
from longspan.testing import run_ranks
from tests.train.multimodal.cases import ON, Case, few_pairs, pairs, product
from tests.train.multimodal.documents import documents_of
from tests.train.multimodal.half import half, half_answers
from tests.train.multimodal.oracle import LIMITS, Errors, answers_of, run, worst_of_ranks

# What runs always beside a draw on two ranks: the rest of the values, and several slots on both sides.
CHOSEN = {
    4: [
        Case("2·2→2·2·1", owners="random", planner="free", waves="several", model="sequence parallel"),
        Case(
            "2·2→1·2·2", owners="contiguous", planner="dynamic", documents="packed", waves="recomputed", encoder="cp 2"
        ),
        Case("2·2→1·2·2", documents="few", family="qwen3-untied", frozen="all but the head"),
        Case("1·4→1·4·1", documents="text", model="recomputed"),
    ],
    8: [Case("2·4→2·2·1, pp 2", planner="dynamic", waves="several", encoder="cp 2", model="sequence parallel")],
}
OVER_NCCL = {  # fan-in, fan-out and equal replicas of encoder and language model
    4: ("2·2→2·2·1", "2·2→1·2·2", "2·2→2·1·2"),
    8: ("2·4→2·2·2", "4·2→1·2·4", "4·2→2·2·2"),
}


def check(cases: list[Case], *, timeout: float = 280) -> list[Errors]:
    """The largest errors of each case, none of which is over its limit."""
    ranks = len(cases[0].home.ranks)
    errors = worst_of_ranks(run_ranks(run, ranks, cases, answers_of(cases), timeout=timeout))
    wrong = [(case, error) for case, error in zip(cases, errors, strict=True) if not max(error) <= LIMITS[case.dtype]]
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(f"{error} {case}" for case, error in wrong)
    return errors


@pytest.mark.whole
def test_pairs_on_two_ranks() -> None:
    check(few_pairs())


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=[pytest.mark.whole] * (n > 6)) for n in CHOSEN])
def test_chosen_cases(ranks: int) -> None:
    check(CHOSEN[ranks])


@pytest.mark.whole
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", ON)
def test_every_pair(ranks: int) -> None:
    check(pairs(ranks), timeout=3500)


@pytest.mark.whole
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks", ON)
def test_the_whole_product(ranks: int) -> None:
    errors = check(product(ranks), timeout=7000)
    print(f"{ranks} processes: {len(errors)} cases, worst {worst_of_ranks([[e] for e in errors])[0]}")


@pytest.mark.whole
@pytest.mark.parametrize("ranks", OVER_NCCL)
def test_fan_in_fan_out_and_equal_replicas_in_float32(ranks: int) -> None:
    ways = ({"documents": "mixed"}, {"documents": "packed", "waves": "several", "encoder": "copies"})
    check([Case(homes, dtype="float32", **way) for homes in OVER_NCCL[ranks] for way in ways])


@pytest.mark.parametrize("homes", ["2·2→2·2·1", pytest.param("2·2→1·2·2", marks=pytest.mark.whole)])
def test_in_bfloat16_the_error_is_that_of_one_process(homes: str) -> None:
    case = Case(homes, waves="several")
    exact, alone = half_answers(case)
    for distances in run_ranks(half, 4, case, exact):
        for module, distance in distances.items():
            assert distance <= 2 * alone[module], (module, distance, alone[module])
    assert min(alone.values()) > 1e-3  # it is no better by itself


def test_several_waves_are_several() -> None:
    case = Case("1·8→1·8·1", documents="packed", waves="several")
    rows = [item.rows for item in documents_of(case.documents).items]
    cap = case.encoder_options("image")["max_rows_per_slot"]
    assert len(plan_dynamic(rows, case.encoder_home, max_tokens_per_slot=cap, max_cp=1).micro_batches) > 1
