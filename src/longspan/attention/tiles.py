"""Tiles, and launches of them: rectangles of query rows and key rows under one mask that kernels have.

A tile is a run of consecutive query rows against a run of consecutive key rows. Its mask is all, causal, or a band. A
`Tiling` is the tiles of one kernel launch; a `Launch` is a tiling on a device, with its index tensors. Which tiles a
block of one member needs of another's rows is at the end. Not covered: what kernels compute (`kernels/`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.attention.rows import merge_rows_
from longspan.comm import to_device
from longspan.layout.segments import Flags, Integers, Segments, Spans, expand_runs


class Tile(NamedTuple):
    """Query rows [q_start, q_stop) against key rows [k_start, k_stop), in local rows of either side.

    Query row i of the tile sees its keys j with i + d − left ≤ j ≤ i + d + right, where d = keys − queries: the last
    row is aligned to the last key, as in FlashAttention; None is no limit. In a tile every row sees a key and every
    key is seen by a row.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    left: int | None = None
    right: int | None = None

    @property
    def queries(self) -> int:
        return self.q_stop - self.q_start

    @property
    def keys(self) -> int:
        return self.k_stop - self.k_start

    def pieces(self, rows: int) -> "Iterator[Tile]":
        return (self.part(start, min(start + rows, self.queries)) for start in range(0, self.queries, rows))

    def part(self, start: int, stop: int) -> "Tile":
        """Return the part of this tile of its query rows start to stop, counted in the tile, with the keys they see.

        In this tile row i is aligned to key i + `shift`. The part aligns its last row to its last key, as every tile
        does: that is `moved` keys before the row's key in this tile. Limits count from the aligned key, so they change
        by as much.
        """
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
    `repeats_keys`, key rows may be in several tiles: a kernel receives such a row once for each of them.
    """

    bounds: Integers
    left: int | None
    right: int | None
    repeats_keys: bool = field(default=False, kw_only=True)

    @staticmethod
    def from_tiles(tiles: Iterable[Tile]) -> "Tiling":
        tile_list = tuple(tiles)
        return Tiling(
            np.asarray([tile[:4] for tile in tile_list], dtype=np.int64), tile_list[0].left, tile_list[0].right
        )

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        return tuple(Tile(a, b, c, d, self.left, self.right) for a, b, c, d in self.bounds.tolist())

    def q_rows(self) -> slice | Integers:
        """The query rows of all tiles in order; a slice where they follow each other."""
        return _row_index(self.bounds[:, 0], self.bounds[:, 1])

    def k_rows(self) -> slice | Integers:
        return _row_index(self.bounds[:, 2], self.bounds[:, 3])

    @property
    def sizes(self) -> Integers:
        """How many query rows and key rows each tile has: (tiles, 2)."""
        return self.bounds[:, 1::2] - self.bounds[:, ::2]

    def packed_tiling(self) -> "Tiling":
        """Return the tiles over `x[q_rows()]` and `x[k_rows()]`: each begins where the one before ends."""
        stops = np.cumsum(self.sizes, axis=0)
        bounds = np.stack([stops - self.sizes, stops], axis=2).reshape(-1, 4)
        return Tiling(bounds, self.left, self.right)

    def blocks(self, rows: int, *, of_keys: bool) -> npt.NDArray[np.int32]:
        """Cut every tile into blocks of `rows` query rows, or of keys: the tile and the block's first row in it (n, 2).

        Blocks that meet the most keys (or rows) come first: those between the limits around the keys that the block's
        first and last row are aligned to.
        """
        lengths = self.sizes[:, int(of_keys)]
        other_lengths = self.sizes[:, int(not of_keys)]
        counts = -(-lengths // rows)
        tile = np.repeat(np.arange(len(self)), counts)
        start = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * rows
        # A row sees from `left` keys before its own to `right` after it: so a key is seen from `right` rows before on.
        limit_before, limit_after = (self.right, self.left) if of_keys else (self.left, self.right)
        # What the block's first row (or key) is aligned to on the other side, and what the block meets there.
        aligned = start + (other_lengths - lengths)[tile]
        most = other_lengths[tile]
        first_met = 0 if limit_before is None else np.maximum(aligned - limit_before, 0)
        end_met = most if limit_after is None else np.minimum(aligned + rows + limit_after, most)
        order = np.argsort(first_met - end_met, kind="stable")
        return np.stack([tile, start], axis=1)[order].astype(np.int32)

    def __len__(self) -> int:
        return len(self.bounds)

    def __repr__(self) -> str:
        return f"Tiling({', '.join(map(str, self.tiles[:6]))}{', …' if len(self) > 6 else ''})"


def _row_index(starts: Integers, stops: Integers) -> slice | Integers:
    if (starts[1:] == stops[:-1]).all():
        return slice(int(starts[0]), int(stops[-1]))
    return expand_runs(starts, stops)


class RowIdentities(NamedTuple):
    """Who the rows of a block are: document id and position of every query row, position of every key row."""

    document: Integers
    q_position: Integers
    k_position: Integers


class ChosenKeys(NamedTuple):
    """How positions become bits, one for each row and key of a tile, a row's in whole words of 64.

    `places` has the key that lies at each position of a tile's document (−1: none), tile after tile: (P,) int32. Tiles
    begin there at `place_starts`, and among all `words` at `bit_starts`: (tiles + 1,) int64.
    """

    places: Tensor
    place_starts: Tensor
    bit_starts: Tensor
    words: int


class Launch:
    """One tiling, bound to a device. Made once per block and kept, so that layers share its index tensors.

    A kernel receives q[q_rows], k[k_rows], v[k_rows] (views where the rows follow each other) and `tiles` over those,
    each beginning where the one before ends; all have the mask `left`, `right` (see `Tile`). The gradients of keys are
    those of `gradient_rows`: of rows that the tiling repeats, the sum over `key_copies` (`find_copies`).
    """

    def __init__(
        self, tiling: Tiling, device: torch.device, identities: Callable[[], RowIdentities] | None = None
    ) -> None:
        self.tiling: Tiling = tiling
        self.device: torch.device = device
        self.left: int | None = tiling.left
        self.right: int | None = tiling.right
        self.q_rows: slice | Tensor = _index_on_device(tiling.q_rows(), device)
        self.key_rows: slice | Integers = tiling.k_rows()  # distinct, on the host
        self.k_rows: slice | Tensor = _index_on_device(self.key_rows, device)
        self.gradient_rows: slice | Tensor = self.k_rows
        self.key_copies: tuple[Tensor, ...] = ()
        if tiling.repeats_keys:
            self.key_rows, copies = find_copies(expand_runs(tiling.bounds[:, 2], tiling.bounds[:, 3]))
            self.gradient_rows = to_device(self.key_rows, device)
            self.key_copies = tuple(to_device(index, device) for index in copies)
        self._identities = identities
        self._blocks: dict[tuple[int, bool], Tensor] = {}

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
    def chosen_keys(self) -> ChosenKeys:
        assert self._identities is not None, "this launch was made without identities of rows"
        positions = self._identities().k_position[self.tiling.k_rows()]
        starts = self.tiling.packed_tiling().bounds[:, 2]
        rows, keys = self.tiling.sizes.T
        ends = np.zeros((2, len(self.tiling) + 1), dtype=np.int64)
        ends[:, 1:] = np.cumsum([np.maximum.reduceat(positions, starts) + 1, rows * -(-keys // 64)], axis=1)
        places = np.full(ends[0, -1], -1, dtype=np.int32)
        places[np.repeat(ends[0, :-1], keys) + positions] = np.arange(len(positions)) - np.repeat(starts, keys)
        place_starts, bit_starts = to_device(ends, self.device)
        return ChosenKeys(to_device(places, self.device), place_starts, bit_starts, int(ends[1, -1]))


def find_copies(rows: Integers) -> tuple[Integers, list[Integers]]:
    """Return the distinct rows (n,), rising, and for each copy the places in `rows` of that copy of each: −1 for none.

    >>> find_copies(np.array([4, 5, 5, 6, 5]))
    (array([4, 5, 6]), [array([0, 1, 3]), array([-1,  2, -1]), array([-1,  4, -1])])
    """
    distinct, first, counts = np.unique(np.sort(rows), return_index=True, return_counts=True)
    places = np.append(np.argsort(rows, kind="stable"), -1)
    copies = range(int(counts.max(initial=0)))
    return distinct, [places[np.where(copy < counts, first + copy, -1)] for copy in copies]


def visible_keys(tile: Tile, device: torch.device) -> Tensor | None:
    """Return which keys each query row of a tile sees: (queries, keys) bool; None where every row sees every key."""
    if tile.left is None and tile.right is None:
        return None
    aligned_key = torch.arange(tile.queries, device=device)[:, None] + (tile.keys - tile.queries)
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


class Mask(NamedTuple):
    """What a query sees of its document: all keys, those up to its own position, or of those the last `window`.

    With `chunk` c it sees those of its own chunk: a query at position p those from p − p mod c on.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None

    def for_lengths(self, lengths: Sequence[int]) -> "Mask":
        """Drop a window or chunk that hides no key of documents of these lengths."""
        longest = max(lengths, default=0)
        window, chunk = (None if x is None or x >= longest else x for x in (self.window, self.chunk))
        return Mask(self.causal, window, chunk)


