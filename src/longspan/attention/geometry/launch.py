"""A tiling on a device: what a kernel is given besides its tensors.

For kernels that take one document at a time and align a causal mask to the first key, it is cut into dense calls.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan.attention.geometry.tiles import Rows, Tile, Tiling
from longspan.attention.sums.rows import merge_
from longspan.comm import to_device


class Tokens(NamedTuple):
    """Who the rows of a block are: document id and position of every query row, position of every key row."""

    document: Rows
    q_position: Rows
    k_position: Rows


class Launch:
    """One tiling, bound to a device. Made once per block and kept, so that layers share its index tensors.

    A kernel receives q[q_rows], k[k_rows], v[k_rows] (views where the rows follow each other) and `tiles` over those,
    each beginning where the one before ends; all have the mask `left`, `right` (see `Tile`).
    """

    def __init__(self, tiling: Tiling, device: torch.device, tokens: Callable[[], Tokens] | None = None) -> None:
        self.tiling, self.device = tiling, device
        self.left, self.right = tiling.left, tiling.right
        self.q_rows = _on(tiling.q_rows(), device)
        self.k_rows = _on(tiling.k_rows(), device)
        self._tokens = tokens
        self._blocks: dict[tuple[int, bool], Tensor] = {}

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles one by one, over the rows that a kernel receives."""
        return self.tiling.packed().tiles

    @cached_property
    def cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """Where tiles begin among the query rows and among the key rows: two of (tiles + 1,) int32."""
        ends = np.zeros((2, len(self.tiling) + 1), dtype=np.int32)
        ends[:, 1:] = self.tiling.packed().bounds[:, 1::2].T
        q_ends, k_ends = to_device(ends, self.device)
        return q_ends, k_ends

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The most query rows and the most key rows of a tile."""
        queries, keys = (self.tiling.bounds[:, 1::2] - self.tiling.bounds[:, ::2]).max(0).tolist()
        return queries, keys

    def blocks(self, rows: int, *, of_keys: bool) -> Tensor:
        """The tiles cut into blocks of so many rows, or of keys, the costliest first: tile and first row in it (n, 2).

        A kernel whose programs take one block each keeps all multiprocessors busy to the end this way. int32.
        """
        if (rows, of_keys) not in self._blocks:
            self._blocks[rows, of_keys] = to_device(self.tiling.blocks(rows, of_keys=of_keys), self.device)
        return self._blocks[rows, of_keys]

    @cached_property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Document id and position of the query rows that a kernel receives, and position of the key rows: int64."""
        assert self._tokens is not None, "this launch was made without tokens"
        document, q_position, k_position = self._tokens()
        q_rows, k_rows = self.tiling.q_rows(), self.tiling.k_rows()
        picked = (document[q_rows], q_position[q_rows], k_position[k_rows])
        documents, q_positions, k_positions = (to_device(x.copy(), self.device) for x in picked)
        return documents, q_positions, k_positions


def visible(tile: Tile, device: torch.device) -> Tensor | None:
    """Which keys each query row of a tile sees: (queries, keys) bool; None where every row sees every key."""
    if tile.left is None and tile.right is None:
        return None
    first = torch.arange(tile.queries, device=device)[:, None] + (tile.keys - tile.queries)
    keys = torch.arange(tile.keys, device=device)
    seen = torch.ones((tile.queries, tile.keys), dtype=torch.bool, device=device)
    if tile.left is not None:
        seen &= keys >= first - tile.left
    if tile.right is not None:
        seen &= keys <= first + tile.right
    return seen


def _on(rows: slice | np.ndarray, device: torch.device) -> slice | Tensor:
    return rows if isinstance(rows, slice) else to_device(rows, device)


class DenseCall(NamedTuple):
    """Query rows against key rows: all of them, causal with as many keys as rows, or under a mask to add to scores."""

    rows: slice
    keys: slice
    causal: bool = False
    attn_mask: Tensor | None = None
    first: bool = True  # whether no call before had these rows

    def keep(self, total_out: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        """Lay what the call gives into the totals, or merge it where its rows were there before."""
        if self.first:
            total_out[self.rows], total_lse[self.rows] = out, lse
        else:
            merge_(total_out, total_lse, self.rows, out, lse)


def dense_calls(tile: Tile) -> Iterator[DenseCall]:
    """A tile without a window: a causal one with more keys than rows is a square on the last keys, and a full one."""
    assert tile.left is None and (tile.right in (None, 0) or tile.queries == 1), "a window takes a mask"
    rows, keys = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
    if tile.right is None or tile.queries == 1:
        yield DenseCall(rows, keys)
        return
    diagonal = tile.k_stop - tile.queries
    yield DenseCall(rows, slice(diagonal, tile.k_stop), causal=True)
    if tile.keys > tile.queries:
        yield DenseCall(rows, slice(tile.k_start, diagonal), first=False)
