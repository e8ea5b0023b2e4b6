"""Layers whose rows choose pools of keys, or blocks for each key/value head, equal the stock class on one document.

Loss and every gradient, and what rows choose as integers; copies of the classes under other names too. Each split that
counts pools otherwise than from a document's first row, or leaves out what other ranks hold, is noticed in a gradient.
"""

from copy import deepcopy
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING

from longspan import Layout, World, bind, plan_dynamic, plan_fixed, run_step
from longspan.doctor.stock import compute_in_float64
from longspan.errors import ModelError
from longspan.model import add_mtp
from longspan.model.adapted_modules import is_adapted
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.exactness import trials
from longspan.model.exactness.check_model import check_model_on_this_rank
from longspan.model.exactness.class_trial import try_small_model_of_class
from longspan.model.exactness.small_copies import shrink_configuration
from longspan.model.kinds import find_indexers
from longspan.model.seams.chosen_keys import blocks
from longspan.model.seams.chosen_keys.blocks import keys_of_blocks
from longspan.model.seams.chosen_keys.indexers import order_equal_scores
from longspan.testing import backend, run_ranks
from tests import parity
from tests.model.seams.families import gradient_error
from tests.model.seams.renamed import renamed_class
from tests.model.stock import Answer, answer, gradients_of, prepare_untried, random_model, texts, worst
from tests.model.test_compiled_layers import Graphs
from tests.mutation import each_mutated, mutated

LENGTHS = (19, 3, 40, 8, 1, 7, 33, 4)  # around a pool's 4 rows, and documents without a pool, in one packed row


class Kind(NamedTuple):
    """A class, how its configuration begins, and changes of our source, each of which must turn a gradient red."""

    name: str
    prefix: str
    changes: dict[str, tuple[str, str, str]]


