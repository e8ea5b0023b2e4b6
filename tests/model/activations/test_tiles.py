"""MLPs and experts over tiles of rows: loss and every gradient of the plain step, in float64, however layers recompute."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longspan.comm import World
from longspan.doctor.stock import whole_float64
from longspan.layout import Layout
from longspan.model import prepare
from longspan.plan import Group, MicroBatch, Plan, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import MtpLoss, run_step
from tests.model.deep import deep
from tests.model.lora.adapted import adapted
from tests.model.mtp.dense import with_depths
from tests.model.stock import gradients_of, texts, tiny, worst

LENGTHS = (13, 1, 24, 7, 2, 9)
EXACT = 1e-12
MODELS = {
    "tied embeddings": lambda: deep("qwen3", torch.float64),
    "norms after the MLP": lambda: tiny("gemma2", torch.float64, attention="eager"),
    "experts": lambda: deep("qwen3-moe", torch.float64),
    "an adapter": lambda: adapted("deep", "the first layer"),
    "a hybrid with a depth": lambda: with_depths("qwen3-next", 1),
}


def _plan(home: Layout) -> Plan:
    """Slots with other rows, so that they have other numbers of tiles, and one without any."""
    if home.pp > 1 or home.slots != 2:
        return plan_fixed(LENGTHS, home, cp=1, max_tokens_per_slot=32)
    batches = (
        MicroBatch((Group((0, 1), (2, 1), (24, 1)), Group((0,), (0,), (13,)))),
        MicroBatch((Group((0, 1), (4, 5), (2, 9), "a2a"),)),
        MicroBatch((Group((1,), (3,), (7,)),)),
    )
    return Plan(2, LENGTHS, batches, targets=sum(LENGTHS) - len(LENGTHS)).check()


def _step(model: nn.Module, plan: Plan, world: World) -> tuple[float, dict[str, Tensor]]:
    mtp: Any = {"mtp": MtpLoss(weight=0.7)} if hasattr(model, "mtp") and world.home.pp == 1 else {}
    result: Any = run_step(model, plan, texts(LENGTHS), world, **mtp)
    gradients = gradients_of(model)
    evaluated: Any = run_step(model, plan, texts(LENGTHS), world, backward=False)
    return result.loss + sum(result.mtp_losses or ()) + evaluated.loss, gradients


def _errors(
    rank: int, home: Layout, cases: Sequence[tuple[str, str, int]], options: dict[str, Any]
) -> dict[str, float]:
    """The largest relative error of a model whose layers keep something, over tiles of so many rows."""
    errors, plan, plain = dict[str, float](), _plan(home), dict[str, Any]()
    with World(home, backend=backend()) as world, whole_float64():
        for name, word, rows in cases:
            if name not in plain:
                plain[name] = _step(prepare(MODELS[name](), world, **options), plan, world)
            loss, gradients = plain[name]
            model = prepare(MODELS[name](), world, measures=word, mlp_tile_rows=rows, **options)
            here, of_rank = _step(model, plan, world)
            errors[f"{name}, {word}, {rows}"] = max(abs(here / loss - 1), worst(of_rank, gradients))
    return errors


USUAL = [("tied embeddings", "none", 5), ("norms after the MLP", "full", 3), ("experts", "selective", 5)]
OTHERS = [(name, word, rows) for name in MODELS for word, rows in (("none", 3), ("selective", 5), ("full+host", 1))]
SPLIT = {"pipeline_schedule": "zbv", "virtual_stages": 2}


@pytest.mark.parametrize(
    ("home", "cases", "options"),
    [
        (Layout(ranks=2), [*USUAL, ("an adapter", "selective", 4)], {}),
        (Layout(ranks=2, ep=2), [("experts", "selective", 5)], {}),
        (Layout(ranks=2, tp=2), [("experts", "none", 3)], {"sequence_parallel": True}),
        pytest.param(Layout(ranks=2), OTHERS, {}, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=2, tp=2), OTHERS[:9], {}, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=2, pp=2), [*OTHERS[:2], *OTHERS[6:8]], SPLIT, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=4, ep=2), OTHERS[6:9], {}, marks=pytest.mark.whole),
    ],
    ids=["2 slots", "2 parts of experts", "tp 2", "2 slots, all", "tp 2, all", "folded stages", "4 slots"],
)
def test_tiles_are_the_plain_step(
    home: Layout, cases: list[tuple[str, str, int]], options: dict[str, Any]
) -> None:
    for errors in run_ranks(_errors, len(home.ranks), home, cases, options):
        assert errors and max(errors.values()) < EXACT, {case: e for case, e in errors.items() if e >= EXACT}
