"""The document and the position of each local row, and positions that documents bring themselves, in several parts."""

from collections.abc import Callable
from typing import Any

import numpy as np

from longspan.comm import SequenceShard
from longspan.errors import DataError
from longspan.layout import Integers
from longspan.model.seams.model_calls import PARTS_OF_POSITIONS
from longspan.plan import MicroBatch


def read_own_positions(positions_of: Callable[[int], Any], shard: SequenceShard) -> Integers | None:
    """Return the positions (n, T) of a shard's local rows; None if no document has positions of its own.

    `positions_of(d)` gives the positions (n, tokens) of a whole document d, or None if they are plain: then each of the
    n parts counts its tokens. Raises DataError for positions of another shape.
    """
    lengths = {
        d: n for group in shard.micro_batch.groups for d, n in zip(group.documents, group.lengths, strict=True)
    }
    document_of_row, position_of_row = documents_and_positions(shard)
    by_document = {
        d: _checked_positions(positions_of(d), d, lengths[d]) for d in np.unique(document_of_row).tolist() if d >= 0
    }
    parts = {len(positions) for positions in by_document.values() if positions is not None}
    if not parts:
        return None
    if len(parts) > 1:
        raise DataError(f"documents have positions in {sorted(parts)} parts; give all of them as many")
    positions = np.tile(position_of_row, (parts.pop(), 1))
    for document, parts_of_one in by_document.items():
        if parts_of_one is not None:
            is_token = position_of_row < lengths[document]  # rows after these pad the document
            rows = np.flatnonzero((document_of_row == document) & is_token)
            positions[:, rows] = parts_of_one[:, position_of_row[rows]]
    return positions


def _checked_positions(positions: Any, document: int, length: int) -> Integers | None:
    """Return the positions (n, length) of a document as int64, None for plain ones. Raises DataError for another shape
    or type.
    """
    if positions is None:
        return None
    positions = np.asarray(positions)
    is_valid = positions.ndim == 2 and len(positions) in PARTS_OF_POSITIONS and positions.shape[1] == length
    if not is_valid or positions.dtype.kind not in "iu":
        raise DataError(
            f"document {document} gave positions of {positions.dtype} and shape {positions.shape}; give integers of "
            f"shape (3, {length}), one column for each of its {length} tokens"
        )
    return positions.astype(np.int64, copy=False)


def documents_and_positions(shard: SequenceShard) -> tuple[Integers, Integers]:
    """Return the document and the position of each local row (T,), on the host; the document of padding is −1."""
    documents: list[Integers] = []
    positions: list[Integers] = []
    for shard_part in shard.parts:
        segments = shard_part.segments()
        sizes = segments.stop - segments.start
        documents.append(
            np.asarray(shard_part.group.documents, dtype=np.int64)[np.repeat(segments.document, sizes)]
        )
        # Row `offset` of the part is position `start` of the segment's document.
        positions.append(np.arange(int(sizes.sum())) + np.repeat(segments.start - segments.offset, sizes))
    return np.concatenate(documents), np.concatenate(positions)


def shared_rows_before(micro_batch: MicroBatch, documents: Integers) -> Integers | int:
    """Return, for rows of these documents (n,), the rows before each document's own: those of the prefixes it
    continues.

    0, one number for all, where no group of the micro-batch has prefixes.
    """
    if all(group.parents is None for group in micro_batch.groups):
        return 0
    bases = {d: base for group in micro_batch.groups for d, base in zip(group.documents, group.bases, strict=True)}
    return np.array([bases[document] for document in documents.tolist()], dtype=np.int64)
