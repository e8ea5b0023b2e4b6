"""Which tiles cover what the rows of one member see, under a mask, of the rows of another; decided in integers.

Both sides are `Segments`: runs of rows of documents, as a tensor holds them. Each pair of a row and a key that it sees
is in one tile of one tiling. What a tile and a tiling are is in `tiles.py`.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from longspan.attention.tiles import Tiling
from longspan.layout.segments import Flags, Integers, Segments, Spans, expand_runs

SpanMask = Literal["none", "later", "whole"]


class Mask(NamedTuple):
    """What a query sees of its document: all keys, those up to its own position, or of those the last `window`.

    With `chunk` c it sees those of its own chunk: a query at position p those from p − p mod c on. Under a causal mask
    it sees of its span, if it has one, the later rows besides, or with "whole" all rows, those before its window too.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    spans: SpanMask = "later"

    def for_lengths(self, lengths: Sequence[int]) -> "Mask":
        """Drop a window or chunk that hides no key of documents of these lengths."""
        longest = max(lengths, default=0)
        window, chunk = (None if x is None or x >= longest else x for x in (self.window, self.chunk))
        spans = "later" if self.spans == "whole" and window is None else self.spans
        return Mask(self.causal, window, chunk, spans)


class TileArrays(NamedTuple):
    """Tiles of many documents, as arrays of equal length: the fields of `Tile`, with −1 for a limit that is none."""

    document: Integers
    q_start: Integers
    q_stop: Integers
    k_start: Integers
    k_stop: Integers
    left: Integers
    right: Integers

    def select(self, chosen: Flags) -> "TileArrays":
        return TileArrays(*(column[chosen] for column in self))


def tilings_between(
    q: Segments, k: Segments, *, causal: bool, window: int | None = None, chunk: int | None = None
) -> tuple[Tiling, ...]:
    """Return the tilings that cover what the rows of `q` see of the rows of `k`.

    Rows see rows of their own document only: all of them, or with `causal` those at positions up to their own, or with
    `window` w at most the last w of those. With `chunk` c every c positions are a document of their own.

    Two members of a zigzag or contiguous partition give at most one tiling, with at most one tile a document, as long
    as there is no window and no chunk ends inside a run; with a window, their number depends on the partition and not
    on how many documents there are.
    """
    # With `chunk`, each chunk is a document from here on.
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
    """Return the tilings that cover what rows of `q` see of one ancestor of their documents, among the rows of `k`.

    `prefix[d]` is document d's ancestor in one generation (−1: none), and `bases[d]` how many rows all its ancestors
    have. A document with an ancestor is a branch of it. Without a window a branch sees all of its prefix: the rows of
    branches that follow each other are one tile. Under a window each branch sees rows at the prefix's end through a
    band of its own: these keys are repeated for each branch, so that one launch has all bands of one form.
    """
    continues = prefix[q.document] >= 0
    branch_rows = Segments(*(column[continues] for column in (q.document, q.start, q.stop, q.offset)))
    branches = np.unique(branch_rows.document)
    branch_index, run, _ = pair_runs(prefix[branches], k.document)
    document = branches[branch_index]
    # Rows and keys of one document, as the functions of tiles take them: a key is of the branch that sees it, and
    # positions count from the first row of all ancestors.
    base = bases[branch_rows.document]
    base_of_keys = bases[prefix[document]]
    queries = Segments(branch_rows.document, branch_rows.start + base, branch_rows.stop + base, branch_rows.offset)
    keys = Segments(document, k.start[run] + base_of_keys, k.stop[run] + base_of_keys, k.offset[run])
    if window is not None:
        return _window_tilings(queries, keys, window, repeats_keys=True)
    tiles = _join_neighbours(_prefix_tiles(queries, keys))
    # Branches of one prefix have its keys in common, which may be in one tile of a launch only: as tiles of one
    # document, these go into different tilings.
    return make_tilings(tiles._replace(document=prefix[tiles.document]))


