"""At a low learning rate mixed precision learns as float32, and bfloat16 only with stochastic rounding.

A small version of bench/training/precision.py, with the bound of docs/precision.md.
"""

from typing import Any

import pytest
import torch

from longspan.comm import World
from longspan.layout import Layout
from longspan.model import prepare
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from longspan.train.optim.optimizer import OptimizerChoice, StochasticRounding
from tests.model.stock import texts, tiny

STEPS, RATE, LENGTHS = 40, 5e-5, (24,) * 8
KINDS = ("float32", "mixed", "bfloat16", "by chance")


def _losses(world: World, kind: str) -> list[float]:
    """The losses of steps along the same documents, which a model of random weights learns."""
    dtype = torch.float32 if kind in ("float32", "mixed") else torch.bfloat16
    compute = torch.bfloat16 if kind == "mixed" else None
    model: Any = prepare(tiny("qwen3", dtype), world, compute_dtype=compute, probe=False)
    world.seed = 1
    optimizer: Any = build_optimizer(model, "adamw", RATE)
    if kind == "by chance":
        optimizer = StochasticRounding(OptimizerChoice("adamw", RATE, 0.0, (("betas", (0.9, 0.95)),)), model, world)
    documents, plan = texts(LENGTHS), plan_fixed(LENGTHS, world.home, cp=1)
    return [run_step(model, plan, documents, world, optimizer, step=step).loss for step in range(1, STEPS + 1)]


def _curves(rank: int) -> dict[str, list[float]]:
    with World(Layout(1), backend=backend(), timeout=60) as world:
        return {kind: _losses(world, kind) for kind in KINDS}


@pytest.mark.whole
def test_mixed_precision_learns_as_float32_and_pure_bfloat16_does_not() -> None:
    (curves,) = run_ranks(_curves, 1, timeout=120)
    # bfloat16 weights begin at another loss: what counts is how far each has fallen.
    falls = {kind: [losses[0] - loss for loss in losses] for kind, losses in curves.items()}
    fall = falls["float32"][-1]
    share = {kind: max(abs(a - b) for a, b in zip(falls["float32"], falls[kind], strict=True)) / fall for kind in KINDS}
    assert fall > 0 and share["mixed"] < 0.02 < 0.3 < share["bfloat16"], share
    assert share["by chance"] < 0.2, share  # weights of so small a model are noisy when rounded by chance
