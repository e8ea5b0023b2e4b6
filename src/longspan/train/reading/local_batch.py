"""This rank's rows of every micro-batch of a step, read by all ranks before any of them computes.

What is read of a document is in `read_rows.py`.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import nn

from longspan.comm import SequenceShard, World, bind, raise_first_error
from longspan.data.document import NO_TARGET
from longspan.errors import DataError
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.prepared import vocabulary_size
from longspan.model.seams.call_rules import call_rules
from longspan.plan import MicroBatch, Plan
from longspan.plan.items import ItemTable
from longspan.train.reading.read_positions import positions_of_rows
from longspan.train.reading.read_rows import LocalBatch, NamesOfValues, read_rows
from longspan.train.reading.spans import with_spans

_HINT = (
    "A plan must be made from the same lengths and settings on every rank, and loss=, divisor= and mtp= be given on "
    "all ranks or on none"
)


def padding_batch(plan: Plan, world: World, depths: int = 0) -> LocalBatch:
    """A micro-batch without documents, for all slots to enter together."""
    batch = _padding_rows(_with_padding(MicroBatch(), plan, world))
    return batch._replace(deeper=(batch,) * depths)


def read_local_batches(
    model: nn.Module, plan: Plan, documents: Any, world: World, items: ItemTable | None = None, depths: int = 0
) -> list[LocalBatch]:
    """Bind every micro-batch and read this rank's rows; where any rank cannot read, every rank raises DataError.

    Each slot reads the rows that it computes; its ranks of stages in the middle read none. The places of `items` are
    neither inputs nor targets. `depths` of multi-token prediction read as many tokens further ahead.
    """
    batches, failure = list[LocalBatch](), None
    try:
        batches = batches_of(model, plan, documents, world, plan.micro_batches, items, depths)
    except Exception as error:  # a corpus may raise anything: the other ranks must learn of it
        failure = reading_error(error, world)
    if world.control.agree(plan.digest(), flag=failure is not None, hint=_HINT):  # it has no plan if it cannot read it
        raise_first_error(world, failure)
    return batches


def batches_of(
    model: nn.Module,
    plan: Plan,
    documents: Any,
    world: World,
    micro_batches: Iterable[MicroBatch],
    items: ItemTable | None = None,
    depths: int = 0,
) -> list[LocalBatch]:
    """Some micro-batches of a plan with this rank's rows, read without the other ranks."""
    reads = not isinstance(model, PipelineModel) or model.reads_tokens
    batches, vocabulary, names = list[LocalBatch](), vocabulary_size(model), NamesOfValues()
    rules = call_rules(model)
    for micro_batch in micro_batches:
        if plan.mode == "free" and not micro_batch.groups_of(world.slot):
            continue  # in lockstep a slot runs all of them, empty ones too
        shard = with_spans(_with_padding(micro_batch, plan, world), rules, documents, items)
        batch = read_rows(documents, shard, vocabulary, items, names, depths) if reads else _padding_rows(shard)
        batches.append(batch._replace(positions=positions_of_rows(documents, shard)))
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