POOLS = "model.seams.chosen_keys.pools"
BLOCKS = "model.seams.chosen_keys.blocks"
IN_POOLS = {
    "pools counted over packed rows": (
        "layout.entries",
        "position = window[:, None] * stride + np.arange(stride)",
        "position = np.maximum(window[:, None] * stride + np.arange(stride) - runs.offset[run][:, None] % stride, 0)",
    ),
    "rows of other ranks are left out of pools": (
        "attention.entries",
        "torch.cat([x, arrived, none])",
        "torch.cat([x, x[:1].expand(len(arrived), -1), none])",
    ),
    "pools of the first document": (POOLS, "members.entries.firsts[document]", "members.entries.firsts[0]"),
    "a pool before its last row": (POOLS, ">= (position + 1) // form.ratio", ">= (position + 2) // form.ratio"),
    "no rows after the last pool": (POOLS, "ended * form.ratio > position, -1", "ended > -1, -1"),
}
IN_BLOCKS = {
    "blocks of the first document": (BLOCKS, "group_keys[document_rows]", "group_keys"),
    "the first head's blocks for all": (BLOCKS, "= blocks.transpose", "= blocks[:1].expand_as(blocks).transpose"),
    "another head's blocks": (BLOCKS, "= blocks.transpose", "= blocks.flip(0).transpose"),
    "blocks of another size": (BLOCKS, "block_size=indexer.block_size", "block_size=2 * indexer.block_size"),
}
KINDS = {
    "qwen4_exp_text": Kind("Qwen4ExpForCausalLM", "Qwen4Exp", IN_POOLS),
    "minimax_m3_vl_text": Kind("MiniMaxM3VLForCausalLM", "MiniMaxM3VL", IN_BLOCKS),
    "glm5_next": Kind("Glm5NextForConditionalGeneration", "Glm5Next", {**dict([*IN_POOLS.items()][:2])}),
}
HERE = [family for family in KINDS if family in CONFIG_MAPPING]
pytestmark = pytest.mark.skipif(not HERE, reason="this transformers has no such class")
OPTIONS = ({}, {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"})


@cache
def _config(family: str) -> Any:
    return shrink_configuration(CONFIG_MAPPING[family]())


def _model(family: str, *, renamed: bool = False) -> Any:
    kind = getattr(transformers, KINDS[family].name)
    if renamed:
        kind = renamed_class(kind, KINDS[family].prefix, "Renamed")
    settings: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return random_model(deepcopy(_config(family)), make=kind._from_config, **settings)


@cache
def _exact(family: str) -> Answer:
    with compute_in_float64():
        model = _model(family).train()
        order_equal_scores(model)
        return answer(model, texts(LENGTHS))


def _case(family: str, home: Layout, plans: dict[str, Any], *, renamed: bool = False, **more: Any) -> parity.Case:
    return parity.Case(
        partial(_model, family, renamed=renamed),
        home,
        plans,
        texts(LENGTHS),
        _exact(family),
        in_float64=True,
        compare=gradient_error,
        **more,
    )


def _plans(home: Layout) -> dict[str, Any]:
    degree = home.slots
    return {
        "zigzag": plan_fixed(LENGTHS, home, cp=degree),
        "contiguous": plan_fixed(LENGTHS, home, cp=degree, partition="contiguous", cp_comm_type="all_gather"),
        "padded": plan_fixed(LENGTHS, home, cp=degree, max_tokens_per_slot=40, row_multiple=3),
        "dynamic": plan_dynamic(LENGTHS, home, max_tokens_per_slot=70),
    }


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("family", HERE)
def test_equals_the_stock_class_under_every_plan(family: str, ranks: int) -> None:
    home = Layout(ranks=ranks)
    evaluation = plan_fixed(LENGTHS, home, cp=1)
    cases = {str(x): _case(family, home, _plans(home), options=x, evaluation=evaluation) for x in OPTIONS}
    renamed = _case(family, home, {"zigzag": plan_fixed(LENGTHS, home, cp=ranks)}, renamed=True, tried=True)
    parity.check(cases | {"under another name": renamed})


Choices = list[list[list[list[int]]]]  # of each layer and head, of each row of all documents, sorted


def _as_positions(indexer: Any, out: Any) -> list[list[list[int]]]:
    """What an indexer returned (a mask, positions, or blocks of each head) as the positions of each row, for each head.

    Later ones than the row's own may be among them.
    """
    if hasattr(out, "chosen"):
        keys = [keys_of_blocks(out.chosen[0], out.block_size, torch.full((out.chosen.shape[1],), 10**6))]
    elif out.ndim == 4 and out.dtype == torch.bool:
        return [[row.nonzero()[:, 0].tolist() for row in out[0, 0]]]
    elif out.ndim == 4:
        keys = [keys_of_blocks(x, indexer.block_size, torch.full((x.shape[0],), 10**6)) for x in out[0]]
    else:
        keys = [out[0]]
    return [[sorted(key for key in row if key >= 0) for row in head.tolist()] for head in keys]


def _choices_of_the_class(family: str) -> Choices:
    model, layers = _model(family), Choices()
    order_equal_scores(model)
    for indexer in find_indexers(model).values():
        layers.append([])

        def note(module: Any, _: Any, out: Any, heads: Any = layers[-1]) -> None:
            for head, rows in enumerate(_as_positions(module, out)):
                heads.extend([[]] * (head + 1 - len(heads)))
                heads[head] = heads[head] + rows

        indexer.register_forward_hook(note)
    with torch.no_grad():
        for document in texts(LENGTHS):
            model(input_ids=torch.from_numpy(document)[None], use_cache=False)
    return layers


def _other_choices(model: Any, expected: Choices, degree: int, world: World) -> int:
    """How many rows choose other keys than the class does, of any layer and head."""
    layers = Choices()
    hooks = [
        indexer.register_forward_hook(lambda module, _, out: layers.append(_as_positions(module, out)))
        for indexer in find_indexers(model).values()
    ]
    shard = bind(plan_fixed(LENGTHS, world.home, cp=degree).micro_batches[0], world)
    ids, first_rows = np.concatenate(texts(LENGTHS)), np.cumsum((0, *LENGTHS))
    documents = shard.scatter(torch.from_numpy(np.repeat(np.arange(len(LENGTHS)), LENGTHS)))
    positions = shard.position_ids
    with torch.no_grad():
        local = shard.scatter(torch.from_numpy(ids).to(world.device))
        model(input_ids=local[None], position_ids=positions[None], shard=shard)
    for hook in hooks:
        hook.remove()
    rows = first_rows[documents.cpu().numpy()] + positions.cpu().numpy()
    return sum(
        [key for key in theirs[row] if key <= position] != [key for key in ours[i] if key <= position]
        for layer, expected_layer in zip(layers, expected, strict=True)
        for ours, theirs in zip(layer, expected_layer, strict=True)
        for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True))
    )


