"""Losses of padded, fixed and dynamic plans stay together over many steps of AdamW, on the same documents.

A difference of rounding size grows where the rate is too high for the model (docs/convergence.md); here it is not.
"""

import pytest
import torch

from longspan.comm import World
from longspan.layout import Layout
from longspan.model import prepare
from longspan.plan import Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.model.stock import _norms_in_float64, texts, tiny

STEPS, LENGTHS = 20, ((13, 1, 30, 7), (2, 18, 5, 9, 21), (40, 3))
# By dtype, and whether norms compute in it too: transformers' compute in float32 always.
BOUNDS = {(torch.float64, True): 1e-12, (torch.float64, False): 1e-6, (torch.float32, False): 1e-5}


def _plans(step: int, home: Layout) -> dict[str, Plan]:
    lengths = LENGTHS[step % len(LENGTHS)]
    return {
        "padded": plan_padded(lengths, home, cp=2, max_tokens_per_slot=20),
        "fixed": plan_fixed(lengths, home, cp=1, max_tokens_per_slot=40),
        "dynamic": plan_dynamic(lengths, home, max_tokens_per_slot=24),
    }


def _curve(world: World, name: str, dtype: torch.dtype, *, norms: bool) -> list[float]:
    source = tiny("qwen3", dtype)
    if norms:
        _norms_in_float64(source)
    model = prepare(source, world)
    optimizer = build_optimizer(model, "adamw", lr=1e-3, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        plan = _plans(step, world.home)[name]
        documents = texts(plan.lengths, seed=step)
        losses.append(run_step(model, plan, documents, world, optimizer, max_grad_norm=1.0).loss)
    return losses


def _curves(rank: int, dtype: torch.dtype, norms: bool) -> dict[str, list[float]]:
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        return {name: _curve(world, name, dtype, norms=norms) for name in ("padded", "fixed", "dynamic")}


# Shorter curves over degrees are in test_step.py.
CASES = [pytest.param(*case, marks=pytest.mark.whole) for case in BOUNDS]


@pytest.mark.parametrize(("dtype", "norms"), CASES, ids=["float64", "float64, norms in float32", "float32"])
def test_losses_of_every_step_agree(dtype: torch.dtype, norms: bool) -> None:
    curves = run_ranks(_curves, 2, dtype, norms)[0]
    apart = [max(losses) - min(losses) for losses in zip(*curves.values(), strict=True)]
    assert len(apart) == STEPS and max(apart) < BOUNDS[dtype, norms], apart
