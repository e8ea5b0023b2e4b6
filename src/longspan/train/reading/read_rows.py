"""The rows of a shard, read from documents: token ids, labels, and the numbers that documents bring for a loss.

The label of position p of a document is what its token p + 1 is to be; a document's last position and padding have
none. So labels are made inside documents, before the sequence is split.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.comm import SequenceShard
from longspan.data.document import NO_TARGET, Labelled, Valued
from longspan.errors import DataError
from longspan.layout import Integers

if TYPE_CHECKING:
    from longspan.plan.items import ItemTable

WEIGHTS = "weights"  # the values that multiply losses; 1 in documents that give none


class LocalBatch(NamedTuple):
    """One micro-batch as this rank runs it: its shard, its token ids (T,) and its labels (T,), on the host.

    `values` (T,) by name are the numbers that documents bring for the tokens that are predicted (`document.py`), if any
    document on this rank has some. `deeper` are the same rows for each depth of multi-token prediction: at depth d, row
    t holds the id of token t + d and the label and values of token t + d + 1. `positions` (n, T) are those that
    documents bring in several parts (`local_batch.py`), None if they are the shard's.
    """

    shard: SequenceShard
    ids: Integers
    labels: Integers
    values: Mapping[str, npt.NDArray[np.float64]] = {}
    deeper: tuple["LocalBatch", ...] = ()
    positions: Integers | None = None


def read_inputs_and_labels(
    documents: Any, shard: SequenceShard, vocabulary: int | None = None, items: "ItemTable | None" = None
) -> tuple[Integers, Integers]:
    """Read token ids (T,) and labels (T,) of a shard's local rows; padding rows hold id 0 and label −100.

    `documents[d]` is indexed by the positions that this rank holds, and by the next one where a label needs it.
    In the places of `items` ids are 0 and labels −100, whatever the document holds there.
    Raises DataError, naming document and position, for what is not a token id of the vocabulary.
    """
    batch = read_rows(documents, shard, vocabulary, items)
    return batch.ids, batch.labels


class NamesOfValues:
    """The names of the values of the first document that is read, which all others of a step must have as well."""

    def __init__(self) -> None:
        self._first_names: tuple[int, set[str]] | None = None

    def check_names(self, document: int, values: Mapping[str, Any]) -> None:
        """Raise DataError where another document's values have other names; weights may be left out."""
        names = set(values) - {WEIGHTS}
        first, first_names = self._first_names = self._first_names or (document, names)
        for name in sorted(names ^ first_names):
            having, lacking = (document, first) if name in names else (first, document)
            raise DataError(
                f"document {having} has {name!r} and document {lacking} has not; give the documents of a step the same "
                "values, 0 where they do not matter"
            )


def read_rows(
    documents: Any,
    shard: SequenceShard,
    vocabulary: int | None = None,
    items: "ItemTable | None" = None,
    names: NamesOfValues | None = None,
    depths: int = 0,
) -> LocalBatch:
    """Read all that a rank needs of its rows of one micro-batch: token ids, labels, and the values of documents.

    The micro-batches of a step share `names`, so that values are compared by name over all documents of the step.
    `depths` of multi-token prediction read as many tokens further ahead.
    """
    reader = _Reader(documents, shard.local_rows, vocabulary, items, names or NamesOfValues(), depths)
    for shard_part in shard.parts:
        if shard_part.index < 0:  # padding
            continue
        for local, start, stop, offset in shard_part.segments():
            length = shard_part.group.lengths[local]
            stop = min(stop, length)  # a document laid out longer than it is ends in padding
            if stop > start:
                document, row = shard_part.group.documents[local], shard_part.start + offset
                reader.read_run(document, start, stop, row, length=length)
    return reader.batch(shard)


def target_rows(batch: LocalBatch) -> Integers:
    """Return the local rows (n,) that predict a token."""
    return np.flatnonzero(batch.labels != NO_TARGET)


def documents_and_positions(shard: SequenceShard) -> tuple[Integers, Integers]:
    """Return the document and the position of each local row (T,), on the host; the document of padding is −1."""
    documents: list[Integers] = []
    positions: list[Integers] = []
    for shard_part in shard.parts:
        segments = shard_part.segments()
        sizes = segments.stop - segments.start
        documents.append(np.asarray(shard_part.group.documents, dtype=np.int64)[np.repeat(segments.document, sizes)])
        # Row `offset` of the part is position `start` of the segment's document.
        positions.append(np.arange(int(sizes.sum())) + np.repeat(segments.start - segments.offset, sizes))
    return np.concatenate(documents), np.concatenate(positions)


