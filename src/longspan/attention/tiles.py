"""Which query rows see which key rows of a block, decided in integers.

A *tile* is a rectangle of consecutive query rows and consecutive key rows with a mask that a kernel knows: all, causal,
or a band. `tiles_between` covers everything that the rows of two members may see of each other; what no tile covers is
never computed. This module moves no tensors (`block.py`), and knows neither heads nor kernels.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.layout.segments import Segment, Segments

Rows = npt.NDArray[np.int64]


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
        """Number of query rows."""
        return self.q_stop - self.q_start

    @property
    def keys(self) -> int:
        """Number of key rows."""
        return self.k_stop - self.k_start

    def pieces(self, rows: int) -> "Iterator[Tile]":
        """This tile cut into tiles of at most `rows` query rows."""
        return (self.rows(start, min(start + rows, self.queries)) for start in range(0, self.queries, rows))

    def rows(self, start: int, stop: int) -> "Tile":
        """The part of this tile of its query rows start to stop (counted in the tile), with the keys that they see."""
        shift = self.keys - self.queries
        first = 0 if self.left is None else max(0, start + shift - self.left)
        last = self.keys if self.right is None else min(self.keys, stop + shift + self.right)
        moved = start + shift - first - (last - first) + (stop - start)
        return Tile(
            self.q_start + start,
            self.q_start + stop,
            self.k_start + first,
            self.k_start + last,
            None if self.left is None else self.left - moved,
            None if self.right is None else self.right + moved,
        )


@dataclass(frozen=True)
class Tiling:
    """Tiles for one kernel launch: all with the same mask, no query row and no key row in two of them."""

    tiles: tuple[Tile, ...]

    @property
    def left(self) -> int | None:
        """Keys that a row sees before its own; None is all."""
        return self.tiles[0].left

    @property
    def right(self) -> int | None:
        """Keys that a row sees after its own; None is all."""
        return self.tiles[0].right

    def q_rows(self) -> slice | Rows:
        """The query rows of all tiles in order; a slice where they follow each other."""
        return _rows([(tile.q_start, tile.q_stop) for tile in self.tiles])

    def k_rows(self) -> slice | Rows:
        """The key rows of all tiles in order; a slice where they follow each other."""
        return _rows([(tile.k_start, tile.k_stop) for tile in self.tiles])

    def packed(self) -> "Tiling":
        """The same tiles over `x[q_rows()]` and `x[k_rows()]`, where each tile begins at the end of the one before."""
        tiles: list[Tile] = []
        q_at = k_at = 0
        for tile in self.tiles:
            tiles.append(Tile(q_at, q_at + tile.queries, k_at, k_at + tile.keys, tile.left, tile.right))
            q_at, k_at = tiles[-1].q_stop, tiles[-1].k_stop
        return Tiling(tuple(tiles))


def tiles_between(q: Segments, k: Segments, *, causal: bool, window: int | None = None) -> tuple[Tiling, ...]:
    """The tilings that cover what the rows of `q` see of the rows of `k`.

    Rows see rows of their own document only: all of them, or with `causal` those at positions up to their own, or with
    `window` w at most the last w of those. Two members of a zigzag or contiguous partition give at most one tiling,
    with at most one tile a document, as long as there is no window.
    """
    keys = _runs(k)
    launches: dict[tuple[int | None, int | None, int], list[Tile]] = {}
    for document, q_runs in _runs(q).items():
        turns: Counter[tuple[int | None, int | None]] = Counter()
        if document not in keys:
            continue
        for tile in _document_tiles(q_runs, keys[document], causal, window):
            mask = (tile.left, tile.right)
            launches.setdefault((*mask, turns[mask]), []).append(tile)
            turns[mask] += 1
    return tuple(Tiling(_loosened(tiles)) for tiles in launches.values())


def _loosened(tiles: list[Tile]) -> tuple[Tile, ...]:
    """The tiles of one launch, without a limit that hides no key from a row of any of them."""
    left = any(tile.left is not None and tile.left < tile.keys - 1 for tile in tiles)
    right = any(tile.right is not None and tile.right < tile.queries - 1 for tile in tiles)
    return tuple(tile._replace(left=tile.left if left else None, right=tile.right if right else None) for tile in tiles)


def _runs(segments: Segments) -> dict[int, list[Segment]]:
    runs: dict[int, list[Segment]] = {}
    for segment in segments:
        runs.setdefault(segment.document, []).append(segment)
    return runs


def _document_tiles(q: list[Segment], k: list[Segment], causal: bool, window: int | None) -> Iterable[Tile]:
    if window is not None:
        return (tile for q_run in q for k_run in k if (tile := _band(q_run, k_run, window)) is not None)
    return _joined(_prefixes(q, k)) if causal else [Tile(q[0].offset, _end(q), k[0].offset, _end(k))]


def _end(runs: list[Segment]) -> int:
    return runs[-1].offset + runs[-1].stop - runs[-1].start


def _prefixes(q: list[Segment], k: list[Segment]) -> Iterator[Tile]:
    """Causal tiles: every query row sees a prefix of the keys, which grows only where positions interleave."""
    base = k[0].offset
    for _, at, stop, offset in q:
        to_row, seen = offset - at, base
        for _, k_start, k_stop, k_offset in k:
            if at < min(stop, k_start):
                if seen > base:
                    yield Tile(at + to_row, min(stop, k_start) + to_row, base, seen)
                at = min(stop, k_start)
            if at < min(stop, k_stop):
                last = min(stop, k_stop)
                yield Tile(at + to_row, last + to_row, base, k_offset + last - k_start, right=0)
                at = last
            if at >= stop:
                break
            seen = k_offset + k_stop - k_start
        if at < stop:
            yield Tile(at + to_row, stop + to_row, base, seen)


def _joined(tiles: Iterable[Tile]) -> Iterator[Tile]:
    """Neighbouring tiles as one where one mask says the same: equal keys, or one causal diagonal."""
    held: Tile | None = None
    for tile in tiles:
        if held is not None and _continues(held, tile):
            tile = tile._replace(q_start=held.q_start)
        elif held is not None:
            yield held
        held = tile
    if held is not None:
        yield held


def _continues(first: Tile, then: Tile) -> bool:
    if first.q_stop != then.q_start or first.k_start != then.k_start or first.right != then.right:
        return False
    return then.k_stop - first.k_stop == (0 if then.right is None else then.queries)


def _band(q: Segment, k: Segment, window: int) -> Tile | None:
    """What q sees of k where position p sees p − window + 1 … p; None where it sees nothing."""
    first, last = max(q.start, k.start), min(q.stop, k.stop + window - 1)
    k_first, k_last = max(k.start, first - window + 1), min(k.stop, last)
    if first >= last or k_first >= k_last:
        return None
    ahead = last - k_last  # rows by which the last query is ahead of the last key
    return Tile(
        first - q.start + q.offset,
        last - q.start + q.offset,
        k_first - k.start + k.offset,
        k_last - k.start + k.offset,
        left=window - 1 - ahead,
        right=ahead,
    )


def _rows(ranges: list[tuple[int, int]]) -> slice | Rows:
    starts, stops = np.asarray(ranges, dtype=np.int64).T
    if (starts[1:] == stops[:-1]).all():
        return slice(int(starts[0]), int(stops[-1]))
    sizes = stops - starts
    before = np.cumsum(sizes) - sizes
    return np.arange(int(sizes.sum())) + np.repeat(starts - before, sizes)
