"""Losses of padded, fixed and dynamic plans and of degrees stay together over many steps, on the same documents.

A difference of rounding size grows where the rate is too high for the model (docs/convergence.md); here it is not.
"""

import numpy as np
import pytest
import torch

from longspan.comm import World
from longspan.layout import Layout
from longspan.plan import Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.model.stock import _norms_in_float64, prepare_untried, texts, tiny

pytestmark = pytest.mark.whole
STEPS, LENGTHS = 20, ((13, 1, 30, 7), (2, 18, 5, 9, 21), (40, 3))
PLANNERS, DEGREES = ("padded", "fixed", "dynamic"), (1, 2, 4)
# By dtype, and whether norms compute in it too: transformers' compute in float32 always.
BOUNDS = {(torch.float64, True): 1e-12, (torch.float64, False): 1e-6, (torch.float32, False): 1e-5}


def _plan(way: str | int, step: int, home: Layout) -> Plan:
    lengths = LENGTHS[step % len(LENGTHS)]
    if way == "padded":
        return plan_padded(lengths, home, cp=2, max_tokens_per_slot=20)
    if way == "dynamic":
        return plan_dynamic(lengths, home, max_tokens_per_slot=24)
    if way == "fixed":
        return plan_fixed(lengths, home, cp=1, max_tokens_per_slot=40)
    return plan_fixed((13, 1, 30, 7, 2, 18, 5, 9), home, cp=int(way), max_tokens_per_slot=64 // int(way))


def _curves(rank: int, ranks: int, ways: tuple[str | int, ...], dtype: torch.dtype, norms: bool) -> list[list[float]]:
    curves = []
    with World(Layout(ranks), backend=backend(), timeout=60) as world:
        for way in ways:
            source = tiny("qwen3", dtype)
            if norms:
                _norms_in_float64(source)
            model, losses = prepare_untried(source, world), list[float]()
            of_planner = way in PLANNERS
            optimizer = build_optimizer(model, *(("adamw", 1e-3, 0.01) if of_planner else ("sgd", 0.1)))
            for step in range(STEPS):
                plan = _plan(way, step, world.home)
                documents, norm = (
                    texts(plan.lengths, seed=step if of_planner else step % 4),
                    1.0 if of_planner else None,
                )
                losses.append(run_step(model, plan, documents, world, optimizer, max_grad_norm=norm, step=step).loss)
            curves.append(losses)
    return curves


@pytest.mark.parametrize(("dtype", "norms"), BOUNDS, ids=["float64", "float64, norms in float32", "float32"])
def test_losses_of_every_step_agree(dtype: torch.dtype, norms: bool) -> None:
    curves = run_ranks(_curves, 2, 2, PLANNERS, dtype, norms)[0]
    apart = [max(losses) - min(losses) for losses in zip(*curves, strict=True)]
    assert len(apart) == STEPS and max(apart) < BOUNDS[dtype, norms], apart


def test_sgd_curves_of_the_same_tokens_are_equal() -> None:
    first, *others = run_ranks(_curves, 4, 4, DEGREES, torch.float32, False)[0]
    assert sum(first[-4:]) < 0.8 * sum(first[:4]), "the model did not learn"
    for losses in others:
        np.testing.assert_allclose(losses, first, rtol=1e-5)
