"""Which micro-batches stand for those of coming plans: one of each kind of group, and the largest.

Kernels are compiled for what a group is, not for how many rows it has: dense or packed, causal or not, very short
documents, very many. Integers only; nothing here needs torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from longspan.plan import Group, MicroBatch, Plan
from longspan.plan.timeline import slot_rows

# FlashAttention-4 (4.0.0b36) compiles for packed documents, for more than 256 of them, and where the longest tile has
# no more rows than fit a block: of 64, 80 or 128 queries (128 / query heads of a key head, forward), and 128 keys.
MANY = 256
SHORT_STEP, SHORT = 8, 128  # chunks of up to SHORT rows count in steps of so many


class Kind(NamedTuple):
    """What kernels and messages of a group depend on."""

    degree: int
    cp_comm_type: str | tuple[str, ...]
    sizes: tuple[int, int] | None
    partition: str
    documents: int  # 0 where there is one, 1 where there are several, 2 above MANY
    whole: int  # documents of which every member holds a part of each chunk: 0, 1, or 2 for several
    short: int  # rows of the longest chunk, in steps; 0 where it is not short


def kind_of(group: Group) -> Kind:
    """The kind of a group.

    >>> kind_of(Group(slots=(0, 1), documents=(0,), lengths=(4096,)))
    Kind(degree=2, cp_comm_type='p2p', sizes=None, partition='zigzag', documents=0, whole=1, short=0)
    """
    rows, chunks = group.laid_out, 2 * group.degree
    longest = -(-max(rows) // chunks)
    return Kind(
        group.degree,
        group.cp_comm_type,
        group.hierarchical_context_parallel_sizes,
        group.partition,
        (len(rows) > 1) + (len(rows) > MANY),
        min(2, sum(n >= chunks for n in rows)),
        -(-longest // SHORT_STEP) if longest <= SHORT else 0,
    )


def smallest_of_each_kind(plans: Iterable[Plan], leave_out: Iterable[Kind] = ()) -> dict[Kind, Group]:
    """The group with the fewest rows of each kind in these plans, large ones first."""
    smallest: dict[Kind, Group] = {}
    for plan in plans:
        for group in (group for batch in plan.micro_batches for group in batch.groups):
            kind = kind_of(group)
            if kind not in smallest or group.rows_per_slot < smallest[kind].rows_per_slot:
                smallest[kind] = group
    for kind in leave_out:
        smallest.pop(kind, None)
    return dict(sorted(smallest.items(), key=lambda item: -item[1].rows_per_slot))


def largest_micro_batch(plans: Sequence[Plan]) -> MicroBatch:
    """The micro-batch in which some slot holds the most rows."""
    batches = [(plan, batch) for plan in plans for batch in plan.micro_batches]
    return max(batches, key=lambda item: int(slot_rows((item[1],), item[0].slots, item[0].row_multiple).max()))[1]


def on_all_slots(group: Group, slots: int) -> list[MicroBatch]:
    """Micro-batches in which every slot is in a group like this one, its own copy of the documents."""
    degree, whole = group.degree, slots // group.degree * group.degree
    blocks = [tuple(range(first, first + degree)) for first in range(0, whole, degree)]
    batches = [MicroBatch(tuple(replace(group, slots=block) for block in blocks))]
    if whole < slots:
        batches.append(MicroBatch((replace(group, slots=tuple(range(slots - degree, slots))),)))
    return batches


def plan_of(batches: Sequence[MicroBatch], like: Plan) -> Plan:
    """A plan of these micro-batches, whose documents are numbered anew, with the mode and home of another plan."""
    lengths, numbered = list[int](), list[MicroBatch]()
    for batch in batches:
        groups = list[Group]()
        for group in batch.groups:
            documents = tuple(range(len(lengths), len(lengths) + len(group.lengths)))
            groups.append(replace(group, documents=documents))
            lengths += group.lengths
        numbered.append(MicroBatch(tuple(groups)))
    return Plan(
        slots=like.slots,
        lengths=tuple(lengths),
        micro_batches=tuple(numbered),
        targets=sum(lengths) - len(lengths),
        mode=like.mode,
        node_size=like.node_size,
        row_multiple=like.row_multiple,
        planner="warm-up",
        cost=like.cost,
    ).check()
