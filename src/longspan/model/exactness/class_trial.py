"""A trial of a class: a small copy with random weights computes rows together and in pieces, which must be the same."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from longspan.model.exactness.small_copies import shrink_configuration
from longspan.model.exactness.trials import parameter_gradients, relative_error, run_trial_once, trial_error_text
from longspan.model.kinds import (
    attends_to_entries,
    chooses_blocks,
    expert_modules,
    find_indexers,
    find_mixers,
    has_experts,
    pools_keys,
)
from longspan.model.layers import innermost_decoder
from longspan.model.seams.attention_calls import defer_query_scaling
from longspan.model.seams.trial_shards import attend_separately

_STAND_IN = "longspan_separate_rows"
_ROWS = 48
_EXPERTS = 8
# The pieces have unequal sizes; one has a single row.
_PIECES = (slice(0, 1), slice(1, 30), slice(30, _ROWS))
# Relative. Trials compute in float64, and rows that are exact differ by 1e-15; a class may compute in float32 by other
# ways than the casts that trials replace, and its router may then choose another expert.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class ClassTrial:
    """Reasons why rows are not computed each by itself, and random draws in training."""

    reasons: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()


def try_small_model_of_class(model: PreTrainedModel) -> ClassTrial:
    """Try a small model of a model's class, once for each configuration. The model itself is not touched."""
    base = innermost_decoder(model)
    key = "class", type(base), base.config.to_json_string()
    return run_trial_once(key, lambda: _try_small_copy(type(base), base.config, required=has_experts(model)))


def _try_small_copy(kind: type[PreTrainedModel], config: PreTrainedConfig, *, required: bool) -> ClassTrial:
    """Rows see only themselves. A class that draws in training is compared in evaluation: draws differ by pass."""
    try:
        small = shrink_configuration(config, experts=_EXPERTS)
        torch.manual_seed(0)
        settings: Any = {
            "attn_implementation": _STAND_IN,
            "experts_implementation": "eager",
            "dtype": torch.float32,
        }
        model = kind._from_config(small, **settings).double()
        defer_query_scaling(model)  # attention's business: it is not tried here
        choice_reasons = (*_choice_reasons(model),)
        if find_indexers(model):
            from longspan.model.seams.chosen_keys.indexers import shard_indexers

            shard_indexers(model, alone=True)
        if any(map(attends_to_entries, model.modules())):
            from longspan.model.seams.entries import shard_entry_modules

            shard_entry_modules(model, alone=True)
        for mixer in find_mixers(model).values():
            from longspan.model.seams.mixers import ROWS_ALONE, set_mixer_ops

            set_mixer_ops(mixer, lambda *_: ROWS_ALONE)
        for parameter in model.parameters():  # biases begin as zeros, which would hide them
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.train()
        outs: list[Tensor] = []
        ids = torch.arange(_ROWS)[None]
        positions = torch.full((1, _ROWS), 3)
        for seed in (1, 2):
            torch.manual_seed(seed)
            with torch.no_grad():
                outs.append(model(input_ids=ids, position_ids=positions, use_cache=False)[0])
        draws = not torch.equal(*outs)
        draws_text = ("numbers by which a small model of its class differs from seed to seed",) if draws else ()
        return ClassTrial((*choice_reasons, *_row_reasons(model.train(not draws))), draws_text)
    except Exception as error:  # whatever a constructor or a forward raises
        if not required:
            return ClassTrial()
        reason = f"it has experts, and a small {kind.__name__} that shows how they route cannot be run on the host "
        return ClassTrial((f"{reason}({trial_error_text(error)})",))


AttentionInterface.register(
    _STAND_IN, lambda _, q, k, v, attention_mask, **more: (attend_separately(q, k, v, more.get("scaling")), None)
)


@torch.no_grad()
def _choice_reasons(model: PreTrainedModel) -> Iterator[str]:
    """Pools are chosen, and blocks scored, by formulas of our own; they are compared with what the class chooses of one
    document."""
    indexers = {
        name: module for name, module in model.named_modules() if pools_keys(module) or chooses_blocks(module)
    }
    if not indexers:
        return
    from longspan.model.seams.chosen_keys.blocks import other_blocks
    from longspan.model.seams.chosen_keys.indexers import order_equal_scores
    from longspan.model.seams.chosen_keys.pools import choices_differ

    calls = list[tuple[str, Any, Any, Tensor]]()
    model.set_attn_implementation("eager")
    order_equal_scores(model)
    with ExitStack() as hooks:
        for name, indexer in indexers.items():
            hook = indexer.register_forward_hook(
                lambda _, args, kwargs, out, name=name: calls.append((name, args, kwargs, out)), with_kwargs=True
            )
            hooks.callback(hook.remove)
        model(input_ids=torch.arange(_ROWS)[None], use_cache=False)
    model.set_attn_implementation(_STAND_IN)
    for name, args, kwargs, out in calls:
        indexer = indexers[name]
        differ, parts = (other_blocks, "blocks") if chooses_blocks(indexer) else (choices_differ, "pools")
        if differ(indexer, args, kwargs, out):
            yield f"{name} ({type(indexer).__name__}) chooses other {parts} of keys than the form that longspan knows"
            return


