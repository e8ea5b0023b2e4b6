"""When every slot starts and ends each micro-batch of a plan, under a Cost.

Every function is vectorised over groups and slots: a plan of thousands of slots is priced in a fraction of a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from longspan.layout import Floats, Integers
from longspan.plan.cost.cost import Cost
from longspan.plan.micro_batch import Group, MicroBatch, Mode

Way = tuple[str, int, str]  # communication type, a2a size, partition


@dataclass(frozen=True, eq=False)
class GroupTable:
    """All groups of a plan as columns, in plan order, and their members as (group, slot) pairs."""

    micro_batch: Integers  # (G,)
    degree: Integers  # (G,)
    documents: Integers  # (G,)
    tokens: Integers  # (G,) laid-out rows
    squares: Integers  # (G,) sum of squared laid-out rows of a document
    unpadded: Integers  # (G,) sum of squared rows of a document, without padding
    skipped: Floats  # (G,) a member's share of laid-out rows, less the most rows without padding of any member
    group: Integers  # (E,) of each membership
    slot: Integers  # (E,)
    way: Integers  # (G,) index into `ways`
    ways: tuple[Way, ...]  # the types, a2a sizes and partitions that groups have

    @classmethod
    def of(cls, micro_batches: Sequence[MicroBatch]) -> "GroupTable":
        """Make the table of the groups of these micro-batches."""
        groups = [(m, group) for m, batch in enumerate(micro_batches) for group in batch.groups]
        degree = _int_array([len(group.slots) for _, group in groups])
        counts = _int_array([len(group.lengths) for _, group in groups])
        pad = np.repeat(_int_array([group.pad_to or 0 for _, group in groups]), counts)
        lengths = np.fromiter(chain.from_iterable(group.lengths for _, group in groups), np.int64, len(pad))
        rows = np.where(pad > 0, pad, lengths)
        ways: dict[Way, int] = {}
        way = _int_array([ways.setdefault(_group_way(group), len(ways)) for _, group in groups])
        return cls(
            micro_batch=_int_array([m for m, _ in groups]),
            degree=degree,
            documents=counts,
            tokens=_segment_sums(rows, counts),
            squares=_segment_sums(rows * rows, counts),
            unpadded=_segment_sums(lengths * lengths, counts),
            skipped=np.array([_count_skipped_rows(group) for _, group in groups], dtype=np.float64),
            group=np.repeat(np.arange(len(groups)), degree),
            slot=np.fromiter(chain.from_iterable(group.slots for _, group in groups), np.int64, int(degree.sum())),
            way=way,
            ways=tuple(ways),
        )

    @property
    def rows(self) -> Integers:
        """The most rows that one member of each group holds (G,)."""
        return -(-self.tokens // self.degree)

    def seconds(self, cost: Cost, node_size: int) -> Floats:
        """Return the seconds that each group takes of each of its slots (G,), by its own type and partition."""
        together, seconds = self.fewest_together(node_size), np.zeros(len(self.degree))
        for index, (kind, a2a_size, partition) in enumerate(self.ways):
            of_way = self.way == index
            seconds[of_way] = self._priced(cost.under(kind, a2a_size).for_partition(partition), together, of_way)
        return seconds

    def seconds_under(self, cost: Cost, node_size: int) -> Floats:
        """Return the seconds of each group (G,) as if it had the cost's type; inf where heads or degree forbid it.

        A group of one slot, which sends nothing, has any type.
        """
        seconds = self._priced(cost, self.fewest_together(node_size), slice(None))
        return np.where(cost.allows(self.degree) | (self.degree == 1), seconds, np.inf)

    def _priced(self, cost: Cost, together: Integers, some: NDArray[np.bool_] | slice) -> Floats:
        # Kernels skip padding, so a cost with a network, of a real machine, leaves it out; an ideal cost has it.
        squares = (self.unpadded if cost.network else self.squares)[some]
        degree, together = self.degree[some], together[some]
        seconds = cost.group_seconds(
            self.tokens[some], squares, degree, together == degree, self.documents[some], together=together
        )
        return seconds - cost.real_row_seconds * self.skipped[some]

    def fewest_together(self, node_size: int) -> Integers:
        """Return the slots of each group on the node that has the fewest of them; its degree on a single node (G,).

        Slots of a node count together only where they are neighbours in the group.
        """
        if not len(self.degree):
            return np.zeros(0, dtype=np.int64)
        node = self.slot // node_size
        first = np.cumsum(self.degree) - self.degree  # where the members of each group begin
        node_starts = np.flatnonzero(np.diff(node, prepend=-1) != 0)
        starts = np.union1d(node_starts, first)  # of runs of one group's slots on one node
        run_lengths = np.diff(starts, append=len(node))
        return np.minimum.reduceat(run_lengths, np.searchsorted(starts, first))

    def sums_by_slot(self, values: Floats | Integers, count: int, slots: int) -> Floats:
        """Sum a group's value over the groups that each slot is in, for each micro-batch (M, slots)."""
        cells = self.micro_batch[self.group] * slots + self.slot
        sums: Floats = np.bincount(cells, weights=values[self.group], minlength=count * slots).astype(np.float64)
        return sums.reshape(count, slots)