class TileArrays(NamedTuple):
    """Tiles of many documents, as arrays of equal length; a limit of −1 is none."""

    document: Integers
    q_start: Integers
    q_stop: Integers
    k_start: Integers
    k_stop: Integers
    left: Integers
    right: Integers

    def select(self, keep: Flags) -> "TileArrays":
        return TileArrays(*(column[keep] for column in self))


def tiles_between(
    q: Segments, k: Segments, *, causal: bool, window: int | None = None, chunk: int | None = None
) -> tuple[Tiling, ...]:
    """Return the tilings that cover what the rows of `q` see of the rows of `k`.

    Rows see rows of their own document only: all of them, or with `causal` those at positions up to their own, or with
    `window` w at most the last w of those. With `chunk` c every c positions are a document of their own.

    Two members of a zigzag or contiguous partition give at most one tiling, with at most one tile a document, as long
    as there is no window and no chunk ends inside a run; with a window, their number depends on the partition and not
    on how many documents there are.
    """
    if chunk is not None:
        longest = max(int(segments.stop.max(initial=0)) for segments in (q, k))
        q, k = _chunk_segments(q, chunk, longest), _chunk_segments(k, chunk, longest)
    if window is not None:
        return _window_tilings(q, k, window)
    return make_tilings(_join_neighbours(_prefix_tiles(q, k)) if causal else _whole_tiles(q, k))