class _Pass(NamedTuple):
    """What some rows of a small model became: outputs and gradients of all, and outputs of every module."""

    rows: Tensor  # (R, D)
    gradients: dict[str, Tensor | None]
    outputs: dict[str, list[Tensor]]  # (R, …) each, by module, in the order of calls


def _run_rows_in_order(model: PreTrainedModel, order: Tensor) -> _Pass:
    """A row's number in `order` is its token id, and picks its output's gradient. All rows are at one position."""
    outputs: dict[str, list[Tensor]] = {}
    torch.manual_seed(0)
    upstream = torch.randn(_ROWS, model.config.get_text_config().hidden_size, dtype=torch.float64)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hook = module.register_forward_hook(
                lambda _, __, out, name=name: outputs.setdefault(name, []).extend(_row_tensors(out, len(order)))
            )
            hooks.callback(hook.remove)
        positions = torch.full((1, len(order)), 3)
        out = model(input_ids=order[None], position_ids=positions, use_cache=False)[0][0]
    gradients = parameter_gradients((out * upstream[order]).sum(), model.named_parameters())
    return _Pass(out.detach(), gradients, outputs)


def _row_tensors(out: Any, rows: int) -> Iterator[Tensor]:
    """Such tensors are of shape (rows, …) or (1, rows, …)."""
    for leaf in tree_leaves(out if isinstance(out, tuple | list) else [out]):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaf = leaf.detach()
            if leaf.ndim > 1 and leaf.shape[0] == rows:
                yield leaf.flatten(1)
            elif leaf.ndim > 2 and leaf.shape[:2] == (1, rows):
                yield leaf[0].flatten(1)


def _row_reasons(model: PreTrainedModel) -> Iterator[str]:
    """Buffers that are not saved may only log what was run; if results depend on them, outputs differ."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if name in model.state_dict()}
    all_rows = _run_rows_in_order(model, torch.arange(_ROWS))
    order = torch.randperm(_ROWS)
    pieces = [_run_rows_in_order(model, order[piece]) for piece in _PIECES]
    evidence = f"(found with a small {type(model).__name__} of {_ROWS} rows, whole and in {len(pieces)} pieces)"
    buffers_after = dict(model.named_buffers())
    if changed := [name for name, buffer in buffers.items() if not torch.equal(buffers_after[name], buffer)]:
        yield f"its forward pass in training changes {changed[0]} by the rows that it is given {evidence}"
    error = relative_error(torch.cat([piece_pass.rows for piece_pass in pieces]), all_rows.rows[order])
    if error > _TOLERANCE:
        first = _place_of_first_difference(all_rows, pieces, order)
        yield (
            f"rows influence each other outside attention, first in {first}: outputs differ by {error:.1e} {evidence}"
        )
        return
    yield from _gradient_reasons(all_rows, pieces, evidence)
    yield from _expert_reasons(model)


def _place_of_first_difference(whole: _Pass, parts: Sequence[_Pass], order: Tensor) -> str:
    """A module that is not called equally often for each part cannot be compared."""
    for name, outs in whole.outputs.items():
        for i, out in enumerate(outs):
            pieces = [
                piece_pass.outputs[name][i] for piece_pass in parts if i < len(piece_pass.outputs.get(name, ()))
            ]
            if name and len(pieces) == len(parts) and relative_error(torch.cat(pieces), out[order]) > _TOLERANCE:
                return name
    return "an unknown place"


def _gradient_reasons(whole: _Pass, parts: Sequence[_Pass], evidence: str) -> Iterator[str]:
    # Smaller gradients are rounding alone, as those of learnt rotary frequencies: all rows are at one position.
    least = 1e-9 * max((float(x.abs().max()) for x in whole.gradients.values() if x is not None), default=0.0)
    for name, gradient in whole.gradients.items():
        if gradient is None:
            continue
        pieces = [piece for piece_pass in parts if (piece := piece_pass.gradients[name]) is not None]
        if len(pieces) < len(parts):
            yield (
                f"{name} has no gradient, not even zeros, where no row of a rank visits it, and ranks would add "
                f"different parameters {evidence}"
            )
            return
        if (error := relative_error(torch.stack(pieces).sum(0), gradient, least)) > _TOLERANCE:
            yield f"the gradient of {name} is not the sum over rows: it differs by {error:.1e} {evidence}"
            return


@torch.no_grad()
def _expert_reasons(model: PreTrainedModel) -> Iterator[str]:
    for name, module in expert_modules(model).items():
        from longspan.model.experts.moe import mix_experts

        experts: Any = module
        x = torch.randn(_ROWS, model.config.get_text_config().hidden_size, dtype=torch.float64)
        chosen = torch.rand(_ROWS, int(experts.num_experts)).topk(min(2, int(experts.num_experts))).indices
        weights = torch.rand(chosen.shape, dtype=torch.float64)
        error = relative_error(mix_experts(experts, x, chosen, weights), experts(x, chosen, weights))
        if error > _TOLERANCE:
            yield f"{name} ({type(experts).__name__}) computes something of its own: ours differs by {error:.1e}"
            return
