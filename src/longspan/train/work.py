"""What a step works on: this rank's rows of every micro-batch, read by all ranks before any of them computes."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from longspan.comm import SequenceShard, World, bind
from longspan.errors import DataError
from longspan.layout import Partition
from longspan.model.hf import vocabulary_size
from longspan.model.pipeline import PipelinedModel
from longspan.plan import MicroBatch, Plan
from longspan.train.loss import NO_TARGET, Rows, read_rows
from longspan.train.readers import exchange_of, move_to_owners, read_held


class Work(NamedTuple):
    """One micro-batch as this rank runs it: its shard, its token ids (T,) and its labels (T,), on the host."""

    shard: SequenceShard
    ids: Rows
    labels: Rows


def padding_alone(plan: Plan, world: World) -> Work:
    """A micro-batch without documents, for all slots to enter together."""
    return _without_rows(_with_padding(MicroBatch(), plan, world))


def read_together(model: nn.Module, plan: Plan, documents: Any, world: World, readers: Partition | None) -> list[Work]:
    """Bind every micro-batch and get this rank's rows; where any rank cannot read, every rank raises DataError.

    `readers` says which rows each slot reads; None: those that it computes. Stages in the middle read none.
    """
    exchange = None if readers is None else exchange_of(plan, readers)
    reads = not isinstance(model, PipelinedModel) or model.reads_tokens
    work, held, failure, vocabulary = list[Work](), None, None, vocabulary_size(model)
    try:
        for shard in _shards(plan, world):
            here = reads and readers is None
            work.append(Work(shard, *read_rows(documents, shard, vocabulary)) if here else _without_rows(shard))
        if readers is not None and reads:
            held = read_held(documents, plan, readers, world.slot, vocabulary)
    except Exception as error:  # a corpus may raise anything: the other ranks must learn of it
        failure = error
    _agree(plan, world, failure)
    if held is None or exchange is None:
        return work
    moved = move_to_owners(held, exchange, [each.shard for each in work], world)
    return [Work(each.shard, *rows) for each, rows in zip(work, moved, strict=True)]


def _shards(plan: Plan, world: World) -> Iterator[SequenceShard]:
    """Of every micro-batch that this rank's slot runs: in lockstep all of them, dummies too."""
    for micro_batch in plan.micro_batches:
        if plan.mode == "lockstep" or micro_batch.groups_of(world.slot):
            yield _with_padding(micro_batch, plan, world)


def _with_padding(micro_batch: MicroBatch, plan: Plan, world: World) -> SequenceShard:
    return bind(micro_batch, world).with_padding(minimum=1, multiple=plan.row_multiple)


def _without_rows(shard: SequenceShard) -> Work:
    """The work of a rank that reads nothing: padding, or rows that come from another stage or another reader."""
    rows = shard.local_rows
    return Work(shard, np.zeros(rows, dtype=np.int64), np.full(rows, NO_TARGET, dtype=np.int64))


def _agree(plan: Plan, world: World, failure: Exception | None) -> None:
    """The first collective of a step: it compares the plans too, of which a rank has none if it cannot read them."""
    if world.agree(plan.digest(), flag=failure is not None):
        told = world.gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
        rank, message = next((rank, m) for rank, m in zip(world.home.ranks, told, strict=True) if m is not None)
        raise DataError(f"rank {rank} could not read its rows: {message}") from failure