def _window_tilings(q: Segments, k: Segments, window: int, *, repeats_keys: bool = False) -> tuple[Tiling, ...]:
    band = _band_tiles(q, k, window)
    without_idle = _drop_idle_limits(band)
    candidates = (band, without_idle, split_left_limits(without_idle))
    # all cover the same; each tiling is a launch
    return min((make_tilings(arrays, repeats_keys=repeats_keys) for arrays in candidates), key=len)


def branch_tilings(
    q: Segments, k: Segments, prefix: Integers, bases: Integers, window: int | None
) -> tuple[Tiling, ...]:
    """Return the tilings that cover what rows of `q` see of the documents that theirs continue, among the rows of `k`.

    `prefix[d]` is what document d continues in one generation (−1: nothing), and `bases[d]` the position of its first
    row. Without a window all of a prefix is seen: the rows of its branches, which follow each other, are one tile.
    Under a window each branch sees rows at the prefix's end through a band of its own: these are repeated for each
    branch, so that one launch has all bands of one form.
    """
    continues = prefix[q.document] >= 0
    q = Segments(*(column[continues] for column in (q.document, q.start, q.stop, q.offset)))
    branches = np.unique(q.document)
    no_rows = np.zeros_like(branches)
    branch, run, _ = pair_runs(Segments(prefix[branches], no_rows, no_rows, no_rows), k)
    document = branches[branch]
    base = bases[q.document]
    base_of_keys = bases[prefix[document]]
    q = Segments(q.document, q.start + base, q.stop + base, q.offset)
    keys = Segments(document, k.start[run] + base_of_keys, k.stop[run] + base_of_keys, k.offset[run])
    if window is not None:
        return _window_tilings(q, keys, window, repeats_keys=True)
    tiles = _join_neighbours(_prefix_tiles(q, keys))
    return make_tilings(tiles._replace(document=prefix[tiles.document]))


