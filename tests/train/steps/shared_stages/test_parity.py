"""Zamba 2 through a pipeline equals one process: blocks that stages share, and the embedding that all layers read."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from longspan.comm import World
from longspan.doctor.stock import whole_float64
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.deep import Answer
from tests.model.stock import error, gradients_of, texts
from tests.mutation import Change, mutated
from tests.train.steps.shared_stages.cases import LENGTHS, Case, wanted

IN_CI = Case("zbv", 2, 2, "recomputed", "dynamic", ranks=2)
CASES = [
    Case("1f1b", 2, 2, "recomputed"),
    Case("zbv", 2, 2, "copies", "dynamic"),
    Case("zbv", 2, 2, "recomputed", "dynamic"),
    Case("1f1b", 2),
    Case("1f1b", 2, 2, "copies", "dynamic"),
    Case("gpipe", 2, 2, "recomputed", "dynamic"),
    Case("zero_bubble", 2, 1, "sharded", "dynamic"),
    Case("zero_bubble", 2, 2, "copies"),
    Case("zbv", 2, 2),
    Case("1f1b", 4),
    Case("1f1b", 4, 2, "recomputed"),
    Case("zero_bubble", 4, 1, "copies", "dynamic"),
    Case("zbv", 4, 2),
    Case("1f1b", 2, tp=2),
    Case("1f1b", 2, 2, "copies", tp=2, sequence_parallel=True),
    Case("zbv", 2, 2, "recomputed", tp=2, sequence_parallel=True),
]


def _errors(model: PipelineModel, case: Case, expected: Answer, world: World) -> dict[str, float]:
    """Of one step's loss, gradient norm and gradients here, and of an evaluation at another degree."""
    result = run_step(model, case.plan(), texts(LENGTHS), world)
    found, names = gradients_of(model), {name for name, _ in model.named_parameters()}
    model.zero_grad()
    evaluated = run_step(model, case.evaluation_plan(), texts(LENGTHS), world, backward=False)
    assert result.grad_norm is not None
    return {
        "loss": abs(result.loss / expected.loss - 1),
        "norm": abs(result.grad_norm / expected.norm - 1),
        "evaluation": abs(evaluated.loss / expected.loss - 1),
        "gradients": max(error(found[n], expected.gradients[n]) for n in found) if found.keys() == names else np.inf,
    }


def _compare(rank: int, cases: Sequence[Case], expected: Answer) -> list[dict[str, float]]:
    found = []
    with whole_float64():
        for case in cases:
            with World(case.home, backend=backend(), timeout=60) as world:
                found.append(_errors(case.prepared(world), case, expected, world))
    return found


def _check(cases: Sequence[Case]) -> None:
    for found in run_ranks(_compare, cases[0].ranks, cases, wanted(), timeout=280):
        for case, errors in zip(cases, found, strict=True):
            assert max(errors.values()) < 1e-12, (case, errors)


def test_equals_one_process() -> None:
    _check([IN_CI])


@pytest.mark.whole
@pytest.mark.parametrize("tp", [1, 2])
def test_every_schedule(tp: int) -> None:
    _check([case for case in CASES if case.tp == tp])


# ---- what is dropped is noticed

ROOM = "model.pipeline"
MUTANTS: dict[str, tuple[Change, Callable[[dict[str, float]], bool]]] = {
    "the sum over stages": (
        (f"{ROOM}.stages", "local_slice.copy_(sum_parts([*parts.values()]))", "pass"),
        lambda errors: errors["gradients"] > 1e-3,
    ),
    "the sum over stages of a rank": (
        (f"{ROOM}.stages", "add_gradient(trained_place.parameter, copied_place.parameter.grad)", "pass"),
        lambda errors: errors["gradients"] > 1e-3,
    ),
    "the embedding on later stages": (
        (f"{ROOM}.stages", "arguments[argument] = embedding", "pass"),
        lambda errors: errors["loss"] > 1e-6,
    ),
    "the embedding's gradient from later stages": (
        (f"{ROOM}.stages", "torch.cat([hidden, rows], dim=1)", "torch.cat([hidden, rows.detach()], dim=1)"),
        lambda errors: errors["gradients"] > 1e-3,
    ),
    "that a parameter is counted once": (
        ("train.step_end", "if parameter not in skipped", "if True"),
        lambda errors: errors["norm"] > 1e-6,
    ),
}


def _mutants(rank: int, names: Sequence[str], expected: Answer) -> dict[str, dict[str, float]]:
    found, case = {}, CASES[1]
    with whole_float64(), World(case.home, backend=backend(), timeout=60) as world:
        for name in names:
            with mutated(MUTANTS[name][0]):
                found[name] = _errors(case.prepared(world), case, expected, world)
    return found


@pytest.mark.whole
def test_what_is_dropped_is_noticed() -> None:
    of_ranks = run_ranks(_mutants, 4, tuple(MUTANTS), wanted(), timeout=280)
    for name, (_, noticed) in MUTANTS.items():
        assert any(noticed(found[name]) for found in of_ranks), (name, [found[name] for found in of_ranks])