class _Reader:
    """Reads runs of documents into arrays over local rows (T,)."""

    def __init__(
        self,
        documents: Any,
        rows: int,
        vocabulary: int | None,
        items: "ItemTable | None",
        names: NamesOfValues,
        depths: int,
    ) -> None:
        self._documents, self._vocabulary, self._items = documents, vocabulary, items
        self._names = names
        self._at_depth = [_Arrays(rows) for _ in range(depths + 1)]

    def batch(self, shard: SequenceShard) -> LocalBatch:
        first, *deeper = (LocalBatch(shard, rows.ids, rows.labels, rows.values) for rows in self._at_depth)
        return first._replace(deeper=tuple(deeper))

    def read_run(self, document: int, start: int, stop: int, row: int, *, length: int) -> None:
        """Tokens after `stop` are read too: one for the last label and one for each depth, as far as there are any."""
        end = min(stop + len(self._at_depth), length)  # no tokens follow a document's end
        # True at the placeholders of items, which are neither inputs nor targets.
        hidden = None if self._items is None else self._items.placeholder_mask(document, start, end)
        positions, value = np.arange(start, end), self._documents[document]
        tokens = self._read_tokens(value, document, positions, hidden)
        labels = self._read_labels(value, document, positions[1:], tokens[1:], hidden)
        values = self._read_values(value, document, positions[1:])
        for depth, rows in enumerate(self._at_depth):
            ahead = slice(depth, depth + stop - start)
            rows.fill_rows(
                row, tokens[ahead], labels[ahead], {name: numbers[ahead] for name, numbers in values.items()}
            )

    def _read_tokens(
        self, ids: Any, document: int, positions: Integers, hidden: npt.NDArray[np.bool_] | None
    ) -> Integers:
        ids = np.asarray(ids) if isinstance(ids, list | tuple) else ids
        tokens = np.asarray(ids[torch.from_numpy(positions) if isinstance(ids, Tensor) else positions])
        check_integers(document, tokens, positions, "a document, indexed by an array of positions, gives token ids")
        if hidden is not None:
            tokens = np.where(hidden, 0, tokens)
        self._check_vocabulary(document, tokens, positions, "token id")
        return tokens.astype(np.int64)

    def _read_labels(
        self, labelled: Any, document: int, positions: Integers, tokens: Integers, hidden: npt.NDArray[np.bool_] | None
    ) -> Integers:
        """`hidden` is True at placeholders of items, which have no label; it begins one position before `positions`."""
        labels = tokens
        if isinstance(labelled, Labelled):
            labels = np.asarray(labelled.labels(positions))
            check_integers(document, labels, positions, "its labels are token ids, or −100")
        if hidden is not None:
            labels = np.where(hidden[1:], NO_TARGET, labels.astype(np.int64))
        if labels is not tokens:  # tokens have been checked
            self._check_vocabulary(document, np.where(labels == NO_TARGET, 0, labels), positions, "the label")
        return labels

    def _read_values(self, valued: Any, document: int, positions: Integers) -> Mapping[str, npt.NDArray[np.float64]]:
        values = valued.token_values(positions) if isinstance(valued, Valued) else {}
        self._names.check_names(document, values)
        for name, numbers in values.items():
            if np.shape(numbers) != positions.shape:
                raise DataError(
                    f"document {document} gave {name!r} of shape {np.shape(numbers)} for {len(positions)} positions; "
                    "give a number for each"
                )
        return values

    def _check_vocabulary(self, document: int, ids: Integers, positions: Integers, noun: str) -> None:
        size = self._vocabulary
        outside = (ids < 0) | (ids >= (np.iinfo(np.int64).max if size is None else size))
        if outside.any():
            at = int(outside.argmax())
            raise DataError(
                f"document {document} holds {noun} {ids[at]} at position {positions[at]}, the model's vocabulary is "
                f"0 to {'…' if size is None else size - 1}; use the tokenizer that belongs to the model"
            )


class _Arrays:
    """The rows of one depth, while they are read."""

    def __init__(self, rows: int) -> None:
        self.ids = np.zeros(rows, dtype=np.int64)
        self.labels = np.full(rows, NO_TARGET, dtype=np.int64)
        self.values = dict[str, npt.NDArray[np.float64]]()

    def fill_rows(
        self, row: int, ids: Integers, labels: Integers, values: Mapping[str, npt.NDArray[np.float64]]
    ) -> None:
        """There is one label and one value less than ids where a document ends, as its last token predicts nothing.
        Rows to which no document gives a value have the weight 1, and 0 under other names.
        """
        self.ids[row : row + len(ids)] = ids
        predicted = slice(row, row + len(labels))
        self.labels[predicted] = labels
        for name, numbers in values.items():
            default = float(name == WEIGHTS)
            self.values.setdefault(name, np.full(len(self.ids), default))[predicted] = numbers


def check_integers(document: int, values: npt.NDArray[Any], positions: Integers, rule: str) -> None:
    """Raise DataError unless a document gave one integer for each position."""
    if values.shape != positions.shape or values.dtype.kind not in "iu":
        raise DataError(
            f"document {document} gave {values.dtype} of shape {values.shape} for {len(positions)} positions; {rule}, "
            "an integer for each"
        )
