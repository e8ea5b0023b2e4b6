"""This rank's rows of every micro-batch of a step, read by all ranks before any of them computes.

The label of position p of a document is what its token p + 1 is to be; a document's last position and padding have
none. So labels are made inside documents, before the sequence is split.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.comm import SequenceShard, World, bind, raise_first_error
from longspan.data.document import NO_TARGET, Labelled, Valued
from longspan.errors import DataError, LongspanError
from longspan.layout import Integers
from longspan.model.layers import vocabulary_size
from longspan.model.seams.attention_calls import PARTS_OF_POSITIONS
from longspan.model.seams.call_rules import CallRules, call_rules
from longspan.plan import MicroBatch, Plan
from longspan.train.step_inputs import StepInputs

if TYPE_CHECKING:
    from longspan.plan.items.item_table import ItemTable


WEIGHTS = "weights"  # the values that multiply losses; 1 in documents that give none


class LocalBatch(NamedTuple):
    """One micro-batch as this rank runs it: its shard, its token ids (T,) and its labels (T,), on the host.

    `values` (T,) by name are the numbers that documents bring for the tokens that are predicted (`document.py`), if any
    document on this rank has some. `deeper` are the same rows for each depth of multi-token prediction: at depth d, row
    t holds the id of token t + d and the label and values of token t + d + 1. `positions` (n, T) are those that
    documents bring in several parts, None if they are the shard's.
    """

    shard: SequenceShard
    ids: Integers
    labels: Integers
    values: dict[str, npt.NDArray[np.float64]]
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


@dataclass(eq=False)
class NamesOfValues:
    """The names of the values of the first document that is read, which all others of a step must have as well."""

    _first_names: tuple[int, set[str]] | None = None

    def check_values(self, document: int, values: Mapping[str, Any], positions: Integers) -> None:
        """Raise DataError for values of another shape than positions, or of other names than another document's.

        Weights may be left out.
        """
        names = set(values) - {WEIGHTS}
        first, first_names = self._first_names = self._first_names or (document, names)
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
) -> LocalBatch:
    """Read a rank's rows of one micro-batch: token ids, labels and values; `names` are shared by those of a step."""
    batch, *deeper = (_padding_rows(shard) for _ in range(depths + 1))
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


def rows_before(micro_batch: MicroBatch, documents: Integers) -> Integers | int:
    """Return, for rows of these documents (n,), the rows before each document's own: those of prefixes."""
    if all(group.parents is None for group in micro_batch.groups):
        return 0
    bases = {d: base for group in micro_batch.groups for d, base in zip(group.documents, group.bases, strict=True)}
    return np.array([bases[document] for document in documents.tolist()], dtype=np.int64)


@dataclass(frozen=True)
class _Reader:
    documents: Any
    vocabulary: int | None
    items: "ItemTable | None"
    names: NamesOfValues
    at_depth: Sequence[LocalBatch]  # whose rows are filled

    def read_run(self, document: int, start: int, stop: int, row: int, *, length: int) -> None:
        """Tokens after `stop` are read too: one for the last label and one for each depth, as far as there are any."""
        value = self.documents[document]
        # no tokens follow a document's end, if it is no prefix
        end = min(stop + len(self.at_depth), length + getattr(value, "ahead", 0))
        # True at the placeholders of items, which are neither inputs nor targets.
        hidden = None if self.items is None else self.items.placeholder_mask(document, start, end)
        positions = np.arange(start, end)
        tokens = self._read_tokens(value, document, positions, hidden)
        # A row predicts the next token, or has a score of its own.
        of_rows = slice(0, stop - start) if getattr(value, "makes_scores", False) else slice(1, None)
        labels = tokens[of_rows]
        if isinstance(value, Labelled) or hidden is not None:
            labels = self._read_labels(value, document, positions[of_rows], labels, hidden)
        values = value.token_values(positions[of_rows]) if isinstance(value, Valued) else {}
        self.names.check_values(document, values, positions[of_rows])
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
        self,
        labelled: Any,
        document: int,
        positions: Integers,
        tokens: Integers,
        hidden: npt.NDArray[np.bool_] | None,
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

    def _check_vocabulary(self, document: int, ids: Integers, positions: Integers, noun: str) -> None:
        size = self.vocabulary
        outside = (ids < 0) | (ids >= (np.iinfo(np.int64).max if size is None else size))
        if outside.any():
            at = int(outside.argmax())
            raise DataError(
                f"document {document} holds {noun} {ids[at]} at position {positions[at]}, the model's vocabulary is "
                f"0 to {'…' if size is None else size - 1}; use the tokenizer that belongs to the model"
            )


def check_integers(document: int, values: npt.NDArray[Any], positions: Integers, rule: str) -> None:
    if values.shape != positions.shape or values.dtype.kind not in "iu":
        raise DataError(
            f"document {document} gave {values.dtype} of shape {values.shape} for {len(positions)} positions; {rule}, "
            "an integer for each"
        )


T = TypeVar("T")

_RUN = 4096  # labels that are read at a time, until one is a target
_HINT = (
    "A plan must be made from the same lengths and settings on every rank, loss=, divisor= and mtp= be given on all "
    "ranks or on none, and temperature= be the same"
)


def read_local_batches(inputs: StepInputs, depths: int, temperature: float) -> list[LocalBatch]:
    """Bind every micro-batch and read this rank's rows; where any rank cannot read, every rank raises DataError.

    Each slot reads the rows that it computes; its ranks of stages in the middle read none. The places of items are
    neither inputs nor targets. `depths` of multi-token prediction read as many tokens further ahead. Raises CommError
    where ranks hold different plans, or a different `temperature`.
    """
    inputs, plan = bring_gathered_rows(inputs, depths), inputs.plan
    digest = text_digest(f"{plan.digest()} {float(temperature)}")
    # One message tells that plans are the same and that every rank could read its rows.
    return read_and_compare_digest(
        lambda: read_micro_batches(inputs, plan.micro_batches, depths), digest, inputs.world, hint=_HINT
    )


