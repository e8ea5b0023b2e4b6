"""What a step works on: this rank's rows of every micro-batch, read by all ranks before any of them computes."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from longspan.comm import SequenceShard, World, bind
from longspan.errors import DataError
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.prepared import vocabulary_size
from longspan.plan import MicroBatch, Plan
from longspan.train.loss import NO_TARGET, Rows, read_inputs_and_labels


class LocalBatch(NamedTuple):
    """One micro-batch as this rank runs it: its shard, its token ids (T,) and its labels (T,), on the host."""

    shard: SequenceShard
    ids: Rows
    labels: Rows


def padding_batch(plan: Plan, world: World) -> LocalBatch:
    """A micro-batch without documents, for all slots to enter together."""
    return _unread_batch(_with_padding(MicroBatch(), plan, world))


def read_local_batches(model: nn.Module, plan: Plan, documents: Any, world: World) -> list[LocalBatch]:
    """Bind every micro-batch and read this rank's rows; where any rank cannot read, every rank raises DataError.

    Each slot reads the rows that it computes; its ranks of stages in the middle read none.
    """
    reads = not isinstance(model, PipelineModel) or model.reads_tokens
    work, failure, vocabulary = list[LocalBatch](), None, vocabulary_size(model)
    try:
        for shard in _shards(plan, world):
            work.append(
                LocalBatch(shard, *read_inputs_and_labels(documents, shard, vocabulary))
                if reads
                else _unread_batch(shard)
            )
    except Exception as error:  # a corpus may raise anything: the other ranks must learn of it
        failure = error
    _agree(plan, world, failure)
    return work


def _shards(plan: Plan, world: World) -> Iterator[SequenceShard]:
    """Of every micro-batch that this rank's slot runs: in lockstep all of them, dummies too."""
    for micro_batch in plan.micro_batches:
        if plan.mode == "lockstep" or micro_batch.groups_of(world.slot):
            yield _with_padding(micro_batch, plan, world)


def _with_padding(micro_batch: MicroBatch, plan: Plan, world: World) -> SequenceShard:
    return bind(micro_batch, world).with_padding(minimum=1, multiple=plan.row_multiple)


def _unread_batch(shard: SequenceShard) -> LocalBatch:
    """The work of a rank that reads nothing: padding, or rows that come from another stage."""
    rows = shard.local_rows
    return LocalBatch(shard, np.zeros(rows, dtype=np.int64), np.full(rows, NO_TARGET, dtype=np.int64))


def _agree(plan: Plan, world: World, failure: Exception | None) -> None:
    """The first collective of a step: it compares the plans too, of which a rank has none if it cannot read them."""
    if world.control.agree(plan.digest(), flag=failure is not None):
        told = world.control.gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
        rank, message = next((rank, m) for rank, m in zip(world.home.ranks, told, strict=True) if m is not None)
        raise DataError(f"rank {rank} could not read its rows: {message}") from failure
