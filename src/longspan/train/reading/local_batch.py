"""This rank's rows of every micro-batch of a step, read by all ranks before any of them computes.

What is read of a document is in `read_rows.py`. Here is also what a model or the documents may add to that: which rows
of documents see each other besides the causal mask (an image's, or those of a prefix), and positions in several parts
(M-RoPE). Attention and masks go by the shard's own positions, whatever these are.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from longspan.comm import SequenceShard, World, bind, raise_first_error
from longspan.data.document import NO_TARGET, Labelled
from longspan.errors import DataError
from longspan.layout.segments import Integers
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.prepared import vocabulary_size
from longspan.model.seams.attention_calls import PARTS_OF_POSITIONS
from longspan.model.seams.call_rules import CallRules, call_rules
from longspan.plan import MicroBatch, Plan
from longspan.train.reading.read_rows import LocalBatch, NamesOfValues, documents_and_positions, read_rows
from longspan.train.reading.step_inputs import StepInputs

if TYPE_CHECKING:
    from longspan.plan.items import ItemTable

T = TypeVar("T")

_RUN = 4096  # labels that are read at a time, until one is a target
_HINT = (
    "A plan must be made from the same lengths and settings on every rank, loss=, divisor= and mtp= be given on all "
    "ranks or on none, and temperature= be the same"
)


def read_local_batches(inputs: StepInputs, depths: int = 0, temperature: float = 1.0) -> list[LocalBatch]:
    """Bind every micro-batch and read this rank's rows; where any rank cannot read, every rank raises DataError.

    Each slot reads the rows that it computes; its ranks of stages in the middle read none. The places of items are
    neither inputs nor targets. `depths` of multi-token prediction read as many tokens further ahead. Raises CommError
    where ranks hold different plans, or a different `temperature`.
    """
    inputs, plan = move_rows(inputs, depths), inputs.plan
    digest = sha256(f"{plan.digest()} {float(temperature)}".encode()).hexdigest()
    # One message tells that plans are the same and that every rank could read its rows.
    return read_and_agree(
        lambda: read_micro_batches(inputs, plan.micro_batches, depths), digest, inputs.world, hint=_HINT
    )


def move_rows(inputs: StepInputs, depths: int = 0) -> StepInputs:
    """Return what a step runs over, with rows of gathered documents brought to this rank; entered by all ranks."""
    return replace(inputs, documents=inputs.documents.move_rows(inputs.plan, inputs.world, depths))


def read_and_agree(read: Callable[[], T], digest: str, world: World, **names: str) -> T:
    """Read, and compare a digest of what is read over all ranks, which enter together.

    Where any rank cannot read, every rank raises DataError. `names` go to `ControlGroup.agree`.
    """
    result, failure = None, None
    try:
        result = read()
    except Exception as error:  # a corpus may raise anything: the other ranks must learn of it
        failure = reading_error(error, world)
    if world.control.agree(digest, flag=failure is not None, **names):
        raise_first_error(world, failure)
    return result  # pyright: ignore[reportReturnType]


def read_micro_batches(inputs: StepInputs, micro_batches: Iterable[MicroBatch], depths: int = 0) -> list[LocalBatch]:
    """Read this rank's rows of some micro-batches of a plan, without the other ranks.

    Ranks of a pipeline's middle stages read no tokens, only positions and which rows see each other.
    """
    model, plan, world, documents = inputs.language_model, inputs.plan, inputs.world, inputs.documents.documents
    reads = not isinstance(model, PipelineModel) or model.reads_tokens
    batches, vocabulary, names = list[LocalBatch](), vocabulary_size(model), NamesOfValues()
    rules, items = call_rules(model), inputs.documents.items
    positions = getattr(documents, "positions", None)
    for micro_batch in micro_batches:
        if plan.mode == "free" and not micro_batch.groups_of(world.slot):
            continue  # in lockstep a slot runs all of them, empty ones too
        shard = _bind_padded(micro_batch, plan, world)
        if rules.prefix or rules.in_spans:
            shard = bind_spans(shard, rules, documents, items)
        batch = read_rows(documents, shard, vocabulary, items, names, depths) if reads else _padding_rows(shard)
        if positions is not None:
            batch = batch._replace(positions=row_positions(positions, shard))
        batches.append(batch)
    return batches


def padding_batch(plan: Plan, world: World, depths: int = 0) -> LocalBatch:
    """Make a micro-batch without documents, for all slots to enter together."""
    batch = _padding_rows(_bind_padded(MicroBatch(), plan, world))
    return batch._replace(deeper=(batch,) * depths)


def reading_error(error: Exception, world: World) -> DataError:
    """Make the error that all ranks raise if this rank cannot read its rows."""
    message = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    rank_error = DataError(f"rank {world.rank} could not read its rows: {message}")
    rank_error.__cause__ = error
    return rank_error


def _bind_padded(micro_batch: MicroBatch, plan: Plan, world: World) -> SequenceShard:
    return bind(micro_batch, world).with_padding(minimum=1, multiple=plan.row_multiple)


def _padding_rows(shard: SequenceShard) -> LocalBatch:
    rows = shard.local_rows
    return LocalBatch(shard, np.zeros(rows, dtype=np.int64), np.full(rows, NO_TARGET, dtype=np.int64))


# ---- rows that see each other besides the causal mask


def bind_spans(shard: SequenceShard, rules: CallRules, documents: Any, items: "ItemTable | None") -> SequenceShard:
    """Return the shard with the rows that see each other both ways: a prefix's or an item's, by the model's rules.

    Raises DataError for a prefix that the model's window would cut, and for packs, whose pieces have a prefix each.
    """
    if rules.prefix:
        return shard.with_spans(dict(_document_prefixes(shard, rules, documents, items)))
    if items is None:
        return shard.with_spans({})
    return shard.with_spans({d: items.runs(d, rules.in_spans) for d in shard.micro_batch.documents})


def _document_prefixes(
    shard: SequenceShard, rules: CallRules, documents: Any, items: "ItemTable | None"
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield the number and the prefix of each document whose rows this rank may hold."""
    groups = [shard_part.group for shard_part in shard.parts if shard_part.index >= 0]  # −1: padding
    for group in groups:
        for number, length in zip(group.documents, group.lengths, strict=True):
            document = documents[number]
            if len(getattr(document, "pieces", ())) > 1:
                raise DataError(
                    f"document {number} is a pack of {len(document.pieces)} pieces, and in {rules.architecture} each "
                    "has a prefix of its own; use data.pack_to = 0: micro-batches hold several documents"
                )
            prefix = count_prefix_rows(document, number, length, items)
            if rules.prefix_window is not None and prefix > rules.prefix_window:
                raise DataError(
                    f"document {number} has a prefix of {prefix} rows, and layers of {rules.architecture} a window of "
                    f"{rules.prefix_window}, which a prefix is not cut by; give shorter prompts"
                )
            yield number, [(0, prefix)] if prefix else []


def count_prefix_rows(document: Any, number: int, length: int, items: "ItemTable | None" = None) -> int:
    """Return how many rows of a document stand before its first target; all of them if it has no target.

    Position 0 is never a target. Position 1 is one in a document without labels, unless an item's placeholder is there.
    """
    if (known_rows := getattr(document, "rows_before_targets", None)) is not None:  # gathered: rows are on other ranks
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


def row_positions(positions_of: Callable[[int], Any], shard: SequenceShard) -> Integers | None:
    """Return the positions (n, T) of a shard's local rows; None if no document has positions of its own.

    `positions_of(d)` gives the positions (n, tokens) of document d, or None if they are plain: then each of the n parts
    counts the document's tokens, as in padding. It is called once a micro-batch, for the whole document, because where
    an image stands decides the positions after it. Raises DataError for positions of another shape.
    """
    lengths = {d: n for group in shard.micro_batch.groups for d, n in zip(group.documents, group.lengths, strict=True)}
    document_of_row, position_of_row = documents_and_positions(shard)
    by_document = {
        d: _check_positions(positions_of(d), d, lengths[d]) for d in np.unique(document_of_row).tolist() if d >= 0
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


def _check_positions(positions: Any, document: int, length: int) -> Integers | None:
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
