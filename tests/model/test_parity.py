"""Models under a home equal the stock model that sees documents one by one: logits, loss, every gradient.

Qwen3, Llama, and every kind of attention of well-known models: windows (Mistral), windows and soft caps (Gemma 2),
sinks with a window in every other layer (gpt-oss), query norms (Qwen3-MoE), values unlike queries (DeepSeek-V3).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan import Layout, SequenceShard, World, attend, bind, plan_fixed, prepare, run_step
from longspan.testing import backend, run_ranks
from tests import parity
from tests.model.stock import stock_answer, texts, tiny
from tests.versions import transformers_before

LENGTHS = (13, 1, 30, 7, 2, 18)  # ragged, with documents shorter than 2 cp and one without a target
TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p", ("a2a", "p2p"), "auto")
CALLS = [(1, "p2p"), *((cp, kind) for cp in (2, 4) for kind in TYPES)]
COPIES, RECOMPUTED = {"shard_parameters": False, "activation_checkpointing": True}, {"activation_checkpointing": True}
WIDE, SINGLE = torch.float64, torch.float32
Row = tuple[str, torch.dtype, dict[str, bool], int, Any]  # a family, options of prepare, a degree, a type
TABLES: dict[str, list[Row]] = {  # on 4 slots
    "few": [  # keys gathered whole are in seams/test_families.py
        ("qwen3", WIDE, {}, 4, "p2p"),
        ("gpt-oss", SINGLE, COPIES, 4, ("a2a", "p2p")),
        ("deepseek-v3", SINGLE, COPIES, 4, "p2p"),
    ],
    "attention": [
        ("qwen3", WIDE, RECOMPUTED, 2, "all_gather"),
        ("mistral", SINGLE, COPIES, 4, "auto"),
        ("gemma2", SINGLE, COPIES, 4, "a2a+p2p"),
        # tables of rotary angles; before 5.24 they bypass transformers' interface of attention
        *([] if transformers_before("5.24") else [("gpt-j", SINGLE, {}, 2, "p2p")]),
    ],
}


@pytest.mark.parametrize("table", ["few", pytest.param("attention", marks=pytest.mark.whole)])
def test_equals_the_stock_model(table: str) -> None:
    home, documents, cases = Layout(ranks=4), texts(LENGTHS), dict[Any, parity.Case]()
    for family, dtype, options, cp, kind in TABLES[table]:
        levels = (2, cp // 2) if kind == "a2a+p2p" else None
        stock = stock_answer(family, dtype, documents)
        plan = plan_fixed(LENGTHS, home, cp=cp, cp_comm_type=kind, hierarchical_context_parallel_sizes=levels)
        cases[family, cp, kind] = parity.Case(
            partial(tiny, family, dtype, attention="eager" if dtype == SINGLE else "sdpa"),
            home,
            {"fixed": plan},
            documents,
            stock,
            parity.WIDE if dtype == WIDE else parity.SINGLE,
            options,
            tried=not cases,
            logits=stock.logits,
        )
    parity.check(cases)


def _dropped(rank: int, homes: Sequence[Layout]) -> dict[object, tuple[float, float]]:
    """Loss and gradient norm with dropout in attention by home, type (None: without dropout), degree and step."""
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


def test_the_seed_is_that_of_the_step_in_which_a_shard_was_bound(world: World) -> None:
    """Step and seed change before recomputation; a shard that is bound after that is another."""
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
    assert torch.equal(same, expected) and (other - expected).norm() > 0.1
