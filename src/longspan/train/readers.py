"""Rows that one slot reads and another computes: read where they lie, then moved to their owners.

Reading whole documents, contiguous on disk, costs fewer requests than reading every slot's own rows; what a slot reads
is a Partition of the step's rows, which count through the plan's documents in order of their ids. Token ids and labels
travel together, so that no label needs a neighbour's row.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from longspan.comm import SequenceShard, World
from longspan.comm.rows import exchange_rows
from longspan.errors import PlanError
from longspan.layout import Exchange, Partition
from longspan.plan import Plan
from longspan.train.loss import NO_TARGET, Rows, read_tokens


def whole_documents(lengths: Sequence[int], slots: int) -> Partition:
    """Readers of whole documents: neighbouring documents to each slot, of about as many rows.

    >>> whole_documents((5, 1, 4, 2), 2).counts
    (6, 6)
    """
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    total = int(ends[-1]) if len(ends) else 0
    cuts = [0, *(int(ends[np.abs(ends - total * s / slots).argmin()]) if total else 0 for s in range(1, slots)), total]
    cuts = np.maximum.accumulate(cuts)
    return Partition.from_rows([range(a, b) for a, b in pairwise(cuts)])


def readers_of(plan: Plan, read: str) -> Partition | None:
    """Who reads which rows of a plan under `data.read`: None where each slot reads what it computes."""
    return whole_documents(plan.lengths, plan.slots) if read == "documents" else None


def exchange_of(plan: Plan, readers: Partition) -> Exchange:
    """What has to move from the readers to the slots that compute a row. Raises PlanError where a row is not read."""
    if readers.degree != plan.slots:
        raise PlanError(f"readers name the rows of {readers.degree} slots, the plan has {plan.slots}; name each slot's")
    held = [readers.rows(slot) for slot in range(plan.slots)]
    read = len(np.unique(np.concatenate(held)))
    if read < plan.tokens or max((int(rows.max(initial=0)) for rows in held), default=0) >= max(plan.tokens, 1):
        raise PlanError(
            f"readers name {read} different rows, the plan has {plan.tokens} (0 to {plan.tokens - 1}, counted through "
            "its documents); each must be read by a slot"
        )
    needed = [np.concatenate([np.zeros(0, np.int64), *_rows_of_slot(plan, slot)]) for slot in range(plan.slots)]
    return Exchange(readers, Partition.from_rows([rows.tolist() for rows in needed]))


def read_held(documents: Any, plan: Plan, readers: Partition, slot: int, vocabulary: int | None) -> Rows:
    """Token id and label of every row that a slot reads (n, 2). Raises DataError for what are no token ids."""
    starts = np.cumsum([0, *plan.lengths])
    rows = readers.rows(slot)
    found = np.full((len(rows), 2), NO_TARGET, dtype=np.int64)
    for first, last in _runs(rows, starts):
        document = int(np.searchsorted(starts, rows[first], side="right")) - 1
        start, stop = int(rows[first] - starts[document]), int(rows[last - 1] - starts[document]) + 1
        tokens = read_tokens(documents, document, start, min(stop + 1, plan.lengths[document]), vocabulary)
        found[first:last, 0] = tokens[: stop - start]
        found[first : first + len(tokens) - 1, 1] = tokens[1:]
    return found


def move_to_owners(
    held: Rows, exchange: Exchange, shards: Sequence[SequenceShard], world: World
) -> list[tuple[Rows, Rows]]:
    """Token ids (T,) and labels (T,) of each shard's rows; entered by every slot with what it has read."""
    channel = world.channel(tuple(range(world.home.slots)))
    own = exchange_rows(torch.from_numpy(held).to(world.device), exchange, channel, gradient="none").cpu().numpy()
    found, at = list[tuple[Rows, Rows]](), 0
    for shard in shards:
        ids, labels = np.zeros(shard.local_rows, np.int64), np.full(shard.local_rows, NO_TARGET, np.int64)
        real = shard.rows.cpu().numpy() >= 0
        count = int(real.sum())
        ids[real], labels[real] = own[at : at + count].T
        found.append((ids, labels))
        at += count
    return found


def _rows_of_slot(plan: Plan, slot: int) -> Iterator[Rows]:
    """The rows of a slot in the order in which its shards hold them, micro-batch after micro-batch, without padding."""
    starts = np.cumsum([0, *plan.lengths])
    for batch in plan.micro_batches:
        for _, group in batch.groups_of(slot):
            for document, start, stop, _offset in group.shares.segments(group.slots.index(slot)):
                stop = min(stop, group.lengths[document])
                base = int(starts[group.documents[document]])
                yield np.arange(base + start, max(base + stop, base + start), dtype=np.int64)


def _runs(rows: Rows, starts: Rows) -> Iterator[tuple[int, int]]:
    """Places first to last of neighbouring rows of one document."""
    if not len(rows):
        return
    document = np.searchsorted(starts, rows, side="right")
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(document) != 0)) + 1
    yield from zip([0, *breaks.tolist()], [*breaks.tolist(), len(rows)], strict=True)