def _group_way(group: Group) -> Way:
    """Return the type of most of a group's layers, its a2a size, and its partition; one slot sends nothing: p2p."""
    types = (group.cp_comm_type,) if isinstance(group.cp_comm_type, str) else group.cp_comm_type
    kind = max(types, key=types.count) if group.degree > 1 else "p2p"
    return kind, (group.hierarchical_context_parallel_sizes or (1,))[0], group.partition


def _count_skipped_rows(group: Group) -> float:
    """Return for how many rows no member computes experts and logits: its share of all, less the busiest's real ones.

    Real rows are the first of each document. Shares are fractions of rows here, not rounded as in `Group.shares`.
    """
    if group.pad_to is None:
        return 0.0
    degree, lengths = group.degree, _int_array(group.lengths)
    share = group.pad_to * len(lengths) / degree
    if group.partition == "zigzag":  # a member has an early and a late chunk of each document
        borders = np.arange(2 * degree + 1)[:, None] * group.pad_to / (2 * degree)
        chunks = np.diff(np.minimum(borders, lengths).sum(axis=1))
        rows = (chunks + chunks[::-1])[:degree]
    else:
        starts = np.arange(len(lengths)) * group.pad_to
        rows = np.diff(np.clip(np.arange(degree + 1)[:, None] * share - starts, 0, lengths).sum(axis=1))
    return max(0.0, share - float(rows.max()))


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each slot works: arrays of shape (micro-batches, slots), times in seconds from the start of the step.

    `rows` held, `busy` seconds of own work, `start` of that work, and `end`, at which the slot may go on. A slot that
    skips a micro-batch has `start == end` and no busy time. `step_seconds` is the end of the whole step, with the
    update and in free mode the closing. On pipeline stages it is theirs; the other times are of the whole model.
    """

    rows: Integers
    busy: Floats
    start: Floats
    end: Floats
    step_seconds: float

    @property
    def idle(self) -> Floats:
        """Share of each micro-batch's slot time that is spent waiting, between 0 and 1 (micro-batches,)."""
        taken = np.diff(self.end, axis=0, prepend=0.0).sum(axis=1)  # slot seconds; 0 if all slots skip it
        return np.clip(1.0 - self.busy.sum(axis=1) / np.maximum(taken, 1e-300), 0.0, 1.0)


