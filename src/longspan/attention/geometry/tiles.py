"""Tiles: rectangles of consecutive query rows and consecutive key rows with a mask that a kernel knows.

The mask is all, causal, or a band. Which tiles cover a block is decided in `tiles_between.py`. This module moves no
tensors (`call.py`), and knows neither heads nor kernels.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.layout.segments import expand

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


class Tiling:
    """Tiles for one kernel launch: all with the mask `left`, `right`, no query row and no key row in two of them.

    `bounds` (tiles, 4) holds the q_start, q_stop, k_start and k_stop of each; `tiles` are the same, one by one.
    """

    def __init__(self, bounds: Rows, left: int | None, right: int | None) -> None:
        self.bounds, self.left, self.right = bounds, left, right

    @staticmethod
    def of(tiles: Iterable[Tile]) -> "Tiling":
        """These tiles, which have one mask."""
        tile_list = tuple(tiles)
        return Tiling(
            np.asarray([tile[:4] for tile in tile_list], dtype=np.int64), tile_list[0].left, tile_list[0].right
        )

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles one by one."""
        return tuple(Tile(a, b, c, d, self.left, self.right) for a, b, c, d in self.bounds.tolist())

    def q_rows(self) -> slice | Rows:
        """The query rows of all tiles in order; a slice where they follow each other."""
        return _rows(self.bounds[:, 0], self.bounds[:, 1])

    def k_rows(self) -> slice | Rows:
        """The key rows of all tiles in order; a slice where they follow each other."""
        return _rows(self.bounds[:, 2], self.bounds[:, 3])

    def packed(self) -> "Tiling":
        """The same tiles over `x[q_rows()]` and `x[k_rows()]`, where each tile begins at the end of the one before."""
        sizes = self.bounds[:, 1::2] - self.bounds[:, ::2]  # (tiles, 2)
        stops = np.cumsum(sizes, axis=0)
        bounds = np.stack([stops - sizes, stops], axis=2).reshape(-1, 4)
        return Tiling(bounds, self.left, self.right)

    def blocks(self, rows: int, *, of_keys: bool) -> npt.NDArray[np.int32]:
        """Every tile cut into blocks of `rows` query rows, or of keys: the tile and the block's first row in it (n, 2).

        Those that meet the most keys (or rows) come first.
        """
        sizes = self.bounds[:, 1::2] - self.bounds[:, ::2]
        own, other = sizes[:, int(of_keys)], sizes[:, int(not of_keys)]
        counts = -(-own // rows)
        tile = np.repeat(np.arange(len(self)), counts)
        start = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * rows
        before, after = (self.right, self.left) if of_keys else (self.left, self.right)
        aligned = start + (other - own)[tile]  # the row or key of the other side that its first one is aligned to
        low = 0 if before is None else np.maximum(aligned - before, 0)
        high = other[tile] if after is None else np.minimum(aligned + rows + after, other[tile])
        order = np.argsort(low - high, kind="stable")
        return np.stack([tile, start], axis=1)[order].astype(np.int32)

    def __len__(self) -> int:
        return len(self.bounds)

    def __repr__(self) -> str:
        return f"Tiling({', '.join(map(str, self.tiles[:6]))}{', …' if len(self) > 6 else ''})"


def _rows(starts: Rows, stops: Rows) -> slice | Rows:
    if (starts[1:] == stops[:-1]).all():
        return slice(int(starts[0]), int(stops[-1]))
    return expand(starts, stops)