Noticed = dict[str, tuple[dict[str, Any], int]]


def _on_ranks(rank: int, ranks: int, changes: dict[str, Any], exact: dict[str, Answer], renamed: bool) -> Noticed:
    """Of each family the errors of a step with each change, and how many rows chose otherwise without one."""
    torch.set_num_threads(1)
    home, noticed = Layout(ranks=ranks), Noticed()
    with World(home, backend=backend(), timeout=60) as world, compute_in_float64():
        for family, of_family in changes.items():
            model = prepare_untried(_model(family, renamed=renamed), world)
            errors = dict[str, Any]()
            plan = plan_fixed(LENGTHS, home, cp=ranks)
            case = parity.Case(
                lambda: None, home, {}, texts(LENGTHS), exact[family], in_float64=True, compare=gradient_error
            )
            for change in each_mutated(of_family):
                errors[change] = parity.step_errors(case, model, plan, world)[0]
            expected = _choices_of_the_class(family)
            others = _other_choices(model, expected, ranks, world)
            with patch.object(blocks, "can_score", lambda q: True):
                noticed[family] = errors, others + _other_choices(model, expected, ranks, world)
    return noticed


def _check_on_ranks(ranks: int, changes: dict[str, Any], *, renamed: bool = False) -> None:
    of_ranks = run_ranks(_on_ranks, ranks, ranks, changes, {family: _exact(family) for family in changes}, renamed)
    for family, of_family in changes.items():
        assert all(noticed[family][0]["nothing"].within(parity.WIDE) for noticed in of_ranks), of_ranks
        assert not any(noticed[family][1] for noticed in of_ranks), (family, of_ranks)
        largest = {x: max(noticed[family][0][x].gradients for noticed in of_ranks) for x in of_family}
        assert all(error > 1e-3 for error in largest.values()), (family, largest)


def test_chosen_as_the_class_does_and_a_naive_split_turns_gradients_red() -> None:
    """The first change of each, in copies of the classes under other names."""
    of_two = {family: dict([*KINDS[family].changes.items()][:1]) for family in HERE[:2]}
    _check_on_ranks(2, of_two, renamed=True)


REFUSED = {
    "qwen4_exp_text": (
        {"ple_layer_ids": [1], "eos_token_id": 5},
        "ple_embedding .* embeds n-grams: a row's token with",
    ),
    "glm5_next": ({"index_kpool_always_select_tail": False}, "layers.1.self_attn.indexer leaves out the keys after a"),
}


@pytest.mark.parametrize("family", [family for family in REFUSED if family in CONFIG_MAPPING])
def test_what_is_not_exact_is_refused_by_name(family: str) -> None:
    changes, message = REFUSED[family]
    config = deepcopy(_config(family))
    text = config.get_text_config()
    for name, value in changes.items():
        setattr(text, name, value)
    with torch.device("meta"):
        model = getattr(transformers, KINDS[family].name)._from_config(config)
    with pytest.raises(ModelError, match=message):
        check_model_on_this_rank(model, ())


@pytest.mark.parametrize("family", HERE)
def test_indexers_get_no_adapter_and_no_depth(family: str) -> None:
    model = _model(family)
    with pytest.raises(ModelError, match="multi-token prediction"):
        add_mtp(model, 1)
    add_lora(model, NewAdapter(rank=2))
    adapted = [name for name, module in model.named_modules() if is_adapted(module)]
    assert adapted and not any(".indexer." in name for name in adapted)


@pytest.mark.whole
@pytest.mark.parametrize("family", HERE)
def test_a_class_that_chooses_otherwise_under_the_same_names_is_refused(family: str) -> None:
    of_blocks = KINDS[family].changes is IN_BLOCKS
    pools_change = (POOLS, "best = _choose_pools(form, q,", "best = _choose_pools(form, -q,")
    trials._results.clear()
    with mutated((BLOCKS, "score_blocks(q[0],", "score_blocks(-q[0],") if of_blocks else pools_change):
        reasons = try_small_model_of_class(_model(family)).reasons
    trials._results.clear()
    parts = "blocks" if of_blocks else "pools"
    assert len(reasons) == 1 and f"chooses other {parts} of keys than the form that longspan knows" in reasons[0]
    assert not try_small_model_of_class(_model(family)).reasons


