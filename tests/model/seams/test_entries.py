"""Layers that attend to entries, keys made of windows of rows, equal the stock class on each document alone.

Loss and every gradient, and what rows choose as integers; a copy of the class under another name too. Each split that
leaves out what other ranks hold is noticed in a gradient.
"""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from longspan import Layout, World, bind, plan_dynamic, plan_fixed, plan_padded, prepare
from longspan.attention.entries import attend_with_entries
from longspan.doctor.stock import compute_in_float64
from longspan.errors import AttentionError, ModelError
from longspan.model.kinds import chooses_entries
from longspan.model.seams import entries
from longspan.model.seams.chosen_keys import index_scores
from longspan.mtp import add_mtp
from longspan.testing import backend, run_ranks
from tests import parity
from tests.model.seams.families import ENTRIES, gradient_error, here, tiny
from tests.model.seams.renamed import renamed_class
from tests.model.stock import Answer, answer, prepare_untried, random_model, texts
from tests.mutation import each_mutated

FAMILY = "deepseek-v4"
EAGERLY = {"attn_implementation": "eager", "experts_implementation": "eager"}
pytestmark = pytest.mark.skipif(not here([FAMILY]), reason="this transformers has no such class")
LENGTHS = (19, 3, 40, 8, 1, 7, 33, 4)  # around both strides, and documents without an entry
LONG = (300, 17, 129, 512, 127)
CHANGES = {
    "rows of other ranks are left out of windows": (
        "attention.entries",
        "torch.cat([x, arrived, none])",
        "torch.cat([x, none.expand(len(arrived), -1), none])",
    ),
    "gradients of rows before runs": (
        "comm.row_fetch",
        "total.index_add_(0, self.rows, handle.wait())",
        "(handle.wait(), total)[1]",
    ),
    "gradients of entries from other ranks": (
        "attention.entries",
        "dentries = chosen.v if call.latents else chosen.k + chosen.v",
        "dentries = 0 * (chosen.v if call.latents else chosen.k + chosen.v)",
    ),
    "an entry before its window ended": (
        "attention.masks",
        "np.minimum(q.stop // stride,",
        "np.minimum(-(-q.stop // stride),",
    ),
    "windows numbered on a rank": (
        "layout.entries",
        "np.maximum(window * stride, 0)",
        "np.arange(len(window)) * stride",
    ),
    "a sink for rows, and one for entries": ("attention.entries", "replace(call, sinks=None)", "call"),
    "a choice of another document": ("model.seams.entries", "entries.firsts[document]", "entries.firsts[0]"),
}


@cache
def _exact() -> Answer:
    with compute_in_float64():
        return answer(tiny(FAMILY).train(), texts(LENGTHS))


def _renamed() -> Any:
    kind = renamed_class(transformers.DeepseekV4ForCausalLM, "DeepseekV4", "Renamed")
    return random_model(transformers.DeepseekV4Config(**ENTRIES), make=kind._from_config, **EAGERLY)


def _case(model: Any, home: Layout, plans: dict[str, Any], **more: Any) -> parity.Case:
    evaluation = plan_fixed(LENGTHS, home, cp=1)
    return parity.Case(
        model,
        home,
        plans,
        texts(LENGTHS),
        _exact(),
        in_float64=True,
        compare=gradient_error,
        evaluation=evaluation,
        **more,
    )


def _plans(home: Layout) -> dict[str, Any]:
    degree = home.slots
    return {
        "zigzag": plan_fixed(LENGTHS, home, cp=degree),
        "contiguous": plan_fixed(LENGTHS, home, cp=degree, partition="contiguous", cp_comm_type="all_gather"),
        "padded": plan_padded(LENGTHS, home, cp=degree),
        "dynamic": plan_dynamic(LENGTHS, home, max_tokens_per_slot=70),
    }


