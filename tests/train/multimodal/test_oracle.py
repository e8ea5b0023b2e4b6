"""Encoders and a language model in homes of their own: every gradient is that of one process without parallelism."""

import pytest

from longspan import Plan, World, plan_dynamic, run_step
from longspan.multimodal import MediaDocuments
from longspan.testing import run_ranks
from longspan.train.terms.waves_ahead import plan_waves_ahead
from tests.train.multimodal.cases import Case, few_pairs, pairs
from tests.train.multimodal.documents import documents_of
from tests.train.multimodal.oracle import answers_of, in_worlds, model_of, run, within_limit, worst_of_ranks

# What runs always: several slots on both sides. The rest of the values: the draw on two ranks, and OTHERS.
CHOSEN = {
    2: [
        Case("1·2→1·2·1", documents="few", family="qwen3-untied", frozen="all but the head", model="recomputed"),
    ],
    4: [
        Case(
            "2·2→1·2·2", owners="contiguous", planner="dynamic", documents="packed", waves="recomputed", encoder="cp 2"
        ),
        Case("1·4→1·2·1, pp 2", planner="dynamic", documents="labelled", waves="several"),
    ],
}
OTHERS = {
    4: [
        Case("2·2→2·2·1", owners="random", planner="free", waves="several", model="sequence parallel"),
    ],
    8: [Case("2·4→2·2·1, pp 2", planner="dynamic", waves="several", encoder="cp 2", model="sequence parallel")],
}
OVER_NCCL = {  # fan-in, fan-out and equal replicas of encoder and language model
    4: ("2·2→2·2·1", "2·2→1·2·2", "2·2→2·1·2"),
    8: ("2·4→2·2·2", "4·2→1·2·4", "4·2→2·2·2"),
}


def check(cases: list[Case], *, timeout: float = 280) -> None:
    ranks = len(cases[0].home.ranks)
    errors = worst_of_ranks(run_ranks(run, ranks, cases, answers_of(cases), timeout=timeout))
    wrong = [(case, error) for case, error in zip(cases, errors, strict=True) if not within_limit(case, error)]
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(f"{error} {case}" for case, error in wrong)


@pytest.mark.whole
def test_pairs_on_two_ranks() -> None:
    check(few_pairs())


@pytest.mark.parametrize("ranks", CHOSEN)
def test_chosen_cases(ranks: int) -> None:
    check(CHOSEN[ranks])


@pytest.mark.whole
@pytest.mark.parametrize("ranks", OTHERS)
def test_other_chosen_cases(ranks: int) -> None:
    check(OTHERS[ranks])


@pytest.mark.whole
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_every_pair(ranks: int) -> None:
    check(pairs(ranks), timeout=3500)


@pytest.mark.whole
@pytest.mark.parametrize("ranks", OVER_NCCL)
def test_fan_in_fan_out_and_equal_replicas_in_float32(ranks: int) -> None:
    ways = ({"documents": "mixed"}, {"documents": "packed", "waves": "several", "encoder": "copies"})
    check([Case(homes, dtype="float32", **way) for homes in OVER_NCCL[ranks] for way in ways])


# ---- waves that are planned ahead


def ahead(case: Case, world: World, encoder_world: World) -> None:
    model, docs = model_of(case, world, encoder_world), documents_of(case.documents)
    both = docs, MediaDocuments(docs.tokens, docs.items[:2], docs.read)
    plans = [plan_dynamic(d.lengths, world.home, targets=d.targets, max_tokens_per_slot=90) for d in both]
    at_once = [run_step(model, plan, d, world).loss_sum for plan, d in zip(plans, both, strict=True)]
    for plan, d in zip(plans, both, strict=True):
        plan_waves_ahead(model, plan, d)
    assert [run_step(model, plan, d, world).loss_sum for plan, d in zip(plans, both, strict=True)] == at_once
    again = Plan.from_json(plans[0].to_json())  # an equal plan, made again
    plan_waves_ahead(model, plans[0], docs)
    assert run_step(model, again, docs, world).loss_sum == at_once[0]
    plan_waves_ahead(model, plans[0], docs)
    model.encoders.requires_grad_(False).zero_grad()  # frozen before its step
    assert run_step(model, plans[0], docs, world).loss_sum == at_once[0]
    assert all(parameter.grad is None for parameter in model.encoders.parameters())
    for _ in range(9):
        plan_waves_ahead(model, plans[0], docs)
    assert run_step(model, plans[0], docs, world, backward=False).loss_sum == at_once[0]


def run_ahead(rank: int) -> None:
    in_worlds([Case("1·2→1·2·1", documents="packed", encoder="copies")], ahead)


def test_waves_planned_ahead_are_those_of_the_step() -> None:
    run_ranks(run_ahead, 2)
