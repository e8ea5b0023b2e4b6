"""Indexers of transformers' models, which choose a few keys for each row, over a sharded sequence.

The class's own forward runs on the rank's rows with a stand-in for its cache, which hands out index keys of all ranks;
on GPUs it forms queries and weights alone, and `index_scores.py` the scores. Of equal scores, as sums of ReLUs often
are, the lowest positions are chosen: `topk` has no order among them. As in transformers, indexers get no gradient.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from longspan.attention.attend import cached_members
from longspan.attention.masks import Mask
from longspan.comm.autograd import break_graphs_around
from longspan.model.execution import Execution
from longspan.model.feature import Feature
from longspan.model.kinds import (
    attends_to_chosen_keys,
    chooses_blocks,
    chooses_entries,
    find_indexers,
    is_indexer,
    pools_keys,
)
from longspan.model.seams.chosen_keys.blocks import connect_blocks
from longspan.model.seams.chosen_keys.index_scores import ScoreOperands, choose_best_keys
from longspan.model.seams.chosen_keys.latents import latents_text, takes_latents
from longspan.model.seams.chosen_keys.pools import carry_positions, connect_pools
from longspan.model.seams.chosen_keys.row_runs import (
    ROWS_AT_ONCE,
    argument_rows,
    bind_arguments,
    gather_keys,
    row_runs,
    with_cache,
)
from longspan.model.seams.model_calls import require_one_row_shard
from longspan.model.seams.running_layer import running_layer
from longspan.model.seams.trial_shards import Probe, SeparateRows


class LowestFirst(TorchFunctionMode):
    """Inside, `topk` of scores (…, keys) takes the lowest keys among those with equal scores.

    With `none` a hidden key, whose score is −∞, becomes −1 in the result.
    """

    def __init__(self, *, none: bool) -> None:
        super().__init__()
        self._none = none

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Sort scores, stably and descending, in place of `topk`; any other function runs as it is."""
        if func not in (Tensor.topk, torch.topk):
            return func(*args, **(kwargs or {}))
        scores, k = args
        # −0 becomes 0, which it equals
        values, order = (x[..., :k] for x in (scores + 0.0).sort(dim=-1, descending=True, stable=True))
        return torch.return_types.topk(
            (values, order.masked_fill(values == -torch.inf, -1) if self._none else order)
        )


def order_equal_scores(model: nn.Module) -> None:
    """Let the indexers of a stock model take the lowest positions, or entries, among equal scores, from here on."""
    for module in model.modules():
        if is_indexer(module) or chooses_entries(module):
            module.forward = partial(_topk_ties_to_lowest, module)