@pytest.mark.whole
def test_equals_the_stock_class_under_another_name() -> None:
    home = Layout(ranks=2)
    parity.check({"renamed": _case(_renamed, home, {"zigzag": plan_fixed(LENGTHS, home, cp=2)}, tried=True)})


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [2, 3])
def test_equals_the_stock_class_under_every_plan(ranks: int) -> None:
    home = Layout(ranks=ranks)
    options = ({}, {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"})
    parity.check({str(x): _case(partial(tiny, FAMILY), home, _plans(home), options=x) for x in options})


@cache
def _exact_of_long_documents() -> Answer:
    with compute_in_float64():
        return answer(_published_strides().train(), texts(LONG))


def _published_strides() -> Any:
    rates = {"heavily_compressed_attention": 128, "compressed_sparse_attention": 4}
    return tiny(FAMILY, compress_rates=rates, sliding_window=128, index_topk=32)


@pytest.mark.whole
def test_a_window_may_lie_on_three_ranks() -> None:
    home = Layout(ranks=3)
    plans = {
        "zigzag": plan_fixed(LONG, home, cp=3),
        "contiguous": plan_fixed(LONG, home, cp=3, partition="contiguous"),
    }
    case = parity.Case(
        _published_strides,
        home,
        plans,
        texts(LONG),
        _exact_of_long_documents(),
        in_float64=True,
        compare=gradient_error,
    )
    parity.check({"strides of 128 and 4": case})


def _choices_of_the_class() -> list[list[set[int]]]:
    """Of each document, and each of its rows, the entries that the class itself chooses."""
    model, chosen = tiny(FAMILY), list[list[set[int]]]()
    for module in model.modules():
        if chooses_entries(module):
            module.register_forward_hook(
                lambda _, __, out: chosen.append([{n for n in row if n >= 0} for row in out[0].tolist()])
            )
    with torch.no_grad():
        for document in texts(LENGTHS):
            model(input_ids=torch.from_numpy(document)[None], use_cache=False)
    return chosen


def _best_of_all(q: Tensor, weights: Tensor, keys: Tensor, first: int, k: int, stride: int) -> Tensor:
    """What `choose_best_keys` chooses, from all scores at once."""
    scores = torch.einsum("rh,rhs->rs", weights, torch.einsum("rhd,sd->rhs", q, keys).relu())
    ends = torch.arange(len(keys)) * stride + stride - 1
    scores = scores.masked_fill(ends > first + torch.arange(len(q))[:, None], -torch.inf)
    best, order = (x[:, :k] for x in scores.sort(dim=1, descending=True, stable=True))
    chosen = torch.full((len(q), k), -1, dtype=torch.int32)
    chosen[:, : order.shape[1]] = order.int().masked_fill(best == -torch.inf, -1)
    return chosen


def _on_ranks(rank: int, ranks: int, changes: dict[str, Any], exact: Answer) -> tuple[dict[str, Any], int]:
    torch.set_num_threads(1)
    home = Layout(ranks=ranks)
    case = _case(_renamed, home, {"zigzag": plan_fixed(LENGTHS, home, cp=ranks)})
    chosen = list[Tensor]()
    choose = entries.choose_entries
    with (
        World(home, backend=backend(), timeout=60) as world,
        compute_in_float64(),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        model = prepare_untried(_renamed(), world)
        found = dict[str, Any]()
        for change in each_mutated(changes):
            found[change] = parity.step_errors(case, model, case.plans["zigzag"], world)[0]
        (_, of_entries) = model.execution.kernel_texts  # of rows, and of entries
        assert "entries of 8 rows and entries of 4 rows and chosen entries" in of_entries
        shard = bind(plan_fixed(LENGTHS, home, cp=ranks).micro_batches[0], world)
        by_kernels = list[Tensor]()
        monkeypatch.setattr(
            entries, "choose_best_keys", lambda *x: (by_kernels.append(_best_of_all(*x)), by_kernels[-1])[1]
        )
        ids = torch.from_numpy(np.concatenate(texts(LENGTHS))).to(world.device)
        monkeypatch.setattr(entries, "choose_entries", lambda *x: (chosen.append(choose(*x)), chosen[-1])[1])
        documents = shard.scatter(torch.from_numpy(np.repeat(np.arange(len(LENGTHS)), LENGTHS)).to(world.device))
        expected = _choices_of_the_class()
        other = 0
        for by_kernel in (False, True):
            assert not by_kernels
            monkeypatch.setattr(index_scores, "can_score", lambda q, by_kernel=by_kernel: by_kernel)
            with torch.no_grad():
                model(input_ids=shard.scatter(ids)[None], position_ids=shard.position_ids[None], shard=shard)
            rows = zip(documents.tolist(), shard.position_ids.tolist(), chosen[-1][0].tolist(), strict=True)
            assert bool(by_kernels) == by_kernel
            other += sum({n for n in row if n >= 0} != expected[d][position] for d, position, row in rows)
    return found, other


def _check_on_ranks(ranks: int, changes: dict[str, Any]) -> None:
    of_ranks = run_ranks(_on_ranks, ranks, ranks, changes, _exact())
    assert all(found["nothing"].within(parity.WIDE) for found, _ in of_ranks), of_ranks
    assert not any(other for _, other in of_ranks)
    unnoticed = [name for name in changes if not max(found[name].gradients for found, _ in of_ranks) > 1e-3]
    assert not unnoticed, of_ranks


def test_chosen_as_the_class_does_and_a_naive_split_turns_gradients_red() -> None:
    _check_on_ranks(2, dict([*CHANGES.items()][:1]))


@pytest.mark.whole
def test_what_is_left_out_is_noticed_in_gradients() -> None:
    _check_on_ranks(2, CHANGES)


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_chosen_as_the_class_does_at_every_degree(ranks: int) -> None:
    _check_on_ranks(ranks, {})


def _prepared(world: World, **changes: Any) -> Any:
    return prepare(tiny(FAMILY, **changes), world)


def _scaled(kind: str) -> dict[str, Any]:
    main = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return {"main": main, "compress": main | {"rope_type": kind, "factor": 2.0}}


def _with_adapter_on_an_indexer(world: World) -> None:
    peft = pytest.importorskip("peft")
    targets = ["model.layers.2.self_attn.compressor.indexer.q_b_proj"]
    prepare(peft.get_peft_model(tiny(FAMILY), peft.LoraConfig(r=2, target_modules=targets)), world)


def _tree(world: World) -> Any:
    return bind(plan_fixed((8, 5, 6), world.home, cp=1, parents=(-1, 0, 0)).micro_batches[0], world)


def _with_shared_prefixes(world: World) -> None:
    shard = _tree(world)
    ids = torch.zeros(1, shard.local_rows, dtype=torch.long, device=world.device)
    prepare_untried(tiny(FAMILY), world)(input_ids=ids, position_ids=shard.position_ids[None], shard=shard)


def _attend_to_a_tree(world: World) -> None:
    shard = _tree(world)
    q = torch.zeros(shard.local_rows, 2, 16, device=world.device)
    attend_with_entries(q, q[:, :1], q[:0, :1], (), shard, window=4, scale=1.0)


REFUSED = {
    "dropout of weights": (
        lambda world: _prepared(world, attention_dropout=0.1),
        r"layers.1.self_attn drops weights of attention at a rate of 0.1, and attends to rows and entries",
    ),
    "frequencies by length": (
        lambda world: _prepared(world, rope_parameters=_scaled("dynamic")),
        r"rotates entries by frequencies that depend on a document's length \(rope type dynamic\)",
    ),
    "an adapter on an indexer": (_with_adapter_on_an_indexer, "belongs to an indexer, which gets no gradient"),
    "shared prefixes": (
        _with_shared_prefixes,
        "has entries made of windows of rows, exact for separate documents alone",
    ),
    "shared prefixes, by hand": (_attend_to_a_tree, "entries are made of the rows of one document"),
    "multi-token prediction": (lambda world: add_mtp(tiny(FAMILY), 1), "several streams of each row"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, world: World) -> None:
    call, message = REFUSED[name]
    with pytest.raises((AttentionError, ModelError), match=message):
        call(world)
