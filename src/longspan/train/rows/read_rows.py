"""This rank's rows of every micro-batch of a step, read by all ranks before any of them computes.

The label of position p of a document is what its token p + 1 is to be; a document's last position and padding have
none. So labels are made inside documents, before the sequence is split.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.comm import SequenceShard, World, bind
from longspan.data.document import NO_TARGET, Labelled, Valued
from longspan.data.likeliest import ENTRY, REST, Table
from longspan.errors import DataError
from longspan.layout import Integers
from longspan.model.layers import vocabulary_size
from longspan.model.seams.call_rules import call_rules
from longspan.model.seams.model_calls import PARTS_OF_POSITIONS
from longspan.plan import MicroBatch, Plan
from longspan.train.rows.visible_spans import bind_spans
from longspan.train.step_inputs import StepInputs

if TYPE_CHECKING:
    from longspan.plan.items.item_table import ItemTable


WEIGHTS = "weights"  # the values that multiply losses; 1 in documents that give none


class LocalBatch(NamedTuple):
    """One micro-batch as this rank runs it: its shard, its token ids (T,) and its labels (T,), on the host.

    `values` (T,) by name are the numbers that documents bring for the tokens that are predicted (`document.py`), if any
    document on this rank has some. `deeper` are the same rows for each depth of multi-token prediction: at depth d, row
    t holds the id of token t + d and the label and values of token t + d + 1. `positions` (n, T) are those that
    documents bring in several parts, None if they are the shard's. `likeliest` (T, k + 1) are a teacher's likeliest
    tokens for the tokens that are predicted (`likeliest.py`), None where no loss reads them.
    """

    shard: SequenceShard
    ids: Integers
    labels: Integers
    values: dict[str, npt.NDArray[np.float64]]
    deeper: tuple["LocalBatch", ...] = ()
    positions: Integers | None = None
    likeliest: Table | None = None


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


@dataclass(eq=False)
class NamesOfValues:
    """The names of the values of the first document that is read, which all others of a step must have as well."""

    _first_names: tuple[int, set[str]] | None = None

    def check_values(self, document: int, values: Mapping[str, Any], positions: Integers) -> None:
        """Raise DataError for values of another shape than positions, or of other names than another document's.

        Weights may be left out.
        """
        names = set(values) - {WEIGHTS}
        if self._first_names is None:
            self._first_names = (document, names)
        first, first_names = self._first_names
        for name in sorted(names ^ first_names):
            having, lacking = (document, first) if name in names else (first, document)
            raise DataError(
                f"document {having} has {name!r} and document {lacking} has not; give the documents of a step the same "
                "values, 0 where they do not matter"
            )
        for name, numbers in values.items():
            if np.shape(numbers) != positions.shape:
                raise DataError(
                    f"document {document} gave {name!r} of shape {np.shape(numbers)} for {len(positions)} positions; "
                    "give a number for each"
                )


def read_rows(
    documents: Any,
    shard: SequenceShard,
    vocabulary: int | None = None,
    items: "ItemTable | None" = None,
    names: NamesOfValues | None = None,
    depths: int = 0,
    likeliest: int = 0,
) -> LocalBatch:
    """Read a rank's rows of one micro-batch, whose shard has its padding: token ids, labels and values.

    `names` are shared by all micro-batches of a step, whose documents must bring values of the same names. `depths` of
    multi-token prediction get rows of their own (`LocalBatch.deeper`). So many `likeliest` tokens of a teacher's are
    read with them, which the documents then must have.
    """
    batch, *deeper = (_padding_rows(shard) for _ in range(depths + 1))
    if likeliest:
        batch = batch._replace(likeliest=np.zeros((shard.local_rows, likeliest + 1), ENTRY))
    reader = _Reader(documents, vocabulary, items, names or NamesOfValues(), (batch, *deeper))
    for shard_part in shard.parts:
        if shard_part.index < 0:  # padding
            continue
        for local, start, stop, offset in shard_part.segments():
            length = shard_part.group.lengths[local]
            stop = min(stop, length)  # a document laid out longer than it is ends in padding
            if stop > start:
                document = shard_part.group.documents[local]
                row = shard_part.start + offset
                reader.read_run(document, start, stop, row, length=length)
    return batch._replace(deeper=tuple(deeper))


def target_rows(batch: LocalBatch) -> Integers:
    """Return the local rows (n,) that predict a token."""
    return np.flatnonzero(batch.labels != NO_TARGET)


@dataclass(frozen=True)
class _Reader:
    """Fills the batches of one micro-batch, run by run; `at_depth` are the batch itself and those of each depth.

    A run is consecutive tokens of one document that this rank holds.
    """

    documents: Any
    vocabulary: int | None
    items: "ItemTable | None"
    names: NamesOfValues
    # The rows of these batches are filled too.
    at_depth: Sequence[LocalBatch]

    def read_run(self, document: int, start: int, stop: int, row: int, *, length: int) -> None:
        """Read tokens `start` to `stop` of a document of `length`, and write them into rows from `row` on, at every
        depth.

        Tokens after `stop` are read too: one for the last label and one for each depth, as far as there are any. Raises
        DataError for ids or labels outside the vocabulary, and for values that do not fit.
        """
        source = self.documents[document]
        # Tokens follow the end of a document only if it is a prefix, which knows `ahead` of them.
        end = min(stop + len(self.at_depth), length + getattr(source, "ahead", 0))
        # True at the placeholders of items, which are neither inputs nor targets.
        is_placeholder = None if self.items is None else self.items.placeholder_mask(document, start, end)
        positions = np.arange(start, end)
        indexed = np.asarray(source) if isinstance(source, list | tuple) else source
        tokens = np.asarray(indexed[torch.from_numpy(positions) if isinstance(indexed, Tensor) else positions])
        check_integers(document, tokens, positions, "a document, indexed by an array of positions, gives token ids")
        if is_placeholder is not None:
            tokens = np.where(is_placeholder, 0, tokens)
        self._check_vocabulary(document, tokens, positions, "token id")
        tokens = tokens.astype(np.int64)
        # A row predicts the next token, or has a score of its own.
        predicted_by_rows = slice(0, stop - start) if getattr(source, "makes_scores", False) else slice(1, None)
        next_positions = positions[predicted_by_rows]
        next_tokens = tokens[predicted_by_rows]
        labels = next_tokens
        if isinstance(source, Labelled):
            labels = np.asarray(source.labels(next_positions))
            check_integers(document, labels, next_positions, "its labels are token ids, or −100")
        # The mask begins one position before labels.
        if is_placeholder is not None:
            labels = np.where(is_placeholder[1:], NO_TARGET, labels.astype(np.int64))
        # Labels that are the next tokens have been checked with the tokens.
        if labels is not next_tokens:
            ids_or_0 = np.where(labels == NO_TARGET, 0, labels)
            self._check_vocabulary(document, ids_or_0, next_positions, "the label")
        values = source.token_values(next_positions) if isinstance(source, Valued) else {}
        self.names.check_values(document, values, next_positions)
        if (tables := self.at_depth[0].likeliest) is not None:
            count = min(stop - start, len(next_positions))
            is_target = labels[:count] != NO_TARGET
            tables[row : row + count] = _read_table(document, source, next_positions[:count], is_target, tables)
        for depth, batch in enumerate(self.at_depth):
            ahead = slice(depth, depth + stop - start)
            ids = tokens[ahead]
            targets = labels[ahead]
            predicted = slice(row, row + len(targets))  # a document's last token predicts nothing
            batch.ids[row : row + len(ids)] = ids
            batch.labels[predicted] = targets
            for name, numbers in values.items():
                # Rows without a value have the weight 1, and 0 under other names.
                no_values = np.full(len(batch.ids), float(name == WEIGHTS))
                batch.values.setdefault(name, no_values)[predicted] = numbers[ahead]

    def _check_vocabulary(self, document: int, ids: Integers, positions: Integers, noun: str) -> None:
        size = self.vocabulary
        outside = (ids < 0) | (ids >= (np.iinfo(np.int64).max if size is None else size))
        if outside.any():
            at = int(outside.argmax())
            raise DataError(
                f"document {document} holds {noun} {ids[at]} at position {positions[at]}, the model's vocabulary is "
                f"0 to {'…' if size is None else size - 1}; use the tokenizer that belongs to the model"
            )


def _read_table(
    document: int, source: Any, positions: Integers, is_target: npt.NDArray[np.bool_], tables: Table
) -> Table:
    read = getattr(source, "likeliest", None)
    table = None if read is None else read(positions)
    tokens = tables.shape[1] - 1
    if table is None or np.shape(table) != (len(positions), tokens + 1):
        form = "has no table" if table is None else f"has a table of {np.shape(table)[-1] - 1}"
        raise DataError(
            f"document {document} {form} of a teacher's likeliest tokens, and the loss compares {tokens} of each "
            "target; give document.with_likeliest(likeliest_tokens(teacher, …).of(number))"
        )
    missing = is_target & (table["id"][:, -1] != REST)
    if missing.any():
        raise DataError(
            f"document {document} has no likeliest tokens for the target at position {positions[missing.argmax()]}; "
            "they were computed with other labels: compute them again with these"
        )
    return table


def check_integers(document: int, values: npt.NDArray[Any], positions: Integers, rule: str) -> None:
    """Raise DataError for values that are no integers, one for each position; `rule` says in the error what they should
    be.
    """
    if values.shape != positions.shape or values.dtype.kind not in "iu":
        raise DataError(
            f"document {document} gave {values.dtype} of shape {values.shape} for {len(positions)} positions; {rule}, "
            "an integer for each"
        )


def read_micro_batches(
    inputs: StepInputs, micro_batches: Iterable[MicroBatch], depths: int = 0, likeliest: int = 0
) -> list[LocalBatch]:
    """Read this rank's rows of some micro-batches of the plan, without the other ranks; middle stages read no tokens.

    In free mode those without a group of this slot are left out; in lockstep a slot runs all of them, empty ones too.
    """
    model = inputs.language_model
    plan = inputs.plan
    world = inputs.world
    documents = inputs.documents.documents
    reads = getattr(model, "reads_tokens", True)  # False of a PipelineModel whose stages are all in the middle
    batches = list[LocalBatch]()
    vocabulary = vocabulary_size(model)
    names = NamesOfValues()
    rules = call_rules(model)
    items = inputs.documents.items
    positions_of = getattr(documents, "positions", None)
    for micro_batch in micro_batches:
        if plan.mode == "free" and not micro_batch.groups_of(world.slot):
            # In lockstep a slot runs all of them, empty ones too.
            continue
        shard = bind(micro_batch, world).with_padding(multiple=plan.row_multiple)
        if rules.prefix or rules.in_spans:
            shard = bind_spans(shard, rules, documents, items)
        batch = _padding_rows(shard)
        if reads:
            batch = read_rows(documents, shard, vocabulary, items, names, depths, likeliest)
        if positions_of is not None:
            batch = batch._replace(positions=read_own_positions(positions_of, shard))
        batches.append(batch)
    return batches


def padding_batch(plan: Plan, world: World, depths: int = 0) -> LocalBatch:
    """Make a micro-batch without documents, of as few rows as the model takes, for all slots to enter together."""
    batch = _padding_rows(bind(MicroBatch(), world).with_padding(multiple=plan.row_multiple))
    return batch._replace(deeper=(batch,) * depths)


def _padding_rows(shard: SequenceShard) -> LocalBatch:
    """Rows have id 0 and no label: padding, and what a reader fills."""
    rows = shard.local_rows
    return LocalBatch(shard, np.zeros(rows, dtype=np.int64), np.full(rows, NO_TARGET, dtype=np.int64), {})


# ---- the document and the position of each row


def read_own_positions(positions_of: Callable[[int], Any], shard: SequenceShard) -> Integers | None:
    """Return the positions (n, T) of a shard's local rows; None if no document here has positions of its own.

    `positions_of(d)` gives the positions (n, tokens) of a whole document d, or None if they are plain: then each of the
    n parts counts its tokens. Raises DataError for positions of another shape or type.
    """
    lengths = {
        document: length
        for group in shard.micro_batch.groups
        for document, length in zip(group.documents, group.lengths, strict=True)
    }
    document_of_row, position_of_row = documents_and_positions(shard)
    # Documents of plain positions are left out.
    by_document = dict[int, Integers]()
    for document in np.unique(document_of_row).tolist():
        if document < 0 or (given_positions := positions_of(document)) is None:  # −1: padding
            continue
        length = lengths[document]
        own_positions = np.asarray(given_positions)
        has_shape = own_positions.ndim == 2 and own_positions.shape[1] == length
        is_valid = has_shape and len(own_positions) in PARTS_OF_POSITIONS
        if not is_valid or own_positions.dtype.kind not in "iu":
            raise DataError(
                f"document {document} gave positions of {own_positions.dtype} and shape {own_positions.shape}; give "
                f"integers of shape (3, {length}), one column for each of its {length} tokens"
            )
        by_document[document] = own_positions.astype(np.int64, copy=False)
    numbers_of_parts = {len(own_positions) for own_positions in by_document.values()}
    if not numbers_of_parts:
        return None
    if len(numbers_of_parts) > 1:
        raise DataError(f"documents have positions in {sorted(numbers_of_parts)} parts; give all of them as many")
    positions = np.tile(position_of_row, (numbers_of_parts.pop(), 1))
    for document, own_positions in by_document.items():
        is_token = position_of_row < lengths[document]  # rows after these pad the document
        rows = np.flatnonzero((document_of_row == document) & is_token)
        positions[:, rows] = own_positions[:, position_of_row[rows]]
    return positions


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
