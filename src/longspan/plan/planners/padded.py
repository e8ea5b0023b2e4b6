"""The classical padded batch: one document a row, every row as long as the longest document of the batch.

It is the baseline that packing is compared with, and what a model needs that cannot tell packed documents apart.
"""

from collections.abc import Sequence
from typing import Unpack

from longspan.layout import Layout
from longspan.plan.micro_batch import MicroBatch
from longspan.plan.plan import Plan
from longspan.plan.planners.options import PlanKeywords, PlanOptions, options_of, shows_options
from longspan.plan.planners.request import Request


@shows_options
def plan_padded(
    lengths: Sequence[int],
    home: Layout,
    cp: int,
    *,
    options: PlanOptions | None = None,
    **keywords: Unpack[PlanKeywords],
) -> Plan:
    """Give documents in order to groups of `cp` slots, each document padded to the longest of the batch.

    >>> plan = plan_padded([900, 300, 20], Layout(ranks=8), cp=4, max_tokens_per_slot=512)
    >>> [[group.documents for group in batch.groups] for batch in plan.micro_batches]
    [[(0, 2), (1,)]]

    A group takes as many padded documents in one micro-batch as its slots hold. Arguments and errors are those of
    `plan_fixed`; the cap counts whole padded rows. With partition="contiguous" some slots hold more padding than
    others.
    """
    request = Request.of(lengths, home, options_of(plan_padded, options, keywords))
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
    documents_of_groups = [documents[g::groups] for g in range(min(groups, len(documents)))]
    return MicroBatch(
        tuple(
            request.group(range(g * cp, (g + 1) * cp), group_documents, pad_to=pad)
            for g, group_documents in enumerate(documents_of_groups)
        )
    )
