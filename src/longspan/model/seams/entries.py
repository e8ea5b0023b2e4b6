"""Layers of transformers' models that attend to entries, keys made of windows of rows, over a sharded sequence.

A stand-in for a cache's layer hands a class's own forward the rows of the windows that this rank makes entries of,
whichever ranks hold them, and takes the entries. An indexer's own forward makes its entries and chooses among those of
all ranks; of equal scores the lowest entries are chosen.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.attention.entries import EntryMembers, attend_with_entries, shard_entries
from longspan.comm import SequenceShard
from longspan.comm.autograd import break_graphs_around
from longspan.errors import ModelError
from longspan.model.feature import Feature
from longspan.model.kinds import attends_to_entries, reads_window_before
from longspan.model.seams.chosen_keys.index_scores import ScoreOperands, choose_best_keys
from longspan.model.seams.chosen_keys.indexers import LowestFirst, take_empty_mask
from longspan.model.seams.chosen_keys.row_runs import argument_rows, row_runs
from longspan.model.seams.doctor_hint import doctor_hint
from longspan.model.seams.meta_pass import attention_dropout
from longspan.model.seams.model_calls import require_one_row_shard
from longspan.model.seams.rope import length_dependent_types
from longspan.model.seams.running_layer import running_layer
from longspan.model.seams.trial_shards import Probe, SeparateRows


class EntryFeature(Feature):
    """Compressors of windows of rows, and the indexers in them, over the shard."""

    def refuse(self, model: PreTrainedModel) -> None:
        """Refuse what is not exact with entries: dropout of weights, and frequencies by a document's length."""
        for name, module in model.named_modules():
            if not attends_to_entries(module):
                continue
            if rate := attention_dropout(module):
                raise ModelError(
                    f"{name} drops weights of attention at a rate of {rate:g}, and attends to rows and entries under "
                    "one softmax, for which longspan has no dropout; set attention_dropout to 0.0"
                )
            for part in module.modules():
                if kinds := length_dependent_types(part):
                    raise ModelError(
                        f"{name} rotates entries by frequencies that depend on a document's length (rope type "
                        f"{', '.join(sorted(set(kinds.values())))}); use default, linear, llama3 or yarn"
                        f"{doctor_hint(model)}"
                    )

    def connect(self, model: PreTrainedModel) -> None:
        shard_entry_modules(model)


def shard_entry_modules(model: nn.Module, *, alone: bool = False) -> None:
    """Let the model's compressors make entries over the shard that their layers are called with, from here on.

    `alone`: rows see only themselves, and no entries are made.
    """
    for module in model.modules():
        if not attends_to_entries(module):
            continue
        compressor: Any = module.compressor
        window = int(module.sliding_window)  # pyright: ignore[reportArgumentType]
        compressor.forward = partial(_make_no_entries if alone else _make_entries, compressor, window)
        take_empty_mask(module, torch.int32)


def layer_entries(compressor: Any, window: int, shard: SequenceShard) -> tuple[EntryMembers, ...]:
    """Return who makes the entries of a layer, and shares them, part by part of a shard."""
    indexer = getattr(compressor, "indexer", None)
    return shard_entries(
        shard,
        stride=int(compressor.compress_rate),
        windows_before=int(reads_window_before(compressor)),
        window=window,
        most=None if indexer is None else int(indexer.index_topk),
    )


class _EntriesTakenError(Exception):
    """Ends a class's forward once its entries were taken."""


