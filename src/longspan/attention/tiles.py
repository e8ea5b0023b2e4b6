"""Tiles, and launches of them: rectangles of query rows and key rows under one mask that kernels have.

A tile is a run of consecutive query rows against a run of consecutive key rows. Its mask is all, causal, or a band. A
`Tiling` is the tiles of one kernel launch; a `Launch` is a tiling on a device, with its index tensors. Which tiles a
block of one member needs of another's rows is in `masks.py`, what kernels compute in `kernels/`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.attention.rows import merge_rows_
from longspan.comm import to_device
from longspan.layout.segments import Integers, expand_runs


class Tile(NamedTuple):
    """Query rows [q_start, q_stop) against key rows [k_start, k_stop), in local rows of either side.

    Query row i of the tile sees its keys j with i + d − left ≤ j ≤ i + d + right, where d = keys − queries: the last
    row is aligned to the last key, as in FlashAttention; None is no limit. In a tile every row sees a key and every
    key is seen by a row.

    With a `stride` s rows are aligned to one key more every s rows: row i to key
    keys − 1 − ⌊(queries − 1 − i + slack) / s⌋. With a slack of s − 1 the row before the last one sees a key less.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    left: int | None = None
    right: int | None = None
    stride: int = 1
    slack: int = 0

    @property
    def queries(self) -> int:
        return self.q_stop - self.q_start

    @property
    def keys(self) -> int:
        return self.k_stop - self.k_start

    def pieces(self, rows: int) -> "Iterator[Tile]":
        """Yield this tile cut into parts of at most `rows` query rows each."""
        return (self.part(start, min(start + rows, self.queries)) for start in range(0, self.queries, rows))

    def part(self, start: int, stop: int) -> "Tile":
        """Return the part of this tile of its query rows start to stop, counted in the tile, with the keys they see.

        In this tile row i is aligned to key i + `shift`. The part aligns its last row to its last key, as every tile
        does: that is `moved` keys before the row's key in this tile. Limits count from the aligned key, so they change
        by as much.
        """
        if self.stride > 1:
            assert self.left is None and self.right == 0, "a tile with a stride has no other limit"
            hidden, slack = divmod(self.queries - stop + self.slack, self.stride)
            rows = {"q_start": self.q_start + start, "q_stop": self.q_start + stop}
            return self._replace(**rows, k_stop=self.k_stop - hidden, slack=slack)
        shift = self.keys - self.queries
        first_key = 0 if self.left is None else max(0, start + shift - self.left)
        end_key = self.keys if self.right is None else min(self.keys, stop + shift + self.right)
        moved = stop + shift - end_key
        return Tile(
            self.q_start + start,
            self.q_start + stop,
            self.k_start + first_key,
            self.k_start + end_key,
            None if self.left is None else self.left - moved,
            None if self.right is None else self.right + moved,
        )


