"""The positions of local rows where documents bring their own, in several parts (M-RoPE), on the host.

A document's positions are asked for once a micro-batch and for the whole document: where an image stands says what the
positions after it are. Attention and masks go by the shard's own positions, whatever these are.
"""

from typing import Any

import numpy as np

from longspan.comm import SequenceShard
from longspan.errors import DataError
from longspan.layout.segments import Integers
from longspan.model.seams.attention_calls import PARTS_OF_POSITIONS
from longspan.train.reading.read_rows import documents_and_positions


def positions_of_rows(documents: Any, shard: SequenceShard) -> Integers | None:
    """The positions (n, T) of a shard's local rows; None where no document of the micro-batch has any of its own.

    `documents.positions(d)` gives (n, tokens of d), or None where positions are plain: then all parts of them are the
    place in the document, as in padding.
    Raises DataError for positions of another shape.
    """
    ask = getattr(documents, "positions", None)
    if ask is None:
        return None
    lengths = {d: n for group in shard.micro_batch.groups for d, n in zip(group.documents, group.lengths, strict=True)}
    of_document, rows = documents_and_positions(shard)
    made = {d: _checked(ask(d), d, lengths[d]) for d in np.unique(of_document).tolist() if d >= 0}
    parts = {len(positions) for positions in made.values() if positions is not None}
    if not parts:
        return None
    if len(parts) > 1:
        raise DataError(f"documents have positions in {sorted(parts)} parts; give all of them as many")
    positions = np.tile(rows, (parts.pop(), 1))
    for document, given in made.items():
        if given is not None:
            here = np.flatnonzero((of_document == document) & (rows < lengths[document]))  # padded ones end before
            positions[:, here] = given[:, rows[here]]
    return positions


def _checked(positions: Any, document: int, length: int) -> Integers | None:
    if positions is None:
        return None
    positions = np.asarray(positions)
    fits = positions.ndim == 2 and len(positions) in PARTS_OF_POSITIONS and positions.shape[1] == length
    if not fits or positions.dtype.kind not in "iu":
        raise DataError(
            f"document {document} gave positions of {positions.dtype} and shape {positions.shape}; give integers of "
            f"shape (3, {length}), one column for each of its {length} tokens"
        )
    return positions.astype(np.int64, copy=False)
