"""Tiles of what rows of spans see beyond the causal mask: the later rows of their span, as an image's tokens do.

These keys are disjoint from those of the causal mask, of a window too, which hides earlier keys alone. So both parts
are merged as blocks are, and every kernel that takes a window computes them: row i of a whole span sees key i + 1 and
those after it, a mask with a limit on the left.
"""

import numpy as np

from longspan.attention.geometry.tiles import Tiling
from longspan.attention.geometry.tiles_between import TileArrays, launches_of, pairs_of_runs, split_at_left
from longspan.layout.segments import Segments
from longspan.layout.spans import Spans


def span_tiles(q: Segments, k: Segments, spans: Spans) -> tuple[Tiling, ...]:
    """The tilings that cover what rows of `q` see of the later rows of their spans among the rows of `k`.

    Whole spans on both sides, however many, are one tiling; the runs of a span that a member holds a part of add few.
    """
    if not len(spans):
        return ()
    tiles = _later(spans.among(q), spans.among(k))
    return min((launches_of(arrays) for arrays in (tiles, split_at_left(tiles))), key=len)


def _later(q: Segments, k: Segments) -> TileArrays:
    """Rows of runs of q against the keys of runs of k that come after them; documents are spans."""
    mine, theirs, _ = pairs_of_runs(q, k)
    start, k_stop = q.start[mine], k.stop[theirs]
    stop, k_start = np.minimum(q.stop[mine], k_stop - 1), np.maximum(k.start[theirs], start + 1)
    to_row, to_key = q.offset[mine] - start, k.offset[theirs] - k.start[theirs]
    left = k_stop - 1 - stop  # the last row, at position stop − 1, sees keys from position stop on
    hides = left < k_stop - k_start - 1
    tiles = TileArrays(
        q.document[mine],
        start + to_row,
        stop + to_row,
        k_start + to_key,
        k_stop + to_key,
        left=np.where(hides, left, -1),
        right=np.full_like(left, -1),
    )
    return tiles.where((start < stop) & (k_start < k_stop))
