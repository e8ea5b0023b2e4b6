"""The classical padded batch: one document a row, every row as long as the longest document of the batch.

It is the baseline that packing is compared with, and what a model needs that cannot tell packed documents apart.
"""

from collections.abc import Sequence

from longspan.layout import Layout
from longspan.plan.cost.cost import DEFAULT_COST, Cost
from longspan.plan.micro_batch import MicroBatch, Mode, PartitionKind
from longspan.plan.plan import Plan
from longspan.plan.planners.request import Request


def plan_padded(
    lengths: Sequence[int],
    home: Layout,
    cp: int,
    *,
    max_tokens_per_slot: int | None = None,
    targets: int | None = None,
    cp_comm_type: str | Sequence[str] = "p2p",
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    cost: Cost = DEFAULT_COST,
    node_size: int = 8,
    micro_batch_multiple: int = 1,
    mode: Mode = "lockstep",
    row_multiple: int = 1,
    partition: PartitionKind = "zigzag",
    heads: int | None = None,
    allow_empty: bool = True,
) -> Plan:
    """Deal documents, in the order given, to groups of `cp` slots, each padded to the longest of the batch.

    >>> plan = plan_padded([900, 300, 20], Layout(ranks=8), cp=4, max_tokens_per_slot=512)
    >>> [[group.documents for group in batch.groups] for batch in plan.micro_batches]
    [[(0, 2), (1,)]]

    A group takes as many padded documents in one micro-batch as its slots hold; arguments, the cap in whole padded
    rows, and errors are those of `plan_fixed`. With partition="contiguous" some slots hold more padding than others.
    """
    request = Request.of(
        lengths,
        home,
        targets=targets,
        max_tokens_per_slot=max_tokens_per_slot,
        cp_comm_type=cp_comm_type,
        hierarchical_context_parallel_sizes=hierarchical_context_parallel_sizes,
        allow_empty=allow_empty,
        cost=cost,
        node_size=node_size,
        micro_batch_multiple=micro_batch_multiple,
        mode=mode,
        row_multiple=row_multiple,
        partition=partition,
        heads=heads,
    )
    cp = request.check_degree(home, cp)
    groups = request.slots // cp
    return request.plan([_micro_batch(request, cp, rounds) for rounds in _rounds(request, cp, groups)], "padded")


def _rounds(request: Request, cp: int, groups: int) -> list[range]:
    """The documents of each micro-batch: every round gives each group one more, as many rounds as its slots hold."""
    if not request.lengths:
        return []
    count, pad = len(request.lengths), max(request.lengths)
    at_once = count if request.rows is None else request.rows * cp // pad
    return [range(start, min(start + at_once * groups, count)) for start in range(0, count, at_once * groups)]


def _micro_batch(request: Request, cp: int, documents: range) -> MicroBatch:
    """Document after document to group after group, round after round."""
    pad, groups = max(request.lengths), request.slots // cp
    held = [documents[g::groups] for g in range(min(groups, len(documents)))]
    return MicroBatch(
        tuple(request.group(range(g * cp, (g + 1) * cp), mine, pad_to=pad) for g, mine in enumerate(held))
    )