def _chunk_segments(segments: Segments, chunk: int, longest: int) -> Segments:
    """A document gets as many numbers of chunks as `longest` positions have: q and k have the same ones if both are cut
    with one `longest`."""
    first_chunk = segments.start // chunk
    end_chunk = -(-segments.stop // chunk)
    number = expand_runs(first_chunk, end_chunk)
    run = np.repeat(np.arange(len(segments)), end_chunk - first_chunk)
    start = np.maximum(segments.start[run], number * chunk)
    stop = np.minimum(segments.stop[run], (number + 1) * chunk)
    document = segments.document[run] * -(-longest // chunk) + number
    return Segments(document, start, stop, segments.offset[run] + start - segments.start[run])


def make_tilings(tiles: TileArrays, *, repeats_keys: bool = False, stride: int = 1) -> tuple[Tiling, ...]:
    """Make tilings of these tiles: the tiles of one tiling have the same mask, and each document has one at most.

    The i-th tile of a document with some mask goes into that mask's i-th tiling. Tilings come in the order of their
    first tiles; `repeats_keys` is passed on to them, and `stride` to those with a limit.
    """
    if not len(tiles.document):
        return ()
    order = np.lexsort((tiles.document, tiles.right, tiles.left))
    same_mask = (np.diff(tiles.left[order]) == 0) & (np.diff(tiles.right[order]) == 0)
    # A tile is the first of its document and mask where either changes.
    is_first = np.append(True, ~(same_mask & (np.diff(tiles.document[order]) == 0)))
    index = np.arange(len(order))
    turn = np.empty_like(index)  # the number of each tile among those of its document and mask
    turn[order] = index - np.maximum.accumulate(np.where(is_first, index, 0))
    mask = np.empty_like(index)  # the number of its mask
    mask[order] = np.cumsum(np.append(0, ~same_mask))
    launch = mask * (int(turn.max()) + 1) + turn
    _, first_tiles = np.unique(launch, return_index=True)
    tilings = list[Tiling]()
    for i in np.sort(first_tiles):
        launch_tiles = tiles.select(launch == launch[i])
        bounds = np.stack(launch_tiles[1:5], axis=1)
        # a limit that hides no key of any tile is left out
        hides_left, hides_right = _find_hiding_limits(launch_tiles)
        left = int(launch_tiles.left[0]) if hides_left.any() else None
        right = int(launch_tiles.right[0]) if hides_right.any() else None
        limited_stride = 1 if right is None else stride
        tilings.append(Tiling(bounds, left, right, repeats_keys=repeats_keys, stride=limited_stride))
    return tuple(tilings)


def _find_hiding_limits(tiles: TileArrays) -> tuple[Flags, Flags]:
    left = (tiles.left >= 0) & (tiles.left < tiles.k_stop - tiles.k_start - 1)
    right = (tiles.right >= 0) & (tiles.right < tiles.q_stop - tiles.q_start - 1)
    return left, right


def pair_runs(q_document: Integers, k_document: Integers) -> tuple[Integers, Integers, Integers]:
    """Pair every run of q with every run of k of the same document; the arguments are the runs' documents.

    Returns three arrays, one entry a pair: the run of q, the run of k, and the first run of k of that document. Runs of
    k of one document follow each other.
    """
    documents, first_runs, runs = np.unique(k_document, return_index=True, return_counts=True)
    # Of a document after the last one of k, the search gives an index past the end.
    document_index = np.minimum(np.searchsorted(documents, q_document), max(len(documents) - 1, 0))
    is_in_k = documents[document_index] == q_document if len(documents) else np.zeros(len(q_document), dtype=bool)
    q_run = np.flatnonzero(is_in_k)
    starts = first_runs[document_index[q_run]]
    count = runs[document_index[q_run]]
    return np.repeat(q_run, count), expand_runs(starts, starts + count), np.repeat(starts, count)


def _document_extents(segments: Segments) -> tuple[Integers, Integers, Integers]:
    """A document's runs follow each other in the tensor."""
    first_runs = np.flatnonzero(np.diff(segments.document, prepend=-1))
    last_runs = np.append(first_runs, len(segments))[1:] - 1
    stops = segments.offset + segments.stop - segments.start
    return segments.document[first_runs], segments.offset[first_runs], stops[last_runs]


def _whole_tiles(q: Segments, k: Segments) -> TileArrays:
    """What is not causal: every row sees every key of its document."""
    document, q_start, q_stop = _document_extents(q)
    k_document, k_start, k_stop = _document_extents(k)
    document, q_index, k_index = np.intersect1d(document, k_document, assume_unique=True, return_indices=True)
    no_limit = np.full_like(document, -1)
    return TileArrays(
        document, q_start[q_index], q_stop[q_index], k_start[k_index], k_stop[k_index], no_limit, no_limit
    )


def _prefix_tiles(q: Segments, k: Segments) -> TileArrays:
    """For each pair of a run of q and a run of k there are two tiles, with the keys from the document's first run of k
    on: the rows at the positions of this run of k, which see one key more with every row, and the rows after it up to
    the next run of k, which see all of it."""
    q_run, k_run, first_k_run = pair_runs(q.document, k.document)
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
        # The first of the two tiles of a pair ends on the causal diagonal.
        np.array([0, -1]),
    )
    tiles = TileArrays(*(np.broadcast_to(column, first_position.shape).reshape(-1) for column in columns))
    return tiles.select(tiles.q_start < tiles.q_stop)


def _join_neighbours(tiles: TileArrays) -> TileArrays:
    """One mask covers equal keys, or one causal diagonal, on which the second tile has as many more keys as it has
    rows."""
    added_keys = np.where(tiles.right[1:] < 0, 0, tiles.q_stop[1:] - tiles.q_start[1:])
    continues = (tiles.q_stop[:-1] == tiles.q_start[1:]) & (tiles.k_start[:-1] == tiles.k_start[1:])
    continues &= (tiles.right[:-1] == tiles.right[1:]) & (np.diff(tiles.k_stop) == added_keys)
    is_first = np.ones(len(tiles.document), dtype=bool)
    is_last = np.ones(len(tiles.document), dtype=bool)
    is_first[1:] = ~continues
    is_last[:-1] = ~continues
    return tiles.select(is_last)._replace(q_start=tiles.q_start[is_first])


def _band_tiles(q: Segments, k: Segments, window: int) -> TileArrays:
    """Position p sees p − window + 1 … p. A tile's last row is aligned to its last key, whose position may be
    `after_key` positions before the row's. So every row sees `after_key` keys to the right of the key that it is
    aligned to, and window − 1 − `after_key` to the left: ≥ 0, because a row more than window − 1 positions after the
    last key sees none."""
    q_run, k_run, _ = pair_runs(q.document, k.document)
    q_start, q_stop = q.start[q_run], q.stop[q_run]
    k_start, k_stop = k.start[k_run], k.stop[k_run]
    first_position = np.maximum(q_start, k_start)
    end_position = np.minimum(q_stop, k_stop + window - 1)
    k_first = np.maximum(k_start, first_position - window + 1)
    k_last = np.minimum(k_stop, end_position)
    to_row, to_key = q.offset[q_run] - q_start, k.offset[k_run] - k_start
    # The last row's position is this far after the last key's: 0 … window − 1.
    after_key = end_position - k_last
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
    """Tiles whose last row and last key are at one position keep such limits, so that all of these have one mask."""
    hides_left, hides_right = _find_hiding_limits(tiles)
    is_after_keys = tiles.right > 0
    return tiles._replace(
        left=np.where(is_after_keys & ~hides_left, -1, tiles.left),
        right=np.where(is_after_keys & ~hides_right, -1, tiles.right),
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


def span_tiles(q: Segments, k: Segments, spans: Spans, before: int | None = None) -> tuple[Tiling, ...]:
    """Return the tilings that cover what rows of `q` see of the later rows of their spans among the rows of `k`.

    With `before` b they see those rows of their spans too that lie b positions or more before them.

    Rows of a run have a limit on the left only: the last one sees keys from the next position on, each row before it
    one key more. Whole spans on both sides, however many, are one tiling; a span that is cut between members adds a
    few. Splitting left limits gives fewer masks for some spans and more for others: the fewest tilings are taken.
    """
    if not len(spans):
        return ()
    # The `document` of these rows is a span, as that of the keys.
    queries = spans.find_rows(q)
    keys = spans.find_rows(k)
    q_run, k_run, _ = pair_runs(queries.document, keys.document)
    start = queries.start[q_run]
    k_stop = keys.stop[k_run]
    stop = np.minimum(queries.stop[q_run], k_stop - 1)
    k_start = np.maximum(keys.start[k_run], start + 1)
    to_row = queries.offset[q_run] - start
    to_key = keys.offset[k_run] - keys.start[k_run]
    left = k_stop - 1 - stop  # the last row, at position stop − 1, sees keys from position stop on
    hides = left < k_stop - k_start - 1
    tiles = TileArrays(
        queries.document[q_run],
        start + to_row,
        stop + to_row,
        k_start + to_key,
        k_stop + to_key,
        left=np.where(hides, left, -1),
        right=np.full_like(left, -1),
    )
    tiles = tiles.select((start < stop) & (k_start < k_stop))
    later = min((make_tilings(arrays) for arrays in (tiles, split_left_limits(tiles))), key=len)
    if before is None:
        return later
    start = np.maximum(queries.start[q_run], keys.start[k_run] + before)
    stop = queries.stop[q_run]
    k_start = keys.start[k_run]
    k_stop = np.minimum(keys.stop[k_run], stop - before)
    right = stop - before - k_stop  # the last row, at position stop − 1, sees keys up to position stop − 1 − before
    hides = right < stop - start - 1
    tiles = TileArrays(
        queries.document[q_run],
        start + queries.offset[q_run] - queries.start[q_run],
        stop + queries.offset[q_run] - queries.start[q_run],
        k_start + to_key,
        k_stop + to_key,
        left=np.full_like(right, -1),
        right=np.where(hides, right, -1),
    )
    return later + make_tilings(tiles.select((start < stop) & (k_start < k_stop)))


def entry_tilings(q: Segments, counts: Integers, stride: int, *, chosen: bool) -> tuple[Tiling, ...]:
    """Return the tilings that cover what the rows of `q` see of entries, which lie document after document.

    `counts` (documents,) are how many entries each has; a row at position p sees those of windows of `stride` rows that
    end by p. A run's rows up to the end of its last window see one key more every `stride` rows, those after it all
    that have ended. `chosen`: rows choose among the entries that they see, so that tiles hide none.
    """
    first_keys = (np.cumsum(counts) - counts)[q.document]
    seen = np.minimum(q.stop // stride, counts[q.document])
    start = np.minimum(np.maximum(q.start, stride - 1), q.stop)
    end = np.clip(seen * stride, start, q.stop)
    no_limit = np.full_like(start, -1)
    limit = no_limit if chosen else np.zeros_like(start)
    to_row = q.offset - q.start
    keys = (first_keys, first_keys + seen, no_limit)
    body = TileArrays(q.document, start + to_row, end + to_row, *keys, limit)
    tail = TileArrays(q.document, end + to_row, q.stop + to_row, *keys, no_limit)
    if chosen:
        body = body._replace(q_stop=tail.q_stop)
        tail = tail._replace(q_start=tail.q_stop)
    tiles = TileArrays(*(np.concatenate(columns) for columns in zip(body, tail, strict=True)))
    return make_tilings(
        tiles.select((tiles.q_start < tiles.q_stop) & (tiles.k_start < tiles.k_stop)), stride=stride
    )
