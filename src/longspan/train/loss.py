"""The loss of local rows as a sum over targets: labels made inside documents, before the sequence is split.

The label of position p of a document is its token p + 1; a document's last position and padding have none. Dividing by
the plan's number of targets, and summing over slots, is the step's business (`step.py`).
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.comm import SequenceShard
from longspan.errors import DataError

Rows = npt.NDArray[np.int64]

NO_TARGET = -100


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the cross entropy over the rows that have a label: logits (T, V), labels (T,) to a float64 scalar.

    The softmax is in float32 (float64 for float64 logits); rows labelled −100 add nothing and get a zero gradient.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    each = F.cross_entropy(wide, labels, ignore_index=NO_TARGET, reduction="none")  # (T,)
    return each.sum(dtype=torch.float64)


def read_inputs_and_labels(documents: Any, shard: SequenceShard, vocabulary: int | None = None) -> tuple[Rows, Rows]:
    """Token ids (T,) and labels (T,) of a shard's local rows; padding rows hold id 0 and label −100.

    `documents[d]` is asked for the positions that this rank holds, and for the next one where a label needs it.
    Raises DataError, naming document and position, for what is not a token id of the vocabulary.
    """
    ids = np.zeros(shard.local_rows, dtype=np.int64)
    labels = np.full(shard.local_rows, NO_TARGET, dtype=np.int64)
    for part in shard.parts:
        if part.index < 0:
            continue
        for document, start, stop, offset in part.segments():
            length = part.group.lengths[document]
            stop = min(stop, length)  # a document laid out longer than it is ends in padding
            if stop <= start:
                continue
            tokens = read_tokens(documents, part.group.documents[document], start, min(stop + 1, length), vocabulary)
            first = part.start + offset
            ids[first : first + stop - start] = tokens[: stop - start]
            labels[first : first + len(tokens) - 1] = tokens[1:]
    return ids, labels


def read_tokens(documents: Any, document: int, start: int, stop: int, vocabulary: int | None = None) -> Rows:
    """Positions start to stop of one document, as int64. Raises DataError for what cannot be token ids."""
    positions = np.arange(start, stop)
    found = documents[document]
    found = np.asarray(found) if isinstance(found, list | tuple) else found
    tokens = np.asarray(found[torch.from_numpy(positions) if isinstance(found, Tensor) else positions])
    if tokens.shape != positions.shape or tokens.dtype.kind not in "iu":
        raise DataError(
            f"document {document} gave {tokens.dtype} of shape {tokens.shape} for {len(positions)} positions; "
            "a document, indexed by an array of positions, gives as many integer token ids"
        )
    outside = (tokens < 0) | (tokens >= (np.iinfo(np.int64).max if vocabulary is None else vocabulary))
    if outside.any():
        at = int(outside.argmax())
        raise DataError(
            f"document {document} holds token id {tokens[at]} at position {start + at}, the model's vocabulary is "
            f"0 to {'…' if vocabulary is None else vocabulary - 1}; use the tokenizer that belongs to the model"
        )
    return tokens.astype(np.int64)
