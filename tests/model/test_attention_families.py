"""Every kind of attention that well-known models have equals the stock model, under every communication type.

Windows (Mistral), windows and soft caps (Gemma 2), sinks with a window in every other layer (gpt-oss), query norms
(Qwen3-MoE), values unlike queries (DeepSeek-V3): logits, loss and every gradient, with recomputation.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan.attention import attend
from longspan.comm import SequenceShard, World, bind
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


def _compare(
    rank: int, slots: int, chosen: list[tuple[str, int]]
) -> dict[tuple[object, ...], tuple[float, float, float]]:
    """Errors of logits, loss and gradients, relative to the stock model."""
    errors = {}
    documents = texts(LENGTHS)
    with World(Layout(ranks=slots), backend=backend()) as world:
        for family in dict.fromkeys(family for family, _ in chosen):
            stock = stock_answer(family, torch.float32, documents, world.device)
            model = prepare(
                tiny(family, attention="eager"),
                world,
                shard_parameters=False,
                activation_checkpointing=True,
                probe=family != "gpt-oss",  # experts in float32 have no kernel on the meta device (torch 2.13)
            )
            for cp, kind in (call for call in CALLS if (family, call[0]) in chosen):
                plan = plan_fixed(
                    LENGTHS,
                    world.home,
                    cp=cp,
                    cp_comm_type=kind,
                    hierarchical_context_parallel_sizes=(2, cp // 2) if cp > 1 else None,
                )
                logits = _logits(model, plan, documents, world)
                loss = run_step(model, plan, documents, world).loss
                errors[family, cp, kind] = (
                    max(error(logits[d], stock.logits[d]) for d in range(len(LENGTHS))),
                    abs(loss - stock.loss) / stock.loss,
                    worst(gradients_of(model), stock.gradients),
                )
                model.zero_grad()
    return errors


CASES = [(family, cp) for cp in DEGREES for family in FAMILIES]
IN_CI = [case for case in CASES if case[1] == 4]  # all at the widest


@cache
def _results(in_ci: bool) -> list[dict[tuple[object, ...], tuple[float, float, float]]]:
    return run_ranks(_compare, 4, 4, [case for case in CASES if (case in IN_CI) == in_ci])


@pytest.mark.parametrize(
    ("family", "cp"), [pytest.param(*c, marks=[] if c in IN_CI else [pytest.mark.whole]) for c in CASES]
)
def test_equals_the_stock_model_under_every_type(family: str, cp: int) -> None:
    for errors in _results((family, cp) in IN_CI):
        for kind in (kind for degree, kind in CALLS if degree == cp):
            logits, loss, gradients = errors[family, cp, kind]
            assert max(logits, gradients) < 1e-5 and loss < 1e-6, (kind, logits, loss, gradients)


def _dropped(rank: int, homes: Sequence[Layout]) -> dict[object, tuple[float, float]]:
    """Loss and gradient norm in training mode with dropout in attention, by home, degree, type, recomputation and step;
    without dropout (None)."""
    answers = {}
    documents = texts(LENGTHS)
    torch.manual_seed(7 * rank)  # ranks go by the first one's, as it is when the world opens
    for home in homes:
        with World(home, backend=backend()) as world:
            torch.manual_seed(rank)
            degrees = [cp for cp in (1, 2, 4) if home.slots % cp == 0]
            calls = [(kind, cp, 1) for cp, kind in CALLS if cp in degrees] if home.slots == 4 else [("p2p", 2, 1)]
            for kind, cp, step in [*calls, (None, 1, 1), ("p2p", 2, 2)]:
                model = tiny("qwen3")
                for layer in model.model.layers:
                    layer.self_attn.attention_dropout = 0.0 if kind is None else 0.3
                recompute = {1: "none", 2: "full", 4: "selective"}[cp]
                model = prepare(model, world, shard_parameters=home.tp > 1, activation_checkpointing=recompute)
                levels = (2, cp // 2) if cp > 1 else None
                options = {"cp_comm_type": kind or "p2p", "hierarchical_context_parallel_sizes": levels}
                result = run_step(model, plan_fixed(LENGTHS, home, cp=cp, **options), documents, world, step=step)
                answers[home, kind, cp, step] = (result.loss, result.grad_norm)
    return answers


@pytest.mark.whole
def test_dropout_is_the_same_at_every_degree_under_every_type_and_home() -> None:
    homes = (Layout(ranks=4), Layout(ranks=4, tp=2), Layout(ranks=4, pp=2), Layout(ranks=4, dp_replicate=2))
    for answers in run_ranks(_dropped, 4, homes):
        expected = answers[homes[0], "p2p", 1, 1]
        for (home, kind, cp, step), loss_and_norm in answers.items():
            if kind is None or step == 2:  # without dropout, and with that of the next step
                assert abs(loss_and_norm[0] - expected[0]) > 1e-3 * expected[0], (home, kind, cp, step)
            else:
                assert loss_and_norm == pytest.approx(expected, rel=1e-5), (home, kind, cp, step)


def _seed_at_binding(rank: int) -> tuple[float, float]:
    """How far gradients are off where the world's step and seed change before recomputation, and if bound after."""
    with World(Layout(ranks=1), backend=backend()) as world:
        micro_batch = plan_fixed([9], world.home, cp=1).micro_batches[0]
        q = torch.randn(9, 2, 4, dtype=torch.float64, device=world.device, requires_grad=True)

        def gradient(shard: SequenceShard, change: Callable[[], None], recompute: bool) -> Tensor:
            layer = partial(attend, shard=shard, dropout=0.5)
            out = checkpoint(layer, q, q, q, use_reentrant=False) if recompute else layer(q, q, q)
            change()
            return torch.autograd.grad(out.square().sum(), q)[0]

        def next_step() -> None:
            world.step, world.seed = world.step + 1, world.seed + 1

        expected = gradient(shard := bind(micro_batch, world), lambda: None, False)
        same = gradient(shard.with_padding(), next_step, True)
        other = gradient(bind(micro_batch, world), next_step, True)
        return (same - expected).norm().item(), (other - expected).norm().item()


def test_the_seed_is_that_of_the_step_in_which_a_shard_was_bound() -> None:
    ((same, other),) = run_ranks(_seed_at_binding, 1)
    assert same == 0 and other > 0.1
