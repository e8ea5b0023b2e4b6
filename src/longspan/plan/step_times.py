"""When every slot starts and ends each micro-batch of a plan, under a Cost; and a time that no plan can beat.

All is vectorised over groups and slots. Planners have no part in the bound, which follows from the lengths only: a
mistake of theirs shows as a plan that beats it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from longspan.errors import PlanError
from longspan.layout import Floats, Integers
from longspan.plan.cost.cost import Cost
from longspan.plan.micro_batch import Group, MicroBatch, Mode, most_common_type

TypeAndPartition = tuple[str, int, str]  # communication type, a2a size, partition


class GroupTable:
    """All groups of micro-batches as columns, in order (G,), and their members as (group, slot) pairs (E,)."""

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        groups = [group for batch in micro_batches for group in batch.groups]
        counts = _int_array([len(group.lengths) for group in groups])
        # Each document has the rows to which it is padded (0: it is not), its own, and those that are laid out.
        pad = np.repeat(_int_array([group.pad_to or 0 for group in groups]), counts)
        lengths = np.fromiter(chain.from_iterable(group.lengths for group in groups), np.int64, len(pad))
        rows = np.where(pad > 0, pad, lengths)
        squares = rows * rows
        unpadded = lengths * lengths
        if any(group.parents is not None for group in groups):  # rows of branches see those of their prefixes
            bases = np.fromiter(chain.from_iterable(group.bases for group in groups), np.int64, len(pad))
            squares += 2 * rows * bases
            unpadded += 2 * lengths * bases
        first = np.cumsum(counts) - counts  # the first document of each group
        self.micro_batch: Integers = _int_array([m for m, batch in enumerate(micro_batches) for _ in batch.groups])
        self.degree: Integers = _int_array([len(group.slots) for group in groups])
        self.documents = counts
        self.tokens: Integers = np.add.reduceat(rows, first)  # laid-out rows
        self.squares: Integers = np.add.reduceat(squares, first)  # sum of squared laid-out rows of a document
        self.unpadded: Integers = np.add.reduceat(unpadded, first)  # the same without padding
        # The rows of padding that even the busiest member leaves out.
        self.skipped: Floats = np.array(
            [0.0 if group.pad_to is None else _count_skipped_rows(group, group.pad_to) for group in groups]
        )
        # Each membership has the index of its group.
        self.group: Integers = np.repeat(np.arange(len(groups)), self.degree)
        self.slot: Integers = np.fromiter(
            chain.from_iterable(group.slots for group in groups), np.int64, len(self.group)
        )
        way_numbers: dict[TypeAndPartition, int] = {}
        way = list[int]()
        for group in groups:
            kind = most_common_type(group.cp_comm_type) if group.degree > 1 else "p2p"
            size = (group.hierarchical_context_parallel_sizes or (1,))[0]
            way.append(way_numbers.setdefault((kind, size, group.partition), len(way_numbers)))
        self.way: Integers = _int_array(way)  # index into `ways`
        self.ways: tuple[TypeAndPartition, ...] = tuple(
            way_numbers
        )  # the types, a2a sizes and partitions that groups have

    def group_seconds(self, cost: Cost, node_size: int) -> Floats:
        """Return the seconds that each group takes of each of its slots (G,), by its own type and partition."""
        together = self.fewest_slots_on_one_node(node_size)
        seconds = np.zeros(len(self.degree))
        for index, (kind, a2a_size, partition) in enumerate(self.ways):
            of_way = self.way == index
            seconds[of_way] = self._price_groups(
                cost.under(kind, a2a_size).for_partition(partition), together, of_way
            )
        return seconds

    def group_seconds_with_type(self, cost: Cost, node_size: int) -> Floats:
        """Return the seconds of each group (G,) as if it had the cost's type; inf where heads or degree forbid it. A
        group of one slot, which sends nothing, has any type.
        """
        seconds = self._price_groups(cost, self.fewest_slots_on_one_node(node_size), slice(None))
        return np.where(cost.allows(self.degree) | (self.degree == 1), seconds, np.inf)

    def _price_groups(self, cost: Cost, together: Integers, some: NDArray[np.bool_] | slice) -> Floats:
        """Priced as if all of `some` had the cost's type; `together` (G,) has each group's fewest slots on one node."""
        # Kernels skip padding, so a cost with a network, of a real machine, leaves it out; an ideal cost has it.
        squares = (self.unpadded if cost.network else self.squares)[some]
        degree = self.degree[some]
        together = together[some]
        tokens = self.tokens[some]
        documents = self.documents[some]
        inside = together == degree
        seconds = cost.group_seconds(tokens, squares, degree, inside, documents, together=together)
        return seconds - cost.real_row_seconds * self.skipped[some]

    def fewest_slots_on_one_node(self, node_size: int) -> Integers:
        """Return for each group how many of its slots are on the node that has the fewest of them (G,). Slots of a node
        count together only where they are neighbours in the group.
        """
        if not len(self.degree):
            return np.zeros(0, dtype=np.int64)
        node = self.slot // node_size
        first = np.cumsum(self.degree) - self.degree  # where the members of each group begin
        node_starts = np.flatnonzero(np.diff(node, prepend=-1) != 0)
        # Runs of one group's slots on one node start here.
        starts = np.union1d(node_starts, first)
        run_lengths = np.diff(starts, append=len(node))
        return np.minimum.reduceat(run_lengths, np.searchsorted(starts, first))

    def sums_by_slot(self, values: Floats | Integers, count: int, slots: int) -> Floats:
        """Sum a group's value over the groups that each slot is in, for each micro-batch (M, slots)."""
        cells = self.micro_batch[self.group] * slots + self.slot
        sums: Floats = np.bincount(cells, weights=values[self.group], minlength=count * slots).astype(np.float64)
        return sums.reshape(count, slots)

    def rows_by_slot(self, count: int, slots: int, row_multiple: int) -> Integers:
        """Return the rows that each slot holds in each micro-batch (M, slots), the most of any member of its groups, in
        whole `row_multiple`s.
        """
        # One member holds at most so many tokens.
        most_of_groups = -(-self.tokens // self.degree)
        rows = self.sums_by_slot(most_of_groups, count, slots).astype(np.int64)
        return -(-rows // row_multiple) * row_multiple


def _count_skipped_rows(group: Group, pad_to: int) -> float:
    """A member's share of the laid-out rows, less the real rows of the member that has most of these. A document's
    first rows are the real ones. Shares are fractions of rows here, not rounded as in `Group.shares`."""
    degree = group.degree
    lengths = _int_array(group.lengths)
    share = pad_to * len(lengths) / degree
    if group.partition == "zigzag":  # a member has an early and a late chunk of each document
        borders = np.arange(2 * degree + 1)[:, None] * pad_to / (2 * degree)
        chunks = np.diff(np.minimum(borders, lengths).sum(axis=1))
        rows = (chunks + chunks[::-1])[:degree]
    else:
        starts = np.arange(len(lengths)) * pad_to
        rows = np.diff(np.clip(np.arange(degree + 1)[:, None] * share - starts, 0, lengths).sum(axis=1))
    return max(0.0, share - float(rows.max()))


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each slot works: arrays of shape (micro-batches, slots), times in seconds from the start of the step.

    `rows` held, `busy` seconds of own work, `start` of that work, and `end`, at which the slot may go on. A slot that
    skips a micro-batch has `start == end` and no busy time. `step_seconds` is the end of the whole step, with the
    update and the closing. On pipeline stages it is theirs; the other times are of the whole model.
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
    return GroupTable(micro_batches).rows_by_slot(len(micro_batches), slots, row_multiple)


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
    table = GroupTable(micro_batches)
    count = len(micro_batches)
    seconds = table.group_seconds(cost, node_size)
    busy = table.sums_by_slot(seconds, count, slots)
    if cost.launch_seconds:  # a slot is not faster than its host
        launches = cost.group_launch_seconds + cost.document_launch_seconds * table.documents.astype(np.float64)
        # The seconds of a micro-batch are left out, as they are added to both below.
        hosts = cost.launch_seconds + table.sums_by_slot(launches, count, slots) - cost.micro_batch_seconds
        busy = np.where(busy > 0, np.maximum(busy, hosts), busy)
    if mode == "lockstep":
        slowest = busy.max(axis=1).tolist()
        turns = np.array(cost.turn_seconds(slowest))[:, None]
        total = cost.lockstep_seconds(slowest)
        end = np.cumsum(turns, axis=0) * np.ones_like(busy)
        start = end - turns
        busy += cost.micro_batch_seconds  # a slot without documents launches a dummy micro-batch
    else:
        active = np.zeros((count, slots), dtype=np.bool_)
        active[table.micro_batch[table.group], table.slot] = True
        busy[active] += cost.micro_batch_seconds
        start, end, total = _free_times(table, busy, active)
        # All weights are gathered before the first micro-batch.
        total += cost.paging_seconds
    total += cost.closing_seconds + cost.update_seconds
    return Timeline(table.rows_by_slot(count, slots, row_multiple), busy, start, end, total)


def _free_times(table: GroupTable, busy: Floats, active: NDArray[np.bool_]) -> tuple[Floats, Floats, float]:
    """Returns (begins, ends (M, slots), last end). Slots that are joined by groups, directly or through others,
    start when the last of them is ready, and end with the slowest. A slot that is not `active` waits for nobody."""
    count, slots = busy.shape
    # Each slot gets the lowest of the slots that it is joined to as its label, by hooking and pointer jumping: it takes
    # the lowest label in any of its groups, and then that label's label, until nothing changes. Labels count through
    # all micro-batches.
    label = np.arange(busy.size)
    cells = table.micro_batch[table.group] * slots + table.slot
    first = np.cumsum(table.degree) - table.degree  # the first member of each group
    while len(cells):
        low = np.minimum.reduceat(label[cells], first)[table.group]
        next_label = label.copy()
        np.minimum.at(next_label, label[cells], low)
        next_label = next_label[next_label]
        if np.array_equal(next_label, label):
            break
        label = next_label
    joined_to = label.reshape(count, slots) % slots
    start = np.zeros_like(busy)
    end = np.zeros_like(busy)
    clock = np.zeros(slots)
    for m in range(count):
        active_slots = np.flatnonzero(active[m])
        root = joined_to[m, active_slots]  # the joined slots' start and seconds are gathered at the lowest of them
        ready = np.zeros(slots)
        longest_seconds = np.zeros(slots)
        np.maximum.at(ready, root, clock[active_slots])
        np.maximum.at(longest_seconds, root, busy[m, active_slots])
        start[m] = clock
        start[m, active_slots] = ready[root]
        clock[active_slots] = ready[root] + longest_seconds[root]
        end[m] = clock
    return start, end, float(clock.max(initial=0.0))


def _int_array(values: Sequence[int]) -> Integers:
    return np.array(values, dtype=np.int64)


ROUNDING = 1e-10  # relative; a plan may meet the bound exactly and sum its seconds in another order


@dataclass(frozen=True)
class Bound:
    """Two lower bounds of a step in seconds: `area` + `crossing`, and `longest`. `seconds` is the larger of them,
    rounded down by 1e-10 of itself.

    `area`: all work spread evenly over all slots and their stages, and the launches of the fewest micro-batches.
    `crossing`: the messages of documents that are longer than a slot's cap, counted on ideal links only, so that plans
    on measured links are 2 to 20 % above the bound. `longest`: the longest document at its best degree.
    """

    area: float
    longest: float
    crossing: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.area + self.crossing, self.longest) * (1 - ROUNDING)


def lower_bound_seconds(
    lengths: Sequence[int],
    slots: int,
    max_tokens_per_slot: int | None,
    cost: Cost,
    mode: str = "lockstep",
    *,
    max_cp: int | None = None,
    node_size: int = 8,
    bases: Sequence[int] | Integers = (),
) -> Bound:
    """Return the bound of a step of documents of these lengths; max_tokens_per_slot None means no limit. `bases` are
    the rows that come before each document's own, where documents share prefixes. `max_cp` limits the degree of any
    group.

    The slots of a step have slots · seconds together, of which work, unavoidable messages and launches are parts that
    do not overlap: so their sum, divided by the slots, is a bound (area and crossing). Raises PlanError if the longest
    document fits no group at all.
    """
    rows = np.asarray(lengths, dtype=np.int64)
    widest = min(max_cp or slots, slots)
    squares = rows.astype(np.float64) ** 2
    if len(bases):
        squares += 2.0 * rows * np.asarray(bases)
    attention = math.fsum(squares * cost.attention_seconds)
    work = math.fsum(rows * float(cost.work_seconds(1, 0))) + attention
    # In free mode a slot skips micro-batches without documents for it: it is in as many as its rows fill, on average.
    mean_micro_batches = int(rows.sum()) / (slots * max_tokens_per_slot) if max_tokens_per_slot else 0.0
    launches = max(1, math.ceil(mean_micro_batches)) if mode == "lockstep" else mean_micro_batches
    # Every micro-batch takes its launches beside its work, and no less than the host needs.
    area = max(work / slots + cost.micro_batch_seconds * launches, cost.launch_seconds * launches) / cost.stages
    if not len(rows):
        return Bound(area, 0.0)
    # The longest document in a group of its own: the least over all degrees that the cap allows and all types of
    # compute / degree + messages that show on ideal links, and one launch. Of states the latency alone counts: their
    # bytes depend on the group's other documents.
    length = int(rows.max())
    narrowest = 1 if max_tokens_per_slot is None else -(-length // max_tokens_per_slot)
    if narrowest > widest:
        raise PlanError(
            f"a document of {length} rows needs {narrowest} slots at max_tokens_per_slot {max_tokens_per_slot}, but a "
            f"group has at most {widest}; raise max_tokens_per_slot or cut the document"
        )
    degree = np.arange(narrowest, widest + 1)
    # Messages of a network depend on the group's place, so that the bound has none.
    if cost.network:
        seconds = cost.work_seconds(length, float(length) ** 2) / degree
    else:
        # a group that fits a host may be across hosts too, should these links be faster
        fastest = max(cost.inside_bytes_per_second, cost.across_bytes_per_second)
        alone = replace(cost, states=None, inside_bytes_per_second=fastest)
        together = np.minimum(degree, node_size)
        seconds = alone.group_seconds(length, length**2, degree, inside=together == degree, together=together)
        seconds = seconds + (cost.states.step_seconds if cost.states else 0.0) * (degree > 1)
    longest = float(seconds.min()) + cost.micro_batch_seconds
    if max_tokens_per_slot is None or cost.network:
        return Bound(area, longest)
    messages = _ideal_message_seconds(rows, max_tokens_per_slot, attention, cost)
    return Bound(area, longest, messages / slots / cost.stages)


def _ideal_message_seconds(rows: NDArray[np.int64], cap: int, attention: float, cost: Cost) -> float:
    """A document of L rows, more than the cap, needs n = ⌈L / cap⌉ slots or more. Its group has at least L / cap
    slots for these rows, each of which waits for the latency of n − 1 steps of a ring, or of one message under
    other types. Its rows go to n − 1 other slots at the least under `p2p` and `all_gather`; under `a2a` (n − 1) /
    n of them leave their slot once. Attention hides messages of a ring alone. Under "auto" and `a2a+p2p`, which
    may be rings or exchanges, only the latency counts."""
    if not (rows > cap).any():
        return 0.0
    long_rows = rows[rows > cap].astype(np.float64)
    needed = np.ceil(long_rows / cap)
    kind = cost.cp_comm_type
    steps = needed - 1 if kind == "p2p" else np.ones_like(long_rows)
    latency_seconds = math.fsum(long_rows / cap * cost.ring_step_seconds * steps)
    fastest = max(cost.inside_bytes_per_second, cost.across_bytes_per_second)
    ring_seconds = math.fsum(cost.ring_bytes * long_rows * (needed - 1)) / fastest
    exchange_seconds = math.fsum(cost.exchange_bytes * long_rows * (1 - 1 / needed)) / fastest
    if kind == "p2p":
        return max(ring_seconds - attention, 0.0) + latency_seconds
    return latency_seconds + {"all_gather": ring_seconds, "a2a": exchange_seconds}.get(kind, 0.0)