class _CacheLayer:
    """Stands for the layer of a cache: hands out the rows of windows, and keeps the entries that are made of them."""

    def __init__(self, shard: SequenceShard, members: tuple[EntryMembers, ...]) -> None:
        self._shard = shard
        self._members = members
        self.own: list[Tensor] = []  # the entries that this rank makes, part after part

    def store_compression_weights(self, _: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows of the windows (1, W · m, C) of kv and gate (1, T, C), and what is added to the positions of
        windows that follow each other from 0.

        Where a document has no row, kv is 0 and the gate so low that its weight is 0, and its gradient finite.
        """
        lowest = torch.finfo(gate.dtype).min / 2
        none = torch.cat([kv.new_zeros(kv.shape[2]), gate.new_full((gate.shape[2],), lowest)])[None]
        joined = torch.cat([kv, gate], -1)[0]
        parts = zip(self._shard.parts, self._members, strict=True)
        windows = [members.lay_out_windows(joined[part.start : part.stop], none) for part, members in parts]
        window_kv, window_gate = torch.cat(windows)[None].split([kv.shape[2], gate.shape[2]], -1)
        positions = torch.cat([members.positions for members in self._members])
        rate = self._members[0].entries.stride
        return window_kv, window_gate, positions - rate * torch.arange(len(positions), device=positions.device)

    def update_overlap_state(self, *_: Any) -> tuple[None, None]:
        """The windows that entries read beside their own are among those that were handed out."""
        return None, None

    def update_compressor_states(self, _: str, made: Tensor) -> Tensor:
        """Keep those of the entries (1, W, D) that are entries, and not only windows before them."""
        counts = [len(members.entries.windows) for members in self._members]
        parts = zip(made[0].split(counts), self._members, strict=True)
        self.own = [members.own_entries(part_entries) for part_entries, members in parts]
        raise _EntriesTakenError


def _run_until_entries(module: Any, layer: _CacheLayer, *arguments: Any) -> None:
    try:
        type(module).forward(module, *arguments, SimpleNamespace(layers=[layer]), 0)
    except _EntriesTakenError:
        return
    raise AssertionError(f"{type(module).__name__} made no entries")


def _make_no_entries(compressor: Any, _: int, hidden_states: Tensor, *__: Any, **___: Any) -> tuple[Tensor, Tensor]:
    nothing = hidden_states.new_empty((1, 1, 0, compressor.head_dim))
    return nothing, nothing.new_empty((1, 1, hidden_states.shape[1], 0), dtype=torch.int32)


@break_graphs_around
def _make_entries(
    compressor: Any,
    window: int,
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    cache: None,
    layer_idx: int,
) -> tuple[Tensor, Tensor]:
    """Returns the entries that this rank makes (1, 1, E, D), and which each row has chosen, numbers in its document (1,
    1, T, k) int32, −1 for none; without columns each row sees all whose windows ended. Entered by every rank of a
    group."""
    shard: Any = running_layer().shard
    if isinstance(shard, Probe):
        return _make_no_entries(compressor, window, hidden_states)
    shard = require_one_row_shard(type(compressor).__name__, shard, *hidden_states.shape[:2])
    if isinstance(shard, SeparateRows):
        return _make_no_entries(compressor, window, hidden_states)
    members = layer_entries(compressor, window, shard)
    arguments = hidden_states, q_residual, position_ids
    chosen = hidden_states.new_empty((1, hidden_states.shape[1], 0), dtype=torch.int32)
    if any(part_members.chosen for part_members in members):
        chosen = choose_entries(compressor.indexer, shard, members, *arguments)
    layer = _CacheLayer(shard, members)
    _run_until_entries(compressor, layer, *arguments)
    return torch.cat(layer.own)[None, None], chosen[:, None]


@torch.no_grad()
def choose_entries(
    indexer: Any,
    shard: SequenceShard,
    members: tuple[EntryMembers, ...],
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
) -> Tensor:
    """Choose entries for each row by the class's own forward: (1, T, k) numbers in its document, −1 for none.

    It runs twice: over all rows for the indexer's entries, gathered over each group; and over runs of rows of one
    document with that document's entries, or on GPUs for queries and weights alone, if `choose_best_keys` can score
    them. No tensor of all rows × all entries is formed.
    """
    arguments = hidden_states, q_residual, position_ids
    layer = _CacheLayer(shard, members)
    _run_until_entries(indexer, layer, *arguments)
    rows = hidden_states.shape[1]
    k = int(indexer.index_topk)
    chosen = hidden_states.new_full((1, rows, k), -1, dtype=torch.int32)

    def run_stock_forward(run_rows: slice, seen: Tensor) -> Tensor:
        """Run the class's forward over some local rows, which choose among the entries that its cache has."""
        stand_in = SimpleNamespace(
            store_compression_weights=lambda _, kv, gate: (kv[:, :0], gate[:, :0], 0),
            update_compressor_states=lambda *_: seen[None],
        )
        run_arguments = (argument_rows(x, rows, run_rows) for x in arguments)
        return type(indexer).forward(indexer, *run_arguments, SimpleNamespace(layers=[stand_in]), 0)

    with ScoreOperands() as operands:
        run_stock_forward(slice(0, 1), layer.own[0][:0])
    by_kernel = operands.can_score_by_kernel()
    for part, part_members, own in zip(shard.parts, members, layer.own, strict=True):
        group_entries = part_members.gather(own)
        entries = part_members.entries
        heads = 0 if by_kernel else -(-int(indexer.num_heads) // entries.stride)
        for document, part_rows, positions, _ in row_runs(part_members, heads):
            first = int(entries.firsts[document])
            seen = group_entries[
                first : first + min(int(entries.counts[document]), positions.stop // entries.stride)
            ]
            run_rows = slice(part.start + part_rows.start, part.start + part_rows.stop)
            if by_kernel:
                with ScoreOperands() as operands:
                    run_stock_forward(run_rows, seen[:0])
                operands_of_run = operands.queries_and_weights()
                chosen[0, run_rows] = choose_best_keys(*operands_of_run, seen, positions.start, k, entries.stride)
                continue
            with LowestFirst(none=False):
                chosen_here = run_stock_forward(run_rows, seen)
            chosen[:, run_rows, : chosen_here.shape[-1]] = chosen_here
    return chosen


def attend_to_entries(
    module: Any,
    query: Tensor,
    key: Tensor,
    chosen: Tensor | None,
    shard: SequenceShard,
    *,
    window: int,
    scale: float,
    sinks: Tensor | None,
    kernel: str | None,
) -> Tensor:
    """Attend from query (1, N, T, H) to key (1, 1, T + E, H), rows and then entries: (1, T, N, H).

    `chosen` (1, 1, T, k) is what `_make_entries` returned, which the class put where masks are.
    """
    members = layer_entries(module.compressor, window, shard)
    rows = query.shape[2]
    q, keys = (x.squeeze(0).transpose(0, 1) for x in (query, key))
    indices = None if chosen is None or not chosen.shape[-1] else chosen[0, 0]
    limits = {"window": window, "scale": scale, "sinks": sinks, "indices": indices, "kernel": kernel}
    return attend_with_entries(q, keys[:rows], keys[rows:], members, shard, **limits).unsqueeze(0)
