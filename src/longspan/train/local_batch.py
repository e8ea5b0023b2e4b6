"""This rank's rows of every micro-batch of a step, read by all ranks before any of them computes.

The label of position p of a document is its token p + 1; a document's last position and padding have none. So labels
are made inside documents, before the sequence is split.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from longspan.comm import SequenceShard, World, bind, raise_first_error
from longspan.errors import DataError
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.prepared import vocabulary_size
from longspan.plan import MicroBatch, Plan
from longspan.plan.items import ItemTable
from longspan.train.loss import NO_TARGET

Rows = npt.NDArray[np.int64]


class LocalBatch(NamedTuple):
    """One micro-batch as this rank runs it: its shard, its token ids (T,) and its labels (T,), on the host."""

    shard: SequenceShard
    ids: Rows
    labels: Rows


def padding_batch(plan: Plan, world: World) -> LocalBatch:
    """A micro-batch without documents, for all slots to enter together."""
    return _padding_rows(_with_padding(MicroBatch(), plan, world))


def read_local_batches(
    model: nn.Module, plan: Plan, documents: Any, world: World, items: ItemTable | None = None
) -> list[LocalBatch]:
    """Bind every micro-batch and read this rank's rows; where any rank cannot read, every rank raises DataError.

    Each slot reads the rows that it computes; its ranks of stages in the middle read none. The places of `items` are
    neither inputs nor targets.
    """
    batches, failure = list[LocalBatch](), None
    try:
        batches = batches_of(model, plan, documents, world, plan.micro_batches, items)
    except Exception as error:  # a corpus may raise anything: the other ranks must learn of it
        failure = reading_error(error, world)
    if world.control.agree(plan.digest(), flag=failure is not None):  # a rank has no plan if it cannot read it
        raise_first_error(world, failure)
    return batches


def batches_of(
    model: nn.Module,
    plan: Plan,
    documents: Any,
    world: World,
    micro_batches: Iterable[MicroBatch],
    items: ItemTable | None = None,
) -> list[LocalBatch]:
    """Some micro-batches of a plan with this rank's rows, read without the other ranks."""
    reads = not isinstance(model, PipelineModel) or model.reads_tokens
    batches, vocabulary = list[LocalBatch](), vocabulary_size(model)
    for micro_batch in micro_batches:
        if plan.mode == "free" and not micro_batch.groups_of(world.slot):
            continue  # in lockstep a slot runs all of them, empty ones too
        shard = _with_padding(micro_batch, plan, world)
        rows = read_inputs_and_labels(documents, shard, vocabulary, items) if reads else None
        batches.append(LocalBatch(shard, *rows) if rows else _padding_rows(shard))
    return batches


def reading_error(error: Exception, world: World) -> DataError:
    """What all ranks raise where this one cannot read its rows."""
    message = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    named = DataError(f"rank {world.rank} could not read its rows: {message}")
    named.__cause__ = error
    return named


def _with_padding(micro_batch: MicroBatch, plan: Plan, world: World) -> SequenceShard:
    return bind(micro_batch, world).with_padding(minimum=1, multiple=plan.row_multiple)


def _padding_rows(shard: SequenceShard) -> LocalBatch:
    """The batch of a rank that reads nothing: padding, or rows that come from another stage."""
    rows = shard.local_rows
    return LocalBatch(shard, np.zeros(rows, dtype=np.int64), np.full(rows, NO_TARGET, dtype=np.int64))


def read_inputs_and_labels(
    documents: Any, shard: SequenceShard, vocabulary: int | None = None, items: ItemTable | None = None
) -> tuple[Rows, Rows]:
    """Token ids (T,) and labels (T,) of a shard's local rows; padding rows hold id 0 and label −100.

    `documents[d]` is asked for the positions that this rank holds, and for the next one where a label needs it.
    Whatever it holds in the places of `items`, id 0 and label −100 stand there.
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
            read = part.group.documents[document], start, min(stop + 1, length)
            hidden = None if items is None else items.covered(*read)
            tokens = _read_tokens(documents, *read, vocabulary, hidden)
            first = part.start + offset
            ids[first : first + stop - start] = tokens[: stop - start]
            labels[first : first + len(tokens) - 1] = (
                tokens[1:] if hidden is None else np.where(hidden[1:], NO_TARGET, tokens[1:])
            )
    return ids, labels


def _read_tokens(
    documents: Any, document: int, start: int, stop: int, vocabulary: int | None = None, hidden: Any = None
) -> Rows:
    """Positions start to stop of one document, as int64, 0 where they are hidden (bool, one for each).

    Raises DataError for what cannot be token ids.
    """
    positions = np.arange(start, stop)
    ids = documents[document]
    ids = np.asarray(ids) if isinstance(ids, list | tuple) else ids
    tokens = np.asarray(ids[torch.from_numpy(positions) if isinstance(ids, Tensor) else positions])
    if tokens.shape != positions.shape or tokens.dtype.kind not in "iu":
        raise DataError(
            f"document {document} gave {tokens.dtype} of shape {tokens.shape} for {len(positions)} positions; "
            "a document, indexed by an array of positions, gives as many integer token ids"
        )
    if hidden is not None:
        tokens = np.where(hidden, 0, tokens)
    outside = (tokens < 0) | (tokens >= (np.iinfo(np.int64).max if vocabulary is None else vocabulary))
    if outside.any():
        at = int(outside.argmax())
        raise DataError(
            f"document {document} holds token id {tokens[at]} at position {start + at}, the model's vocabulary is "
            f"0 to {'…' if vocabulary is None else vocabulary - 1}; use the tokenizer that belongs to the model"
        )
    return tokens.astype(np.int64)