@pytest.mark.whole
def test_what_is_left_out_is_noticed_in_gradients() -> None:
    _check_on_ranks(2, {family: KINDS[family].changes for family in HERE})


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_chosen_as_the_class_does_at_every_degree(ranks: int) -> None:
    _check_on_ranks(ranks, {family: {} for family in HERE})


def _logits(model: Any, ids: Tensor, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False, **more).logits[0]


@pytest.mark.whole
@pytest.mark.skipif("glm5_next" not in HERE, reason="this transformers has no such class")
def test_the_stock_class_without_rows_after_the_last_pool_sees_later_ones() -> None:
    ids = torch.arange(30)
    other = torch.cat([ids[:-1], ids[:1]])
    for tail, leaks in ((True, False), (False, True)):
        # In float64 a mask of the least number would become −∞ by a score.
        model = _model("glm5_next").float()
        for indexer in find_indexers(model).values():
            indexer.index_kpool_always_select_tail = tail  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        change = (_logits(model, ids)[0] - _logits(model, other)[0]).abs().max().item()
        assert change > 1e-3 if leaks else change == 0.0, (tail, change)


@pytest.mark.whole
@pytest.mark.parametrize("family", HERE)
def test_the_stock_class_is_wrong_on_packed_rows(family: str) -> None:
    """Positions alone tell it where documents begin: its pools and blocks, or its mixers, do not."""
    model = _model(family).float()
    first, second = torch.arange(37), torch.arange(20, 61)
    positions = torch.cat([torch.arange(37), torch.arange(41)])[None]
    packed = _logits(model, torch.cat([first, second]), position_ids=positions)
    alone = torch.cat([_logits(model, first), _logits(model, second)])
    errors = [(x - y).norm() / y.norm() for x, y in zip(packed.split([37, 41]), alone.split([37, 41]), strict=True)]
    assert errors[0] < 1e-5 and errors[1] > 0.1, errors


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")  # the compiler's
@pytest.mark.parametrize("family", HERE)
def test_compiled_layers_choose_the_same_and_refuse_shared_prefixes(family: str, world: World) -> None:
    plan = plan_fixed(LENGTHS, world.home, cp=1)
    gradients = list[dict[str, Tensor]]()
    for compiled in ("none", "layers"):
        with Graphs().counted():
            model = prepare_untried(_model(family), world, compiled=compiled)
            assert "keys that an indexer chooses" in model.call_rules.separate
            run_step(model, plan, texts(LENGTHS), world)
        gradients.append(gradients_of(model))
    assert worst(gradients[1], gradients[0]) < 1e-12


@pytest.mark.gpu
@pytest.mark.skipif(
    "minimax_m3_vl_text" not in HERE or not torch.cuda.is_available(), reason="needs a CUDA device, and the class"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_by_kernel_are_those_of_the_class(dtype: torch.dtype) -> None:
    """At published widths: rows amid a document and at its end."""
    config = CONFIG_MAPPING["minimax_m3_vl_text"]()
    modeling = import_module("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    torch.manual_seed(0)
    length, count = 32768 + 37, 2000
    with torch.device("cuda"):
        indexer = modeling.MiniMaxM3VLIndexer(config, 0).to(dtype)
        rotary = modeling.MiniMaxM3VLRotaryEmbedding(config)
        keys = torch.randn(length, config.index_head_dim, dtype=dtype)
        hidden = torch.randn(1, count, config.hidden_size, dtype=dtype)
        positions = torch.arange(length)[None]
    for first in (5000, length - count):
        of_rows = positions[:, first : first + count]
        seen = keys[: first + count]
        arguments = {"hidden_states": hidden, "position_embeddings": rotary(hidden, of_rows), "position_ids": of_rows}
        arguments["cache"] = None
        with torch.no_grad(), patch.object(blocks, "score_blocks", wraps=blocks.score_blocks) as scored:
            chosen = blocks._choose_by_scores(indexer, arguments, seen, first)
            expected = blocks._run_class(indexer, arguments, lambda _, seen=seen: seen[None, None])
        assert scored.call_args.args[0].dtype == dtype
        others = (chosen.sort(-1).values != expected.sort(-1).values).any(-1).double().mean().item()
        assert chosen.shape == expected.shape and others <= 1e-3, others