def slot_rows(micro_batches: Sequence[MicroBatch], slots: int, row_multiple: int = 1) -> Integers:
    """Return the rows that each slot holds in each micro-batch (M, slots), with padding, in whole `row_multiple`s."""
    table = GroupTable.of(micro_batches)
    rows = table.sums_by_slot(table.rows, len(micro_batches), slots).astype(np.int64)
    return -(-rows // row_multiple) * row_multiple


def timeline(
    micro_batches: Sequence[MicroBatch],
    slots: int,
    cost: Cost,
    *,
    mode: Mode = "lockstep",
    node_size: int = 8,
    row_multiple: int = 1,
) -> Timeline:
    """Return when each slot works in each micro-batch; slot ids must be below `slots`, which `Plan.check` checks."""
    table, count = GroupTable.of(micro_batches), len(micro_batches)
    seconds = table.seconds(cost, node_size)
    busy = table.sums_by_slot(seconds, count, slots)
    if cost.launch_seconds:  # a slot is not faster than its host
        launches = cost.group_launch_seconds + cost.document_launch_seconds * table.documents.astype(np.float64)
        hosts = cost.launch_seconds + table.sums_by_slot(launches, count, slots) - cost.micro_batch_seconds
        busy = np.where(busy > 0, np.maximum(busy, hosts), busy)
    rows = table.sums_by_slot(table.rows, count, slots).astype(np.int64)
    if mode == "lockstep":
        slowest = busy.max(axis=1).tolist()
        turns, total = np.array(cost.turn_seconds(slowest))[:, None], cost.lockstep_seconds(slowest)
        end = np.cumsum(turns, axis=0) * np.ones_like(busy)
        start = end - turns
        busy += cost.micro_batch_seconds  # a slot without documents launches a dummy micro-batch
    else:
        active = np.zeros((count, slots), dtype=np.bool_)
        active[table.micro_batch[table.group], table.slot] = True
        busy[active] += cost.micro_batch_seconds
        start, end, total = _free_times(busy, active, _label_joined_slots(table, count, slots))
        total += cost.closing_seconds
    return Timeline(-(-rows // row_multiple) * row_multiple, busy, start, end, total + cost.update_seconds)


def _free_times(busy: Floats, active: NDArray[np.bool_], component: Integers) -> tuple[Floats, Floats, float]:
    """Return when each slot starts and ends each micro-batch, and the last end.

    Slots that groups join, which have one `component`, start when the last of them is ready, and end with the slowest.
    A slot that is not `active` has no documents and waits for nobody.
    """
    count, slots = busy.shape
    start, end, clock = np.zeros_like(busy), np.zeros_like(busy), np.zeros(slots)
    for m in range(count):
        active_slots = np.flatnonzero(active[m])
        root = component[m, active_slots]
        ready, longest_seconds = np.zeros(slots), np.zeros(slots)
        np.maximum.at(ready, root, clock[active_slots])
        np.maximum.at(longest_seconds, root, busy[m, active_slots])
        start[m] = clock
        start[m, active_slots] = ready[root]
        clock[active_slots] = ready[root] + longest_seconds[root]
        end[m] = clock
    return start, end, float(clock.max(initial=0.0))


def _label_joined_slots(table: GroupTable, count: int, slots: int) -> Integers:
    """Return the lowest slot that groups join each slot to in each micro-batch (M, slots).

    By hooking and pointer jumping: a slot takes the lowest label in any of its groups, and then that label's label,
    until nothing changes. Labels count through all micro-batches, m x slots + slot.
    """
    label = np.arange(count * slots)
    cells = table.micro_batch[table.group] * slots + table.slot
    first = np.cumsum(table.degree) - table.degree
    while len(cells):
        low = np.minimum.reduceat(label[cells], first)[table.group]
        next_label = label.copy()
        np.minimum.at(next_label, label[cells], low)
        next_label = next_label[next_label]
        if np.array_equal(next_label, label):
            break
        label = next_label
    return label.reshape(count, slots) % slots


def _segment_sums(values: Integers, counts: Integers) -> Integers:
    """Sum the first counts[0] values, the next counts[1], and so on (len(counts),); 0 for a count of 0."""
    total = np.concatenate(([0], np.cumsum(values)))
    stop = np.cumsum(counts)
    return total[stop] - total[stop - counts]


def _int_array(values: Sequence[int]) -> Integers:
    return np.array(values, dtype=np.int64)
