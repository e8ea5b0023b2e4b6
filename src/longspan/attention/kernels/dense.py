"""Launches as dense calls, for kernels that take one document at a time and align a causal mask to the first key."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from longspan.attention.geometry.tiles import Tile
from longspan.attention.sums.rows import merge_


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