def _topk_ties_to_lowest(indexer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    with LowestFirst(none=False):
        return type(indexer).forward(indexer, *args, **kwargs)


class IndexerFeature(Feature):
    """Indexers over the shard, and latents in place of the keys that they choose."""

    def connect(self, model: PreTrainedModel) -> None:
        shard_indexers(model)

    def convert(self, model: PreTrainedModel, execution: Execution) -> None:
        """Say in the description which layers gather latents, and from what length of a document on."""
        dtype = self.options.sharding(self.world).compute_dtype_of(model)
        indexed = [m for m in model.modules() if attends_to_chosen_keys(m) and hasattr(m, "expand_kv")]
        text = latents_text(indexed, self.options.attention_kernel, dtype, self.world.device)
        self.words["latents"] = text


def shard_indexers(model: nn.Module, *, alone: bool = False) -> None:
    """Let the model's indexers choose over the shard that their layers are called with, from here on.

    Layers that attend to chosen keys get an empty mask for them, and latents where these pay. `alone`: rows see only
    themselves, nothing is chosen, and keys stay expanded.
    """
    for indexer in find_indexers(model).values():
        if pools_keys(indexer):
            connect_pools(indexer, alone=alone)
        elif chooses_blocks(indexer):
            connect_blocks(indexer, alone=alone)
        else:
            indexer.forward = partial(_choose_nothing if alone else _choose_keys, indexer)
    for module in model.modules():
        if attends_to_chosen_keys(module):
            carry_positions(module)
            take_empty_mask(module, torch.bool)
            if not alone and hasattr(module, "expand_kv"):
                vars(module)["expand_kv"] = partial(_expand_or_keep_latents, module)


def take_empty_mask(module: Any, dtype: torch.dtype) -> None:
    """Let an attention module that gets no mask take one of this type without columns.

    Its class cuts the indexer's mask out of it, or joins what its compressor returns to it, which reaches attention so.
    It is no hook: around a module with hooks torch 2.11 compiles no layer whose attention is outside of the graph.
    """
    module.empty_mask_dtype = dtype
    module.forward = MethodType(_forward_with_mask, module)


def _forward_with_mask(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = hidden_states.new_empty(
            (1, 1, hidden_states.shape[1], 0), dtype=module.empty_mask_dtype
        )
    return type(module).forward(module, hidden_states, *args, **kwargs)


@break_graphs_around
def _expand_or_keep_latents(module: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Where `takes_latents` says so, the rotated part (1, 1, T, rope) is returned as keys and the latents (1, 1, T,
    latent) as values, for one head: `sharded_attention` knows them by the keys' size, and folds the weight that
    expands them."""
    running = running_layer()
    if takes_latents(module, running.shard, running.attention_kernel, latents):
        return rotated, latents
    return type(module).expand_kv(module, latents, rotated)


def _choose_nothing(indexer: nn.Module, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Indices without columns (1, T, 0) stand for every key."""
    return hidden_states.new_empty((1, hidden_states.shape[1], 0), dtype=torch.int32)


@break_graphs_around
@torch.no_grad()
def _choose_keys(indexer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Returns positions in each row's document (1, T, k), int32, −1 for none; entered by every rank of a group.
    Where no document of the micro-batch is longer than k, there are no columns. Else the class's forward runs
    twice over all rows, some at a time: the first pass gives their index keys (rows, head size), gathered over
    each group; the second their chosen keys, or on GPUs queries and weights alone, if `choose_best_keys` can
    score them. No tensor of all rows × all keys is formed."""
    arguments = bind_arguments(indexer, args, kwargs)
    hidden: Tensor = arguments["hidden_states"]
    shard = running_layer().shard  # pyright: ignore[reportArgumentType]
    k = int(indexer.index_topk)  # pyright: ignore[reportArgumentType]
    if isinstance(shard, Probe):
        return hidden.new_empty((1, hidden.shape[1], 1), dtype=torch.int32)
    shard = require_one_row_shard(type(indexer).__name__, shard, hidden.shape[0], hidden.shape[1])
    if isinstance(shard, SeparateRows) or max(shard.micro_batch.lengths, default=0) <= k:
        return _choose_nothing(indexer, hidden)
    arguments["attention_mask"] = hidden.new_empty((1, hidden.shape[1], 0), dtype=torch.bool)

    def run_stock_forward(rows: slice, hand_out: Callable[[Tensor, int], Tensor], **changes: Any) -> Tensor:
        """Run the class's forward over some local rows, with `hand_out` as its cache's `update_indexer`.

        That gets the index keys of these rows and a layer's index, and returns the keys (1, S, head size) to score.
        """
        row_arguments = {name: argument_rows(x, hidden.shape[1], rows) for name, x in arguments.items()}
        stand_in = SimpleNamespace(update_indexer=hand_out)
        return type(indexer).forward(indexer, **with_cache(row_arguments | changes, stand_in))

    local_keys = list[Tensor]()  # (1, rows, head size) each

    def keep_keys(keys: Tensor, _: int) -> Tensor:
        """Keep the index keys of a run of rows, and hand out none to be scored."""
        local_keys.append(keys)
        return keys[:, :0]

    # The type checker needs operands here: the loop runs at least once.
    operands = ScoreOperands()
    for first in range(0, max(1, hidden.shape[1]), ROWS_AT_ONCE):
        with (operands := ScoreOperands()):
            rows = slice(first, first + ROWS_AT_ONCE)
            run_stock_forward(rows, keep_keys)
    by_kernel = operands.can_score_by_kernel()
    heads = int(getattr(indexer, "n_heads", 1))
    chosen = hidden.new_full((1, hidden.shape[1], k), -1, dtype=torch.int32)
    all_keys = torch.cat(local_keys, 1)[0]
    for part in shard.parts:
        members = cached_members(part, shard, Mask())
        group_keys = gather_keys(all_keys[part.start : part.stop], members)
        for _, part_rows, positions, document_rows in row_runs(members, 0 if by_kernel else heads):
            # The rows count among all local ones.
            rows = slice(part.start + part_rows.start, part.start + part_rows.stop)
            keys = group_keys[document_rows][: positions.stop]
            if by_kernel:
                with ScoreOperands() as operands:
                    run_stock_forward(rows, lambda own_keys, _: own_keys[:, :0])
                chosen[0, rows] = choose_best_keys(*operands.queries_and_weights(), keys, positions.start, k)
                continue
            key_positions = torch.arange(positions.stop, device=hidden.device)
            visible = key_positions <= key_positions[positions.start :, None]
            with LowestFirst(none=True):
                chosen_here = run_stock_forward(
                    rows, lambda *_, keys=keys: keys[None], attention_mask=visible[None]
                )
            chosen[:, rows, : chosen_here.shape[2]] = chosen_here
    return chosen
