"""Every kind of attention that well-known models have equals the stock model, under every communication type.

Windows (Mistral), windows and soft caps (Gemma 2), sinks with a window in every other layer (gpt-oss), query norms
(Qwen3-MoE), values unlike queries (DeepSeek-V3): logits, loss and every gradient, with recomputation.
"""

from functools import cache

import pytest
import torch

from longspan.comm import World
from longspan.layout import Layout
from longspan.model import prepare
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.stock import error, gradients_of, stock_answer, texts, tiny, worst
from tests.model.test_parity import _logits

LENGTHS = (13, 1, 30, 7, 2, 18)
FAMILIES = ("mistral", "gemma2", "gpt-oss", "qwen3-moe", "deepseek-v3")
TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p", ("a2a", "p2p"), "auto")
DEGREES = (1, 2, 4)
CALLS = [(1, "p2p"), *((cp, kind) for cp in DEGREES[1:] for kind in TYPES)]


def _compare(rank: int, slots: int) -> dict[tuple[object, ...], tuple[float, float, float]]:
    """Errors of logits, loss and gradients, relative to the stock model."""
    found = {}
    documents = texts(LENGTHS)
    with World(Layout(ranks=slots), backend=backend()) as world:
        for family in FAMILIES:
            wanted = stock_answer(family, torch.float32, documents, world.device)
            model = prepare(
                tiny(family, attention="eager"),
                world,
                shard_parameters=False,
                activation_checkpointing=True,
                probe=family != "gpt-oss",  # experts in float32 have no kernel on the meta device (torch 2.13)
            )
            for cp, kind in CALLS:
                plan = plan_fixed(
                    LENGTHS,
                    world.home,
                    cp=cp,
                    cp_comm_type=kind,
                    hierarchical_context_parallel_sizes=(2, cp // 2) if cp > 1 else None,
                )
                logits = _logits(model, plan, documents, world)
                loss = run_step(model, plan, documents, world).loss
                found[family, cp, kind] = (
                    max(error(logits[d], wanted.logits[d]) for d in range(len(LENGTHS))),
                    abs(loss - wanted.loss) / wanted.loss,
                    worst(gradients_of(model), wanted.gradients),
                )
                model.zero_grad()
    return found


@cache
def _results() -> list[dict[tuple[object, ...], tuple[float, float, float]]]:
    return run_ranks(_compare, 4, 4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cp", DEGREES)
def test_equals_the_stock_model_under_every_type(family: str, cp: int) -> None:
    for errors in _results():
        for kind in (kind for degree, kind in CALLS if degree == cp):
            logits, loss, gradients = errors[family, cp, kind]
            assert max(logits, gradients) < 1e-5 and loss < 1e-6, (kind, logits, loss, gradients)


def _dropped(rank: int, slots: int) -> dict[object, tuple[float, float]]:
    """Loss and gradient norm in training mode with dropout in attention, by degree and type; without dropout (None)."""
    found = {}
    documents = texts(LENGTHS)
    with World(Layout(ranks=slots), backend=backend()) as world:
        for kind, cp, step in [*((kind, cp, 1) for cp, kind in CALLS), (None, 1, 1), ("p2p", 2, 2)]:
            model = tiny("qwen3")
            for layer in model.model.layers:
                layer.self_attn.attention_dropout = 0.0 if kind is None else 0.3
            prepare(model, world, shard_parameters=False, activation_checkpointing=cp == 2)
            levels = (2, cp // 2) if cp > 1 else None
            options = {"cp_comm_type": kind or "p2p", "hierarchical_context_parallel_sizes": levels}
            result = run_step(model, plan_fixed(LENGTHS, world.home, cp=cp, **options), documents, world, step=step)
            found[kind, cp, step] = (result.loss, result.grad_norm)
    return found


def test_dropout_is_the_same_at_every_degree_and_under_every_type() -> None:
    for found in run_ranks(_dropped, 4, 4):
        wanted = found["p2p", 1, 1]
        for other in ((None, 1, 1), ("p2p", 2, 2)):  # without dropout, and with that of the next step
            assert abs(found.pop(other)[0] - wanted[0]) > 1e-3 * wanted[0]
        for call, loss_and_norm in found.items():
            assert loss_and_norm == pytest.approx(wanted, rel=1e-5), call