def _chunk_segments(segments: Segments, chunk: int, longest: int) -> Segments:
    """Every document has as many numbers as `longest` positions have chunks, so that no two chunks share one."""
    first_chunk = segments.start // chunk
    end_chunk = -(-segments.stop // chunk)
    number = expand_runs(first_chunk, end_chunk)
    run = np.repeat(np.arange(len(segments)), end_chunk - first_chunk)
    start = np.maximum(segments.start[run], number * chunk)
    stop = np.minimum(segments.stop[run], (number + 1) * chunk)
    document = segments.document[run] * -(-longest // chunk) + number
    return Segments(document, start, stop, segments.offset[run] + start - segments.start[run])


def make_tilings(tiles: TileArrays, *, repeats_keys: bool = False) -> tuple[Tiling, ...]:
    """Make the tilings of some tiles: of each mask as many as the most tiles that one document has of it.

    The i-th tile of each document with a mask goes into that mask's i-th tiling, as a kernel takes one tile a document.
    """
    if not len(tiles.document):
        return ()
    order = np.lexsort((tiles.document, tiles.right, tiles.left))
    same_mask = (np.diff(tiles.left[order]) == 0) & (np.diff(tiles.right[order]) == 0)
    is_first = np.append(True, ~(same_mask & (np.diff(tiles.document[order]) == 0)))  # of its document and mask
    index = np.arange(len(order))
    turn = np.empty_like(index)
    mask = np.empty_like(index)
    # `turn`: the number of a tile among those of its document and mask; `mask`: the number of its mask
    turn[order] = index - np.maximum.accumulate(np.where(is_first, index, 0))
    mask[order] = np.cumsum(np.append(0, ~same_mask))
    launch = mask * (int(turn.max()) + 1) + turn
    _, first_tiles = np.unique(launch, return_index=True)
    tilings = list[Tiling]()
    for i in np.sort(first_tiles):
        of_launch = tiles.select(launch == launch[i])
        bounds = np.stack(of_launch[1:5], axis=1)
        hides_left, hides_right = _find_hiding_limits(
            of_launch
        )  # a limit that hides no key of any tile is left out
        left = int(of_launch.left[0]) if hides_left.any() else None
        right = int(of_launch.right[0]) if hides_right.any() else None
        tilings.append(Tiling(bounds, left, right, repeats_keys=repeats_keys))
    return tuple(tilings)


def _find_hiding_limits(tiles: TileArrays) -> tuple[Flags, Flags]:
    left = (tiles.left >= 0) & (tiles.left < tiles.k_stop - tiles.k_start - 1)
    right = (tiles.right >= 0) & (tiles.right < tiles.q_stop - tiles.q_start - 1)
    return left, right


def pair_runs(q: Segments, k: Segments) -> tuple[Integers, Integers, Integers]:
    """Pair every run of q with every run of k of its document.

    Three arrays, one entry a pair: the run of q, the run of k, and the first run of k of that document.
    """
    documents, first_runs, runs = np.unique(k.document, return_index=True, return_counts=True)
    # Of a document after the last one of k, the search gives an index past the end.
    document_index = np.minimum(np.searchsorted(documents, q.document), max(len(documents) - 1, 0))
    is_in_k = documents[document_index] == q.document if len(documents) else np.zeros(len(q), dtype=bool)
    q_run = np.flatnonzero(is_in_k)
    starts = first_runs[document_index[q_run]]
    count = runs[document_index[q_run]]
    return np.repeat(q_run, count), expand_runs(starts, starts + count), np.repeat(starts, count)


def _document_extents(segments: Segments) -> tuple[Integers, Integers, Integers]:
    """The documents in the tensor's order, and where the rows of each begin and end in it."""
    first_runs = np.flatnonzero(np.diff(segments.document, prepend=-1))
    last_runs = np.append(first_runs, len(segments))[1:] - 1
    stops = segments.offset + segments.stop - segments.start
    return segments.document[first_runs], segments.offset[first_runs], stops[last_runs]


def _whole_tiles(q: Segments, k: Segments) -> TileArrays:
    document, q_start, q_stop = _document_extents(q)
    k_document, k_start, k_stop = _document_extents(k)
    document, q_index, k_index = np.intersect1d(document, k_document, assume_unique=True, return_indices=True)
    no_limit = np.full_like(document, -1)
    return TileArrays(
        document, q_start[q_index], q_stop[q_index], k_start[k_index], k_stop[k_index], no_limit, no_limit
    )


def _prefix_tiles(q: Segments, k: Segments) -> TileArrays:
    """Return the causal tiles of some rows and keys: each query row sees a prefix of the keys.

    For each pair of a run of q and a run of k there are two tiles: the rows at the positions of the run of k, which see
    one key more with every row, and those after it up to the next run of k, which see all of it.
    """
    q_run, k_run, first_k_run = pair_runs(q, k)  # indices: of q's run, of k's run, of the document's first run of k
    document = q.document[q_run]
    start = q.start[q_run]
    stop = q.stop[q_run]
    k_start, k_stop, k_offset = k.start[k_run], k.stop[k_run], k.offset[k_run]
    following = stop.copy()  # where the next run of k begins
    same_run = q_run[1:] == q_run[:-1]
    following[:-1][same_run] = k_start[1:][same_run]
    first_position = np.stack([np.maximum(start, k_start), np.maximum(start, k_stop)], axis=1)
    end_position = np.stack([np.minimum(stop, k_stop), np.minimum(stop, following)], axis=1)
    to_row = (q.offset[q_run] - start)[:, None]  # added to a position, it gives the row
    end_key = np.stack([k_offset + end_position[:, 0] - k_start, k_offset + k_stop - k_start], axis=1)
    first_key = k.offset[first_k_run][:, None]
    columns = (
        document[:, None],
        first_position + to_row,
        end_position + to_row,
        first_key,
        end_key,
        np.array(-1),  # no limit on the left
        np.array([0, -1]),  # of the two tiles of a pair, the first ends on the causal diagonal
    )
    tiles = TileArrays(*(np.broadcast_to(column, first_position.shape).reshape(-1) for column in columns))
    return tiles.select(tiles.q_start < tiles.q_stop)


def _join_neighbours(tiles: TileArrays) -> TileArrays:
    """Join neighbouring tiles where one mask covers both: equal keys, or one causal diagonal.

    On a diagonal the second tile has as many more keys as it has rows.
    """
    added_keys = np.where(tiles.right[1:] < 0, 0, tiles.q_stop[1:] - tiles.q_start[1:])
    continues = (tiles.q_stop[:-1] == tiles.q_start[1:]) & (tiles.k_start[:-1] == tiles.k_start[1:])
    continues &= (tiles.right[:-1] == tiles.right[1:]) & (np.diff(tiles.k_stop) == added_keys)
    is_first = np.ones(len(tiles.document), dtype=bool)
    is_last = np.ones(len(tiles.document), dtype=bool)
    is_first[1:] = ~continues
    is_last[:-1] = ~continues
    return tiles.select(is_last)._replace(q_start=tiles.q_start[is_first])


def _band_tiles(q: Segments, k: Segments, window: int) -> TileArrays:
    """Return the tiles of runs of q and k where position p sees p − window + 1 … p.

    A pair of runs gives one tile: the rows that see any of the keys, and the keys that any of these sees. Its last row
    is aligned to its last key; where the row's position is `after_key` positions after that key's, every row sees so
    many keys to the right of the key that it is aligned to, and that many fewer than window − 1 to the left. `left` ≥
    0, because a row more than window − 1 positions after the last key sees none.
    """
    q_run, k_run, _ = pair_runs(q, k)
    q_start, q_stop = (q.start[q_run], q.stop[q_run])
    k_start, k_stop = (k.start[k_run], k.stop[k_run])
    first_position = np.maximum(q_start, k_start)
    end_position = np.minimum(q_stop, k_stop + window - 1)
    k_first = np.maximum(k_start, first_position - window + 1)
    k_last = np.minimum(k_stop, end_position)
    to_row, to_key = q.offset[q_run] - q_start, k.offset[k_run] - k_start
    after_key = end_position - k_last  # from the last key's position to the last row's: 0 … window − 1
    tiles = TileArrays(
        q.document[q_run],
        first_position + to_row,
        end_position + to_row,
        k_first + to_key,
        k_last + to_key,
        left=window - 1 - after_key,
        right=after_key,
    )
    return tiles.select((first_position < end_position) & (k_first < k_last))


def _drop_idle_limits(tiles: TileArrays) -> TileArrays:
    """Tiles whose last row and last key are at one position stay as they are, so that all of them keep one mask."""
    left, right = _find_hiding_limits(tiles)
    after = tiles.right > 0
    return tiles._replace(
        left=np.where(after & ~left, -1, tiles.left), right=np.where(after & ~right, -1, tiles.right)
    )


def split_left_limits(tiles: TileArrays) -> TileArrays:
    """Split each tile with a limit only on the left into the keys that all its rows see, and those before them.

    The tile's last row sees none of the earlier keys, and the row before it sees one. So the second part leaves the
    last row out and has the limit 0, in every document: all share one mask.
    """
    cut = (tiles.left > 0) & (tiles.right < 0)
    limited = tiles.select(cut)
    first_key = limited.k_stop - limited.left - 1  # the last row sees keys from here on
    full = limited._replace(k_start=first_key, left=np.full_like(first_key, -1))
    band = limited._replace(q_stop=limited.q_stop - 1, k_stop=first_key, left=np.zeros_like(first_key))
    parts = (tiles.select(~cut), full, band.select(band.q_start < band.q_stop))
    return TileArrays(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def span_tiles(q: Segments, k: Segments, spans: Spans) -> tuple[Tiling, ...]:
    """Return the tilings that cover what rows of `q` see of the later rows of their spans among the rows of `k`.

    Whole spans on both sides, however many, are one tiling; a span that is cut between members adds a few. Splitting
    left limits gives fewer masks for some spans and more for others: the fewest tilings are taken.
    """
    if not len(spans):
        return ()
    tiles = _later_key_tiles(spans.find_rows(q), spans.find_rows(k))
    return min((make_tilings(arrays) for arrays in (tiles, split_left_limits(tiles))), key=len)


def _later_key_tiles(q: Segments, k: Segments) -> TileArrays:
    """Return the tiles of rows of q with the keys of k that come after them; the documents of q and k are spans.

    Rows of a run have a limit on the left only: the last one sees keys from the next position on, each row before it
    one key more.
    """
    q_run, k_run, _ = pair_runs(q, k)
    start = q.start[q_run]
    k_stop = k.stop[k_run]
    stop = np.minimum(q.stop[q_run], k_stop - 1)
    k_start = np.maximum(k.start[k_run], start + 1)
    to_row = q.offset[q_run] - start
    to_key = k.offset[k_run] - k.start[k_run]
    left = k_stop - 1 - stop  # the last row, at position stop − 1, sees keys from position stop on
    hides = left < k_stop - k_start - 1
    tiles = TileArrays(
        q.document[q_run],
        start + to_row,
        stop + to_row,
        k_start + to_key,
        k_stop + to_key,
        left=np.where(hides, left, -1),
        right=np.full_like(left, -1),
    )
    return tiles.select((start < stop) & (k_start < k_stop))
