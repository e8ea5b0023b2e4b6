"""Indexers that score pools of consecutive keys, over a sharded sequence: a row attends to all keys of its best pools,
and to those after the last pool that it sees.

Pools are counted from a document's first row, whatever the packing, and a row sees those that end by it. The class
makes index keys, gates and queries; the loop over rows that one class has is one product here. No gradient.
"""

import inspect
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.attention.entries import EntryMembers, shard_entries
from longspan.comm.autograd import break_graphs_around
from longspan.model.kinds import has_gated_pools
from longspan.model.seams.chosen_keys.blocks import keys_of_blocks
from longspan.model.seams.chosen_keys.index_scores import can_score, choose_best_keys
from longspan.model.seams.chosen_keys.row_runs import argument_rows, bind_arguments, row_runs
from longspan.model.seams.model_calls import require_one_row_shard
from longspan.model.seams.running_layer import running_layer
from longspan.model.seams.trial_shards import Probe, SeparateRows

# Of attention modules whose indexer returns positions: it makes a mask of them.
_MASK_BUILDER = "build_attention_mask_from_topk"


class ChosenKeys(Tensor):
    """A mask (1, 1, T, 0) without columns that carries the keys which each row chose: `chosen` (1, T, k), −1 for none.

    These are numbers of blocks of `block_size` positions. A class that combines it with a mask of its own gets it back.
    """

    chosen: Tensor
    block_size: int

    @classmethod
    def carry(cls, chosen: Tensor, block_size: int = 1) -> "ChosenKeys":
        """Make a mask that carries this choice."""
        mask = torch.empty((1, 1, chosen.shape[1], 0), dtype=torch.bool, device=chosen.device).as_subclass(cls)
        mask.chosen = chosen
        mask.block_size = block_size
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the mask itself for `mask & other`; any other function runs as of a plain tensor."""
        if getattr(func, "__name__", "") in ("__and__", "__rand__", "bitwise_and"):
            return next(x for x in args if isinstance(x, cls))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _PoolForm(Protocol):
    """How an indexer makes pools of `ratio` rows, of which each row takes the `most` best.

    `key_rows` gives of each row what pools are made of (T, C), `pools` the pools (P, size) of their rows (P, ratio, C),
    and `queries` (R, H, size) with the weights of heads (R, H). A pool's score is Σ heads weight · relu(q · pool).
    """

    ratio: int
    most: int
    heads: int

    def key_rows(self, arguments: dict[str, Any]) -> Tensor: ...
    def pools(self, rows: Tensor) -> Tensor: ...
    def queries(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]: ...


class _MeanPools:
    """Pools are means of raw keys, with a norm, at the position of their first row."""

    def __init__(self, indexer: Any) -> None:
        self._indexer = indexer
        self._query_width = indexer.index_n_heads * indexer.index_head_dim
        self.ratio = int(indexer.compress_ratio)
        self.most = int(indexer.block_topk)
        self.heads = int(indexer.index_n_heads)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotate = inspect.unwrap(type(self._indexer).forward).__globals__["apply_rotary_pos_emb"]
        return rotate(x, cos=cos, sin=sin, unsqueeze_dim=1)

    def key_rows(self, arguments: dict[str, Any]) -> Tensor:
        keys = self._indexer.index_qk_proj(arguments["hidden_states"])[0, :, self._query_width :]
        angles = [x[0].to(keys.dtype) for x in arguments["position_embeddings"]]
        return torch.cat([keys, *angles], -1)

    def pools(self, rows: Tensor) -> Tensor:
        size = self._indexer.index_head_dim
        angles = (rows.shape[-1] - size) // 2
        keys, cos, sin = rows.split([size, angles, angles], -1)
        means = self._indexer.k_layernorm(keys.float().mean(1).to(keys.dtype))
        return self._rotate(means[:, None], cos[:, 0], sin[:, 0])[:, 0]

    def queries(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        indexer = self._indexer
        q = indexer.index_qk_proj(arguments["hidden_states"])[0, :, : self._query_width]
        q = indexer.q_layernorm(q.reshape(len(q), self.heads, indexer.index_head_dim))
        cos, sin = arguments["position_embeddings"]
        q = self._rotate(q, cos[0], sin[0])
        return q, q.new_ones(q.shape[:2])


class _GatedPools:
    """Pools are sums of keys, each channel weighted by a softmax of gates over the pool's rows."""

    def __init__(self, indexer: Any) -> None:
        self._indexer = indexer
        self.ratio = int(indexer.index_kpool)
        self.most = int(indexer.index_topk) // self.ratio
        self.heads = int(indexer.n_heads)

    def key_rows(self, arguments: dict[str, Any]) -> Tensor:
        hidden: Tensor = arguments["hidden_states"][0]
        keys = self._indexer.k_norm(self._indexer.wk(hidden))
        gates = F.linear(hidden, self._indexer.index_kpool_compress_gate)
        valid = keys.new_ones((len(keys), 1))
        return torch.cat([keys, gates, valid], -1)

    def pools(self, rows: Tensor) -> Tensor:
        return self._indexer.get_pooled_states(rows.flatten(0, 1)[None])[0][0]

    def queries(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        indexer = self._indexer
        q = indexer.wq_b(arguments["q_resid"][0])
        weigh = indexer.weights_proj
        weights = weigh(arguments["hidden_states"][0].to(weigh.weight.dtype))
        return q.reshape(len(q), self.heads, indexer.head_dim), weights


def connect_pools(indexer: nn.Module, *, alone: bool) -> None:
    """Let an indexer choose pools over the shard that its layer is called with; `alone`: it chooses nothing."""
    indexer.forward = partial(_choose_nothing if alone else _choose_from_pools, indexer)


def carry_positions(module: nn.Module) -> None:
    """Let an attention module that makes a mask of its indexer's positions hand these on instead."""
    if hasattr(module, _MASK_BUILDER):
        builder = break_graphs_around(lambda topk_indices, **_: ChosenKeys.carry(topk_indices))
        vars(module)[_MASK_BUILDER] = builder


def choices_differ(indexer: nn.Module, args: Any, kwargs: Any, out: Tensor) -> bool:
    """Return whether an indexer, called so with all rows of one document, chose other keys than this file does.

    `out` is what its class returned: positions (1, T, k), or a mask (1, 1, T, S).
    """
    form = _form_of(indexer)
    arguments = bind_arguments(indexer, args, kwargs)
    rows = form.key_rows(arguments)
    whole = len(rows) // form.ratio
    pools = form.pools(rows[: whole * form.ratio].unflatten(0, (whole, form.ratio)))
    chosen = _choose_rows(form, *form.queries(arguments), pools, 0)
    keys = keys_of_blocks(chosen, form.ratio, torch.arange(len(rows), device=rows.device))
    theirs = out[0, 0] if out.ndim == 4 else _as_mask(out[0], len(rows))
    return not torch.equal(_as_mask(keys, len(rows)), theirs)


def _as_mask(positions: Tensor, count: int) -> Tensor:
    mask = torch.zeros((len(positions), count + 1), dtype=torch.bool, device=positions.device)
    return mask.scatter(1, torch.where(positions < 0, count, positions).long(), value=True)[:, :count]


def _form_of(indexer: nn.Module) -> _PoolForm:
    return _GatedPools(indexer) if has_gated_pools(indexer) else _MeanPools(indexer)


def _hand_on(indexer: nn.Module, pools: Tensor, positions: Tensor) -> Tensor:
    """What attention expects of its indexer: the keys of its pools (1, T, b), or a mask that carries the pools."""
    ratio = _form_of(indexer).ratio
    if has_gated_pools(indexer):
        return keys_of_blocks(pools[0], ratio, positions)[None]
    return ChosenKeys.carry(pools, ratio)


def _choose_nothing(indexer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Indices without columns stand for every key."""
    hidden = bind_arguments(indexer, args, kwargs)["hidden_states"]
    nothing = hidden.new_empty((1, hidden.shape[1], 0), dtype=torch.int32)
    return nothing if has_gated_pools(indexer) else ChosenKeys.carry(nothing)


@break_graphs_around
@torch.no_grad()
def _choose_from_pools(indexer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Entered by every rank of a group. The choice is pools of each row's document (1, T, b), −1 for none, and as one
    more the pool that the row is in; without columns where every row of the micro-batch sees all of its document."""
    arguments = bind_arguments(indexer, args, kwargs)
    hidden: Tensor = arguments["hidden_states"]
    count = hidden.shape[1]
    shard = cast(Any, running_layer().shard)
    if isinstance(shard, Probe):
        return _hand_on(indexer, hidden.new_empty((1, count, 1), dtype=torch.int32), hidden.new_empty(count))
    shard = require_one_row_shard(type(indexer).__name__, shard, hidden.shape[0], count)
    form = _form_of(indexer)
    longest = max(shard.micro_batch.lengths, default=0)
    if isinstance(shard, SeparateRows) or longest // form.ratio <= form.most:
        return _choose_nothing(indexer, *args, **kwargs)
    chosen = hidden.new_full((1, count, form.most + 1), -1, dtype=torch.int32)
    rows_of_keys = form.key_rows(arguments)
    for part, members in zip(shard.parts, shard_entries(shard, stride=form.ratio, most=form.most), strict=True):
        pools = _gather_pools(form, rows_of_keys[part.start : part.stop], members)
        for document, part_rows, positions, _ in row_runs(members, form.heads, form.ratio):
            rows = slice(part.start + part_rows.start, part.start + part_rows.stop)
            queries = form.queries({name: argument_rows(x, count, rows) for name, x in arguments.items()})
            first = int(members.entries.firsts[document])
            seen = pools[first : first + positions.stop // form.ratio]
            chosen[0, rows] = _choose_rows(form, *queries, seen, positions.start)
    return _hand_on(indexer, chosen, shard.position_ids)


def _gather_pools(form: _PoolForm, rows: Tensor, members: EntryMembers) -> Tensor:
    """Each member makes the pools whose last row it holds, of its rows (T, C) and the few before them that others send.
    Returns those of the group's documents (P, size), one document after another."""
    none = rows.new_zeros((1, rows.shape[1]))
    windows = members.lay_out_windows(rows, none).unflatten(0, (-1, form.ratio))
    return members.gather(members.own_entries(form.pools(windows)))


def _choose_rows(form: _PoolForm, q: Tensor, weights: Tensor, pools: Tensor, first_position: int) -> Tensor:
    """Choose pools (R, b) int32 for rows at `first_position` and after, of the pools that the last of them sees; and
    the pool after the last that a row sees, if the row has keys of it."""
    best = _choose_pools(form, q, weights, pools, first_position)
    position = torch.arange(first_position, first_position + len(q), device=q.device)
    ended = (position + 1) // form.ratio
    tail = ended.masked_fill(ended * form.ratio > position, -1)
    return torch.cat([best, tail[:, None]], 1).int()


def _choose_pools(form: _PoolForm, q: Tensor, weights: Tensor, pools: Tensor, first_position: int) -> Tensor:
    """The numbers of the best pools (R, most), −1 for none; of equal scores the lowest."""
    if can_score(q[:0].float()):
        return choose_best_keys(q, weights, pools, first_position, form.most, stride=form.ratio)
    scores = torch.einsum("rhd,pd->rhp", q.float(), pools.float()).relu()
    scores = torch.einsum("rhp,rh->rp", scores, weights.float())
    position = torch.arange(first_position, first_position + len(q), device=q.device)[:, None]
    later = torch.arange(len(pools), device=q.device) >= (position + 1) // form.ratio
    # −0 becomes 0, which it equals
    scores = (scores + 0.0).masked_fill(later, -torch.inf)
    values, order = (x[:, : form.most] for x in scores.sort(dim=-1, descending=True, stable=True))
    order = order.masked_fill(values == -torch.inf, -1)
    return F.pad(order, (0, form.most - order.shape[1]), value=-1)