def bring_gathered_rows(inputs: StepInputs, depths: int) -> StepInputs:
    """Return what a step runs over, with rows of GatheredDocuments brought to this rank; entered by all ranks."""
    gathered = inputs.documents.documents
    if not hasattr(gathered, "rows_under"):
        return inputs
    if gathered.world is not inputs.world:
        raise DataError(
            "the documents were gathered in another world; call gather_documents(local, world) with this"
        )
    documents = copy(inputs.documents)
    documents.documents = gathered.rows_under(inputs.plan, depths)
    return replace(inputs, documents=documents)


def text_digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def reading_error(error: Exception, world: World) -> LongspanError:
    message = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    rank_error = DataError(f"rank {world.rank} could not read its rows: {message}")
    rank_error.__cause__ = error
    return rank_error


def read_and_compare_digest(
    read: Callable[[], T],
    digest: str,
    world: World,
    make_error: Callable[[Exception, World], LongspanError] = reading_error,
    **names: str,
) -> T:
    """Read, and compare a digest over all ranks; where any rank cannot read, every rank raises that rank's error."""
    result = None
    failure = None
    try:
        result = read()
    except Exception as error:  # a corpus, or sets, may raise anything: the other ranks must learn of it
        failure = make_error(error, world)
    (failed,) = world.control.compare_digests(digest, failure is not None, **names)
    if failed:
        raise_first_error(world, failure)
    return result  # pyright: ignore[reportReturnType]


def read_micro_batches(
    inputs: StepInputs, micro_batches: Iterable[MicroBatch], depths: int = 0
) -> list[LocalBatch]:
    """Read this rank's rows of some micro-batches, without the other ranks; middle stages read no tokens."""
    model = inputs.language_model
    plan = inputs.plan
    world = inputs.world
    documents = inputs.documents.documents
    reads = getattr(model, "reads_tokens", True)  # of a PipelineModel
    batches = list[LocalBatch]()
    vocabulary = vocabulary_size(model)
    names = NamesOfValues()
    rules = call_rules(model)
    items = inputs.documents.items
    positions = getattr(documents, "positions", None)
    for micro_batch in micro_batches:
        if plan.mode == "free" and not micro_batch.groups_of(world.slot):
            continue  # in lockstep a slot runs all of them, empty ones too
        shard = _bind_padded(micro_batch, plan, world)
        if rules.prefix or rules.in_spans:
            shard = bind_spans(shard, rules, documents, items)
        batch = read_rows(documents, shard, vocabulary, items, names, depths) if reads else _padding_rows(shard)
        if positions is not None:
            batch = batch._replace(positions=read_own_positions(positions, shard))
        batches.append(batch)
    return batches


def padding_batch(plan: Plan, world: World, depths: int = 0) -> LocalBatch:
    """Make a micro-batch without documents, for all slots to enter together."""
    batch = _padding_rows(_bind_padded(MicroBatch(), plan, world))
    return batch._replace(deeper=(batch,) * depths)


def _bind_padded(micro_batch: MicroBatch, plan: Plan, world: World) -> SequenceShard:
    return bind(micro_batch, world).with_padding(minimum=1, multiple=plan.row_multiple)


def _padding_rows(shard: SequenceShard) -> LocalBatch:
    rows = shard.local_rows
    return LocalBatch(shard, np.zeros(rows, dtype=np.int64), np.full(rows, NO_TARGET, dtype=np.int64), {})


# ---- rows that see each other besides the causal mask


def bind_spans(shard: SequenceShard, rules: CallRules, documents: Any, items: "ItemTable | None") -> SequenceShard:
    """Return the shard with the rows that see each other both ways: a prefix's or an item's, by the model's rules.

    Raises DataError for a prefix that the model's window would cut.
    """
    if rules.prefix:
        return shard.with_spans(dict(_document_prefixes(shard, rules, documents, items)))
    if items is None:
        return shard.with_spans({})
    return shard.with_spans({d: items.runs(d, rules.in_spans) for d in shard.micro_batch.documents})


def _document_prefixes(
    shard: SequenceShard, rules: CallRules, documents: Any, items: "ItemTable | None"
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    groups = [shard_part.group for shard_part in shard.parts if shard_part.index >= 0]  # −1: padding
    for group in groups:
        for number, length in zip(group.documents, group.lengths, strict=True):
            document = documents[number]
            prefix = count_prefix_rows(document, number, length, items)
            if rules.prefix_window is not None and prefix > rules.prefix_window:
                raise DataError(
                    f"document {number} has a prefix of {prefix} rows, and layers of {rules.architecture} a window of "
                    f"{rules.prefix_window}, which a prefix is not cut by; give shorter prompts"
                )
            yield number, [(0, prefix)] if prefix else []


def count_prefix_rows(document: Any, number: int, length: int, items: "ItemTable | None" = None) -> int:
    """Return how many rows of a document stand before its first target; all of them if it has no target."""
    # gathered: rows are on other ranks
    if (known_rows := getattr(document, "rows_before_targets", None)) is not None:
        return known_rows
    for start in range(0, length, _RUN):
        positions = np.arange(start, min(start + _RUN, length))
        targets = positions > 0
        if isinstance(document, Labelled):
            targets = np.asarray(document.labels(positions)) != NO_TARGET
        if items is not None:
            targets = targets & ~items.placeholder_mask(number, start, int(positions[-1]) + 1)
        if targets.any():
            return start + int(targets.argmax())
    return length


# ---- positions in several parts


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
