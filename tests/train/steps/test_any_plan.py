"""A step's loss and gradients do not depend on planner, degree, order of documents or number of slots."""

from collections.abc import Sequence

import pytest
import torch

from longspan.comm import World
from longspan.layout import Layout
from longspan.plan import Group, MicroBatch, Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.stock import gradients_of, prepare_untried, stock_answer, texts, tiny, worst

LENGTHS = (13, 1, 30, 7, 2, 18, 5, 9)
SLOTS = (1, 4, *(pytest.param(slots, marks=pytest.mark.whole) for slots in (2, 3, 6, 8)))


def _plans(lengths: Sequence[int], home: Layout) -> dict[str, Plan]:
    slots, narrow = home.slots, 1 if home.slots < 4 else 2
    some_idle = MicroBatch(tuple(Group((slots - 1,), (d,), (n,)) for d, n in enumerate(lengths)))
    targets = sum(lengths) - len(lengths)
    return {
        "fixed": plan_fixed(lengths, home, cp=slots, max_tokens_per_slot=16 if slots > 1 else 32),
        "padded": plan_padded(lengths, home, cp=narrow, max_tokens_per_slot=32),
        "dynamic": plan_dynamic(lengths, home, max_tokens_per_slot=32 if slots < 4 else 8),
        "free": plan_dynamic(lengths, home, max_tokens_per_slot=32, mode="free"),
        "idle": Plan(slots, tuple(lengths), (MicroBatch(), some_idle, MicroBatch()), targets),
    }


def _errors(rank: int, slots: int) -> dict[tuple[torch.dtype, str, bool], tuple[float, float]]:
    """Of loss and gradients, by type, plan, and whether documents come in another order."""
    found = {}
    with World(Layout(ranks=slots), backend=backend(), timeout=60) as world:
        for dtype in (torch.float32, torch.float64):
            wanted = stock_answer("qwen3", dtype, texts(LENGTHS), world.device)
            model = prepare_untried(tiny("qwen3", dtype), world)
            for turned in (False, True) if dtype == torch.float64 else (False,):
                order = [3, 0, 7, 2, 1, 6, 5, 4] if turned else range(len(LENGTHS))
                documents = [texts(LENGTHS)[d] for d in order]
                lengths = [len(document) for document in documents]
                for name, plan in _plans(lengths, world.home).items():
                    if name not in ("fixed", "dynamic") and (turned or dtype == torch.float32):
                        continue
                    result = run_step(model, plan, documents, world)
                    found[dtype, name, turned] = (
                        abs(result.loss / wanted.loss - 1),
                        worst(gradients_of(model), wanted.gradients),
                    )
                    model.zero_grad()
    return found


@pytest.mark.parametrize("slots", SLOTS)
def test_loss_and_gradients(slots: int) -> None:
    for found in run_ranks(_errors, slots, slots):
        for (dtype, name, turned), (loss, gradients) in found.items():
            bounds = (1e-12, 1e-12) if dtype == torch.float64 else (1e-6, 1e-5)
            assert loss < bounds[0] and gradients < bounds[1], (dtype, name, turned, loss, gradients)
