"""Indexers that choose blocks of consecutive keys for each of their heads, over a sharded sequence.

A block is scored by its best key, and blocks are counted from a document's first row. The class's own forward chooses,
on runs of rows of one document, with index keys of all ranks in place of a cache; on GPUs it gets scores of blocks from
`index_scores.py`. Each head chooses for a group of key/value heads. As in transformers, indexers get no gradient.
"""

from collections.abc import Callable
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from longspan.attention import attend
from longspan.attention.attend import cached_members
from longspan.attention.masks import Mask
from longspan.comm import SequenceShard
from longspan.comm.autograd import break_graphs_around
from longspan.errors import ModelError
from longspan.model.seams.chosen_keys.index_scores import can_score, score_blocks
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


class _KeysNotedError(Exception):
    """Ends a forward of an indexer once it gave its index keys to the cache."""


def connect_blocks(indexer: nn.Module, *, alone: bool) -> None:
    """Let an indexer choose blocks over the shard that its layer is called with; `alone`: it chooses nothing."""
    indexer.forward = partial(_choose_nothing if alone else _choose_blocks, indexer)


def attend_to_blocks(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: SequenceShard,
    blocks: Tensor,
    **options: Any,
) -> Tensor:
    """Attend from q (T, N, H) to the blocks of keys (heads of the indexer, T, b) that each row chose, −1 for none.

    Each head of the indexer takes an equal share of the query heads, and the key/value heads of these. Raises
    ModelError where heads cannot be dealt out so.
    """
    indexer = module.indexer
    groups = len(blocks)
    heads = q.shape[1]
    key_heads = k.shape[1]
    if groups != indexer.num_heads or heads % groups or (key_heads % groups and groups % key_heads):
        raise ModelError(
            f"{type(module).__name__} attends with {heads} query heads and {key_heads} key/value heads here, and its "
            f"indexer chooses blocks for {indexer.num_heads} heads, which does not deal them out evenly; use tp 1"
        )
    if groups > key_heads:
        k, v = (x.repeat_interleave(groups // key_heads, 1) for x in (k, v))
    choices = blocks.transpose(0, 1).repeat_interleave(max(1, key_heads // groups), 1)
    return attend(*(q, k, v, shard), indices=choices, block_size=indexer.block_size, with_lse=False, **options)


def keys_of_blocks(blocks: Tensor, size: int, positions: Tensor) -> Tensor:
    """Return the positions (T, b · size) of the keys of blocks (T, b) up to each row's own, −1 for none."""
    keys = blocks[..., None] * size + torch.arange(size, device=blocks.device, dtype=blocks.dtype)
    keys = keys.masked_fill(blocks[..., None] < 0, -1).flatten(1)
    return keys.masked_fill(keys > positions[:, None], -1)


def other_blocks(indexer: Any, args: Any, kwargs: Any, out: Tensor) -> bool:
    """Return whether an indexer, called so with all rows of one document, chose other blocks (1, heads, T, b) by its
    own scores of keys than by scores of blocks."""
    arguments = bind_arguments(indexer, args, kwargs)
    keys = list[Tensor]()
    _run_class(indexer, arguments, lambda x: (keys.append(x), x)[1])
    chosen = _choose_by_scores(indexer, arguments, keys[0][0, 0], 0)
    return not torch.equal(chosen.sort(-1).values, out.sort(-1).values)


def _choose_nothing(indexer: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Blocks without columns stand for every key."""
    hidden = bind_arguments(indexer, args, kwargs)["hidden_states"]
    return hidden.new_empty((1, indexer.num_heads, hidden.shape[1], 0), dtype=torch.int32)


@break_graphs_around
@torch.no_grad()
def _choose_blocks(indexer: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Entered by every rank of a group. Returns numbers of blocks in each row's document (1, heads, T, b), int32, −1
    for none, without columns where no document of the micro-batch has more blocks than a row may choose."""
    arguments = bind_arguments(indexer, args, kwargs)
    hidden: Tensor = arguments["hidden_states"]
    count, heads, most, size = hidden.shape[1], indexer.num_heads, indexer.topk_blocks, indexer.block_size
    shard = cast(Any, running_layer().shard)
    if isinstance(shard, Probe):
        return hidden.new_empty((1, heads, count, 1), dtype=torch.int32)
    shard = require_one_row_shard(type(indexer).__name__, shard, hidden.shape[0], count)
    longest = max(shard.micro_batch.lengths, default=0)
    if isinstance(shard, SeparateRows) or longest <= most * size:
        return _choose_nothing(indexer, *args, **kwargs)

    local_keys = list[Tensor]()

    def keep_keys(keys: Tensor) -> Tensor:
        local_keys.append(keys[0, 0])  # (rows, head size)
        raise _KeysNotedError

    def arguments_of(rows: slice) -> dict[str, Any]:
        return {name: argument_rows(x, count, rows) for name, x in arguments.items()}

    for first in range(0, max(1, count), ROWS_AT_ONCE):
        try:
            _run_class(indexer, arguments_of(slice(first, first + ROWS_AT_ONCE)), keep_keys)
        except _KeysNotedError:
            continue
    all_keys = torch.cat(local_keys)
    by_kernel = can_score(all_keys[:0].float())
    chosen = hidden.new_full((1, heads, count, most), -1, dtype=torch.int32)
    for part in shard.parts:
        members = cached_members(part, shard, Mask())
        group_keys = gather_keys(all_keys[part.start : part.stop], members)
        for _, part_rows, positions, document_rows in row_runs(members, heads, size if by_kernel else 1):
            rows = slice(part.start + part_rows.start, part.start + part_rows.stop)
            keys = group_keys[document_rows][: positions.stop]
            if by_kernel:
                blocks = _choose_by_scores(indexer, arguments_of(rows), keys, positions.start)
            else:
                blocks = _run_class(indexer, arguments_of(rows), lambda _, keys=keys: keys[None, None])
            chosen[:, :, rows, : blocks.shape[-1]] = blocks
    return chosen


def _run_class(indexer: Any, arguments: dict[str, Any], update_index: Callable[[Tensor], Tensor]) -> Tensor:
    stand_in = SimpleNamespace(layers={indexer.layer_idx: SimpleNamespace(update_index=update_index)})
    return type(indexer).forward(indexer, **with_cache(arguments, stand_in))


def _choose_by_scores(indexer: Any, arguments: dict[str, Any], keys: Tensor, first_position: int) -> Tensor:
    """The class chooses among blocks as if each were one key, whose product with a query is the block's best score.
    Its whole numbers are positions, which become those of blocks."""
    size = indexer.block_size
    of_single_keys = copy(indexer)
    of_single_keys.block_size = 1
    block_positions = {
        name: x // size for name, x in arguments.items() if isinstance(x, Tensor) and not x.is_floating_point()
    }
    stand_ins = keys.new_zeros((1, 1, -(-len(keys) // size), keys.shape[1]))
    with _BlockScores(keys, first_position, size):
        return _run_class(of_single_keys, arguments | block_positions, lambda _: stand_ins)


class _BlockScores(TorchFunctionMode):
    """Inside, the product of queries (1, heads, R, size) and one key for each block is the best score of its keys."""

    def __init__(self, keys: Tensor, first_position: int, size: int) -> None:
        super().__init__()
        self._keys = keys
        self._first_position = first_position
        self._size = size
        # results and arguments of casts to float32
        self._widened = list[tuple[Tensor, Tensor]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Score blocks in place of the product, of queries as they were before they were widened."""
        blocks = -(-len(self._keys) // self._size)
        if func.__name__ == "matmul" and args[1].shape == (1, 1, self._keys.shape[1], blocks):
            q = next((before for after, before in self._widened if after is args[0]), args[0])
            return score_blocks(q[0], self._keys, self._first_position, self._size)[None]
        out = func(*args, **(kwargs or {}))
        if func.__name__ == "float":
            self._widened.append((out, args[0]))
        return out
