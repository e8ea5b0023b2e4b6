"""Which rows the slots of a micro-batch hold: packed rows, positions and boundaries, in integers on the host."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from longspan.comm.shard_part import ShardPart
from longspan.layout.segments import Rows, expand
from longspan.plan import MicroBatch


def lay_out(micro_batch: MicroBatch, parts: Sequence[ShardPart]) -> tuple[Rows, Rows, Rows, npt.NDArray[np.int32]]:
    """Packed rows and positions of the local rows; document and boundaries of the local segments."""
    bases = np.cumsum([0, *(group.tokens for group in micro_batch.groups)])
    rows, positions = _joined([_part_rows(part, int(bases[part.index])) for part in parts])
    documents, sizes = _joined([_segment_sizes(part) for part in parts])
    return rows, positions, documents, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def _part_rows(part: ShardPart, base: int) -> tuple[Rows, Rows]:
    """(packed row, position) of each local row of a part whose group begins at packed row `base`."""
    segments = part.segments()
    sizes = segments.stop - segments.start
    positions = np.arange(int(sizes.sum())) + np.repeat(segments.start - segments.offset, sizes)
    lengths = np.asarray(part.group.lengths, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    document = np.repeat(segments.document, sizes)
    real = (positions < lengths[document]) & (part.index >= 0)
    return np.where(real, base + starts[document] + positions, -1), positions


def _segment_sizes(part: ShardPart) -> tuple[Rows, Rows]:
    """Document ids that this part has rows of, and how many."""
    segments = part.segments()
    per_document = np.bincount(
        segments.document, weights=segments.stop - segments.start, minlength=len(part.group.documents)
    ).astype(np.int64)
    present = np.flatnonzero(per_document)
    return np.asarray(part.group.documents, dtype=np.int64)[present], per_document[present]


def _joined(pairs: Sequence[tuple[Rows, Rows]]) -> tuple[Rows, Rows]:
    none = np.zeros(0, dtype=np.int64)
    return np.concatenate([none, *(one for one, _ in pairs)]), np.concatenate([none, *(other for _, other in pairs)])


def counts_of_slots(micro_batch: MicroBatch, slots: int) -> list[int]:
    """Rows that each slot holds."""
    counts = [0] * slots
    for group in micro_batch.groups:
        for slot, rows in zip(group.slots, group.shares.counts, strict=True):
            counts[slot] += rows
    return counts


def packed_order(micro_batch: MicroBatch, starts: Sequence[int]) -> Rows:
    """Where each packed row (S,) is among the rows of all slots, of which those of slot s begin at `starts[s]`."""
    sources, next_row, base = np.empty(micro_batch.tokens, dtype=np.int64), list(starts), 0
    for group in micro_batch.groups:
        lengths, counts = np.asarray(group.lengths, dtype=np.int64), group.shares.counts
        first_rows = base + np.cumsum(lengths) - lengths
        for member, slot in enumerate(group.slots):
            segments = group.shares.segments(member)
            real = lengths[segments.document] - segments.start  # up to the document's end; padding follows
            sizes = np.clip(real, 0, segments.stop - segments.start)
            begin, local = first_rows[segments.document] + segments.start, next_row[slot] + segments.offset
            sources[expand(begin, begin + sizes)] = expand(local, local + sizes)
            next_row[slot] += counts[member]
        base += group.tokens
    return sources
