"""The groups of a divided draft, micro-batch by micro-batch, in one order for all slots.

Within a micro-batch narrow groups come before wide ones, equal ones by their first slot. Documents that have the same
slots are one group.
"""

from collections.abc import Mapping
from dataclasses import replace

from longspan.plan.dynamic.division import Division
from longspan.plan.dynamic.draft import Draft
from longspan.plan.dynamic.problem import Problem
from longspan.plan.micro_batch import Group, MicroBatch


def micro_batches(draft: Draft, division: Division) -> list[MicroBatch]:
    """The micro-batches of a draft, longest documents of each group first."""
    held: list[dict[tuple[int, ...], list[int]]] = [{} for _ in draft.durations]
    for anchor in draft.anchors:
        slots = tuple(sorted(slot for start, count in anchor.parts for slot in range(start, start + count)))
        held[anchor.micro_batch].setdefault(slots, []).append(anchor.item)
    shared, places, cells = division.shared.tolist(), division.slot.tolist(), draft.cells
    for cell, fillers in enumerate(cells.fillers):
        if not fillers:
            continue
        groups, start, width = held[cells.micro_batch[cell]], cells.start[cell], cells.width[cell]
        whole = tuple(range(start, start + width))
        for position, item in enumerate(fillers):
            slots = whole if position < shared[cell] else (start + places[cell][position],)
            groups.setdefault(slots, []).append(item)
    return [micro_batch_of(draft.problem, groups) for groups in held if groups]


def micro_batch_of(problem: Problem, groups: Mapping[tuple[int, ...], list[int]]) -> MicroBatch:
    """The micro-batch in which these slots have these items."""
    ordered = sorted(groups.items(), key=lambda pair: (len(pair[0]), pair[0]))
    return MicroBatch(tuple(_group(problem, slots, items) for slots, items in ordered))


def _group(problem: Problem, slots: tuple[int, ...], items: list[int]) -> Group:
    return problem.request.group(slots, [d for item in sorted(items) for d in problem.documents[item]])


def longest_first(batch: MicroBatch) -> MicroBatch:
    """The same groups with their documents by falling length, so that ids do not matter."""
    groups: list[Group] = []
    for group in batch.groups:
        order = sorted(range(len(group.documents)), key=lambda i: (-group.lengths[i], group.documents[i]))
        documents, lengths = (tuple(values[i] for i in order) for values in (group.documents, group.lengths))
        groups.append(replace(group, documents=documents, lengths=lengths))
    return MicroBatch(tuple(groups))
