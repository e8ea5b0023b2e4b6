"""Models under a home equal the stock model that sees documents one by one: logits, loss, every gradient.

Qwen3, Llama, and every kind of attention of well-known models: windows (Mistral), windows and soft caps (Gemma 2),
sinks with a window in every other layer (gpt-oss), query norms (Qwen3-MoE), values unlike queries (DeepSeek-V3).
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan import Layout, Plan, SequenceShard, World, attend, bind, plan_fixed, prepare, run_step
from longspan.testing import backend, run_ranks
from tests.model.stock import Answer, error, gradients_of, prepare_untried, stock_answer, texts, tiny, worst
from tests.versions import transformers_before

LENGTHS = (13, 1, 30, 7, 2, 18)  # ragged, with documents shorter than 2 cp and one without a target
TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p", ("a2a", "p2p"), "auto")
CALLS = [(1, "p2p"), *((cp, kind) for cp in (2, 4) for kind in TYPES)]
KINDS: dict[str, dict[str, bool]] = {
    "copies": {"shard_parameters": False},
    "sharded": {},
    "recomputed": {"activation_checkpointing": True},
    "recomputed copies": {"shard_parameters": False, "activation_checkpointing": True},
}
WIDE, SINGLE = torch.float64, torch.float32
Model = tuple[str, torch.dtype, str]
Rows = dict[Model, Sequence[tuple[int, Any]]]  # degrees and types
TABLES: dict[str, tuple[int, Rows]] = {
    "4 slots": (
        4,
        {
            ("qwen3", WIDE, "sharded"): [(4, "p2p")],
            ("qwen3", WIDE, "recomputed"): [(2, "all_gather")],
        },
    ),
    "attention": (
        4,
        {
            ("mistral", SINGLE, "recomputed copies"): [(4, "auto")],
            ("gemma2", SINGLE, "recomputed copies"): [(4, "a2a+p2p")],
            ("gpt-oss", SINGLE, "recomputed copies"): [(4, ("a2a", "p2p"))],
            ("deepseek-v3", SINGLE, "recomputed copies"): [(4, "p2p")],
            # tables of rotary angles; before 5.24 they bypass transformers' interface of attention
            **{(f, SINGLE, "sharded"): [(2, "p2p")] for f in ("gpt-j",) if not transformers_before("5.24")},
        },
    ),
}
ROWS = [
    (table, family) for table, (_, rows) in TABLES.items() for family in dict.fromkeys(family for family, *_ in rows)
]


def _compare(
    rank: int, slots: int, rows: Rows, exact: dict[tuple[str, torch.dtype], Answer]
) -> dict[tuple[Any, ...], tuple[float, float, float]]:
    """Errors of logits, loss and gradients, relative to the stock model; the worst of all documents and parameters."""
    errors, documents = dict[tuple[Any, ...], tuple[float, float, float]](), texts(LENGTHS)
    with World(Layout(ranks=slots), backend=backend()) as world:
        for (family, dtype, kind), calls in rows.items():
            stock = exact[family, dtype]
            attention = "eager" if dtype == SINGLE else "sdpa"
            make = prepare_untried if errors else prepare
            model = make(tiny(family, dtype, attention=attention), world, **KINDS[kind])
            for cp, cp_comm_type in calls:
                levels = (2, cp // 2) if cp_comm_type == "a2a+p2p" else None
                options: Any = {"cp_comm_type": cp_comm_type, "hierarchical_context_parallel_sizes": levels}
                plan = plan_fixed(LENGTHS, world.home, cp=cp, **options)
                logits = _logits(model, plan, documents, world)
                loss = run_step(model, plan, documents, world).loss
                errors[family, dtype, kind, cp, cp_comm_type] = (
                    max(error(logits[d], stock.logits[d]) for d in range(len(LENGTHS))),
                    abs(loss - stock.loss) / stock.loss,
                    worst(gradients_of(model), stock.gradients),
                )
                model.zero_grad()
    return errors


@torch.no_grad()
def _logits(model: torch.nn.Module, plan: Plan, documents: list[np.ndarray], world: World) -> dict[int, Tensor]:
    """Whole logits of every document, on the CPU."""
    logits_of: dict[int, Tensor] = {}
    for micro_batch in plan.micro_batches:
        shard = bind(micro_batch, world).with_padding()
        ids = torch.from_numpy(np.concatenate([documents[d] for d in micro_batch.documents])).to(world.device)
        local = model(input_ids=shard.scatter(ids)[None], position_ids=shard.position_ids[None], shard=shard).logits
        packed = shard.gather(local[0]).cpu()
        logits_of |= dict(zip(micro_batch.documents, packed.split(list(micro_batch.lengths)), strict=True))
    return logits_of


@cache
def _results(table: str) -> list[dict[tuple[Any, ...], tuple[float, float, float]]]:
    slots, rows = TABLES[table]
    exact = {(family, dtype): stock_answer(family, dtype, texts(LENGTHS)) for family, dtype, _ in rows}
    return run_ranks(_compare, slots, slots, rows, exact, timeout=240)


@pytest.mark.parametrize(("table", "family"), ROWS)
def test_equals_the_stock_model(table: str, family: str) -> None:
    for errors in _results(table):
        of_family = {case: of_case for case, of_case in errors.items() if case[0] == family}
        assert of_family
        for case, (logits, loss, gradients) in of_family.items():
            wide = case[1] == WIDE
            assert max(logits, gradients) < (1e-12 if wide else 1e-5), (case, logits, gradients)
            assert loss < (1e-12 if wide else 1e-6), (case, loss)


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


def test_the_seed_is_that_of_the_step_in_which_a_shard_was_bound() -> None:
    """Step and seed change before recomputation; a shard that is bound after that is another."""
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
        assert torch.equal(same, expected) and (other - expected).norm() > 0.1