@dataclass(eq=False)
class Tiling:
    """Tiles for one kernel launch: all with the mask `left`, `right`, no query row and no key row in two of them.

    `bounds` (tiles, 4) holds the q_start, q_stop, k_start and k_stop of each; `tiles` are the same, one by one. Where
    `repeats_keys`, key rows may be in several tiles: a kernel receives such a row once for each of them. Tiles with a
    `stride` have a slack of stride − 1.
    """

    bounds: Integers
    left: int | None
    right: int | None
    repeats_keys: bool = field(default=False, kw_only=True)
    stride: int = field(default=1, kw_only=True)

    @staticmethod
    def from_tiles(tiles: Iterable[Tile]) -> "Tiling":
        """Return a tiling of some tiles, at least one, that all have the same mask."""
        tile_list = tuple(tiles)
        bounds = np.asarray([tile[:4] for tile in tile_list], dtype=np.int64)
        first = tile_list[0]
        return Tiling(bounds, first.left, first.right, stride=first.stride)

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        mask = {"left": self.left, "right": self.right, "stride": self.stride, "slack": self.stride - 1}
        return tuple(Tile(*bounds, **mask) for bounds in self.bounds.tolist())

    def q_rows(self) -> slice | Integers:
        """The query rows of all tiles in order; a slice where they follow each other."""
        return _row_index(self.bounds[:, 0], self.bounds[:, 1])

    def k_rows(self) -> slice | Integers:
        """Return the key rows of all tiles in order, like `q_rows`; a row that is in several tiles comes
        once for each.
        """
        return _row_index(self.bounds[:, 2], self.bounds[:, 3])

    @property
    def sizes(self) -> Integers:
        """How many query rows and key rows each tile has: (tiles, 2)."""
        return self.bounds[:, 1::2] - self.bounds[:, ::2]

    def packed_tiling(self) -> "Tiling":
        """Return the tiles over `x[q_rows()]` and `x[k_rows()]`: each begins where the one before ends."""
        stops = np.cumsum(self.sizes, axis=0)
        bounds = np.stack([stops - self.sizes, stops], axis=2).reshape(-1, 4)
        return Tiling(bounds, self.left, self.right, stride=self.stride)

    def blocks(self, rows: int, *, of_keys: bool) -> npt.NDArray[np.int32]:
        """Cut every tile into blocks of `rows` query rows, or with `of_keys` of so many keys.

        Returns for each block its tile, and its first row (or key) in the tile: (n, 2). Blocks that meet the most keys
        (or rows) come first: a block meets those within the limits of what its rows are aligned to.
        """
        lengths = self.sizes[:, int(of_keys)]
        other_lengths = self.sizes[:, int(not of_keys)]
        counts = -(-lengths // rows)
        tile = np.repeat(np.arange(len(self)), counts)
        start = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * rows
        # A row sees from `left` keys before its own to `right` after it: so a key is seen by rows from `right` before
        # its own to `left` after it.
        limit_before, limit_after = (self.right, self.left) if of_keys else (self.left, self.right)
        # The block's first row (or key) is aligned to this key (or row).
        aligned = start + (other_lengths - lengths)[tile]
        most = other_lengths[tile]
        first_met = 0 if limit_before is None else np.maximum(aligned - limit_before, 0)
        end_met = most if limit_after is None else np.minimum(aligned + rows + limit_after, most)
        order = np.argsort(first_met - end_met, kind="stable")
        return np.stack([tile, start], axis=1)[order].astype(np.int32)

    def __len__(self) -> int:
        return len(self.bounds)


def _row_index(starts: Integers, stops: Integers) -> slice | Integers:
    if (starts[1:] == stops[:-1]).all():
        return slice(int(starts[0]), int(stops[-1]))
    return expand_runs(starts, stops)


class RowIdentities(NamedTuple):
    """Who the rows of a block are: document id and position of every query row, position of every key row.

    They are in the order of the whole tensors, before a launch takes its rows.
    """

    document: Integers
    q_position: Integers
    k_position: Integers


class KeyBits(NamedTuple):
    """Where the keys that rows choose by position lie in a launch's tiles, and where a bit for each row and key lies.

    `places` has for each tile, one after another, the tile's key at each position of its document from 0 to its last
    key's (−1: no key of the tile), (P,) int32; `place_starts` (tiles + 1,) int64 is where each tile begins there. Bits
    lie in words of 64, of which each row of a tile takes as many as the tile's keys fill: `words` in all, and tile i
    begins at word `bit_starts[i]`, (tiles + 1,) int64. The kernel makes the bits themselves.
    """

    places: Tensor
    place_starts: Tensor
    bit_starts: Tensor
    words: int


class KeyBlocks(NamedTuple):
    """The blocks of consecutive positions of a launch's tiles: `list` (n, 2) int32 has the tile and number of each,
    document by document from its first position on, and tile i's begin at `starts[i]`, (tiles + 1,) int32.
    """

    list: Tensor
    starts: Tensor


class Launch:
    """One tiling, bound to a device. Made once per block and kept, so that layers share its index tensors.

    A kernel receives q[q_rows], k[k_rows], v[k_rows] (views where the rows follow each other) and `tiles` over those,
    each beginning where the one before ends; all have the mask `left`, `right` (see `Tile`). `gradient_rows` are the
    rows whose gradients of k and v result: `k_rows`; or, where the tiling repeats keys, each of these once, with the
    sum over its copies, which `key_copies` lists (`find_copies`).
    """

    def __init__(
        self, tiling: Tiling, device: torch.device, identities: Callable[[], RowIdentities] | None = None
    ) -> None:
        self.tiling: Tiling = tiling
        self.device: torch.device = device
        self.left: int | None = tiling.left
        self.right: int | None = tiling.right
        self.q_rows: slice | Tensor = _index_on_device(tiling.q_rows(), device)
        # These rows stay on the host.
        self.distinct_key_rows: slice | Integers = tiling.k_rows()
        self.k_rows: slice | Tensor = _index_on_device(self.distinct_key_rows, device)
        self.gradient_rows: slice | Tensor = self.k_rows
        self.key_copies: tuple[Tensor, ...] = ()
        if tiling.repeats_keys:
            self.distinct_key_rows, copies = find_copies(expand_runs(tiling.bounds[:, 2], tiling.bounds[:, 3]))
            self.gradient_rows = to_device(self.distinct_key_rows, device)
            self.key_copies = tuple(to_device(index, device) for index in copies)
        self._identities = identities
        self._blocks: dict[tuple[int, bool], Tensor] = {}
        self._key_blocks: dict[int, KeyBlocks] = {}

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles one by one, over the rows that a kernel receives."""
        return self.tiling.packed_tiling().tiles

    @cached_property
    def cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """Where tiles begin among the query rows and among the key rows: two of (tiles + 1,) int32."""
        ends = np.zeros((2, len(self.tiling) + 1), dtype=np.int32)
        ends[:, 1:] = self.tiling.packed_tiling().bounds[:, 1::2].T
        q_ends, k_ends = to_device(ends, self.device)
        return q_ends, k_ends

    @cached_property
    def max_lengths(self) -> tuple[int, int]:
        """The most query rows and the most key rows of a tile."""
        queries, keys = self.tiling.sizes.max(0).tolist()
        return queries, keys

    def blocks(self, rows: int, *, of_keys: bool) -> Tensor:
        """Cut tiles into blocks of `rows` rows or keys, the costliest first: tile and first row in it (n, 2), int32.

        In this order a kernel whose programs take one block each keeps all multiprocessors busy to the end.
        """
        if (rows, of_keys) not in self._blocks:
            self._blocks[rows, of_keys] = to_device(self.tiling.blocks(rows, of_keys=of_keys), self.device)
        return self._blocks[rows, of_keys]

    @cached_property
    def row_identities(self) -> tuple[Tensor, Tensor, Tensor]:
        """Documents and positions of the query rows that a kernel receives, and positions of its key rows."""
        assert self._identities is not None, "this launch was made without identities of rows"
        document, q_position, k_position = self._identities()
        q_rows, k_rows = self.tiling.q_rows(), self.tiling.k_rows()
        picked = (document[q_rows], q_position[q_rows], k_position[k_rows])
        # Copied: positions are read-only, which torch warns of.
        documents, q_positions, k_positions = (to_device(x.copy(), self.device) for x in picked)
        return documents, q_positions, k_positions

    @cached_property
    def key_bits(self) -> KeyBits:
        """For a call with indices: which key of a tile is at a position, and where its bits lie (`KeyBits`)."""
        positions = self._key_positions()
        # Each tile's keys begin here among the keys that a kernel receives.
        key_starts = self.tiling.packed_tiling().bounds[:, 2]
        rows, keys = self.tiling.sizes.T
        position_counts = self._position_counts()
        word_counts = rows * -(-keys // 64)
        # The rows are the tiles' starts among places, and among words.
        starts = np.zeros((2, len(self.tiling) + 1), dtype=np.int64)
        starts[:, 1:] = np.cumsum([position_counts, word_counts], axis=1)
        places = np.full(starts[0, -1], -1, dtype=np.int32)
        key_in_tile = np.arange(len(positions)) - np.repeat(key_starts, keys)
        places[np.repeat(starts[0, :-1], keys) + positions] = key_in_tile
        place_starts, bit_starts = to_device(starts, self.device)
        return KeyBits(to_device(places, self.device), place_starts, bit_starts, int(starts[1, -1]))

    def key_blocks(self, size: int) -> KeyBlocks:
        """For a call whose rows choose blocks of `size` positions: the blocks of all tiles (`KeyBlocks`)."""
        if size not in self._key_blocks:
            counts = -(-self._position_counts() // size)
            starts = np.append(0, np.cumsum(counts)).astype(np.int32)
            tile = np.repeat(np.arange(len(counts)), counts)
            block_list = np.stack([tile, expand_runs(np.zeros_like(counts), counts)], axis=1).astype(np.int32)
            self._key_blocks[size] = KeyBlocks(*(to_device(x, self.device) for x in (block_list, starts)))
        return self._key_blocks[size]

    def _key_positions(self) -> Integers:
        assert self._identities is not None, "this launch was made without identities of rows"
        return self._identities().k_position[self.tiling.k_rows()]

    def _position_counts(self) -> Integers:
        """How many positions each tile's document has up to the tile's last key."""
        return np.maximum.reduceat(self._key_positions(), self.tiling.packed_tiling().bounds[:, 2]) + 1


def find_copies(rows: Integers) -> tuple[Integers, list[Integers]]:
    """Return the distinct rows (n,), rising, and as many index arrays (n,) as the most frequent row has copies.

    Array i has the place in `rows` of each distinct row's i-th copy, −1 where it has fewer.

    >>> find_copies(np.array([4, 5, 5, 6, 5]))
    (array([4, 5, 6]), [array([0, 1, 3]), array([-1,  2, -1]), array([-1,  4, -1])])
    """
    distinct, first, counts = np.unique(np.sort(rows), return_index=True, return_counts=True)
    places = np.append(np.argsort(rows, kind="stable"), -1)
    copies = range(int(counts.max(initial=0)))
    return distinct, [places[np.where(copy < counts, first + copy, -1)] for copy in copies]


def visible_key_mask(tile: Tile, device: torch.device) -> Tensor | None:
    """Return which keys each query row of a tile sees: (queries, keys) bool; None where every row sees every key."""
    if tile.left is None and tile.right is None:
        return None
    rows_after = tile.queries - 1 - torch.arange(tile.queries, device=device)[:, None]
    aligned_key = tile.keys - 1 - (rows_after + tile.slack) // tile.stride
    keys = torch.arange(tile.keys, device=device)
    seen = torch.ones((tile.queries, tile.keys), dtype=torch.bool, device=device)
    if tile.left is not None:
        seen &= keys >= aligned_key - tile.left
    if tile.right is not None:
        seen &= keys <= aligned_key + tile.right
    return seen


def _index_on_device(rows: slice | np.ndarray, device: torch.device) -> slice | Tensor:
    return rows if isinstance(rows, slice) else to_device(rows, device)


class DenseCall(NamedTuple):
    """Query rows against key rows, as kernels without tiles take them: unmasked, causal with as many keys as rows, or
    under a mask to add to scores.
    """

    rows: slice
    keys: slice
    causal: bool = False
    attn_mask: Tensor | None = None
    first: bool = True  # whether no call before had these rows

    def write_or_merge_result(self, total_out: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        """Put the result of this call, out (rows, N, Hv) and lse (rows, N), into its rows of the totals: written if it
        is their first, else merged.
        """
        if self.first:
            total_out[self.rows] = out
            total_lse[self.rows] = lse
        else:
            merge_rows_(total_out, total_lse, self.rows, out, lse)


def dense_calls(tile: Tile) -> Iterator[DenseCall]:
    """Yield the calls of a tile without a window.

    A causal tile with more keys than rows is a square on the last keys, and a full one. A single row sees all keys
    without a mask: it is aligned to the last key.
    """
    assert tile.left is None and (tile.right in (None, 0) or tile.queries == 1), "a window takes a mask"
    rows, keys = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
    if tile.right is None or tile.queries == 1:
        yield DenseCall(rows, keys)
        return
    diagonal = tile.k_stop - tile.queries
    yield DenseCall(rows, slice(diagonal, tile.k_stop), causal=True)
    if tile.keys > tile.queries:
        yield DenseCall(rows, slice(tile.k_start, diagonal), first=False)
