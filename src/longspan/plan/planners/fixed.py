"""Plans in which every group has the same context-parallel degree, as contiguous blocks of slots: packed or padded.

Documents are packed in bins: the fewest that hold them, or a number of bins with about equal work.
The padded batch is the baseline that packing is compared with, and what a model needs that cannot tell packed documents
apart.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from typing import Unpack

import numpy as np

from longspan.errors import PlanError, plural
from longspan.layout import Flags, Floats, Integers, Layout
from longspan.plan.micro_batch import Group, MicroBatch
from longspan.plan.plan import Plan
from longspan.plan.planners.options import PlanKeywords, PlanOptions, expand_option_signature
from longspan.plan.planners.request import Request, longest_item


@expand_option_signature
def plan_fixed(
    lengths: Sequence[int],
    home: Layout,
    cp: int,
    *,
    options: PlanOptions | None = None,
    **keywords: Unpack[PlanKeywords],
) -> Plan:
    """Pack documents into micro-batches for groups of `cp` slots each.

    >>> plan = plan_fixed([900, 300, 20], Layout(ranks=8), cp=4, max_tokens_per_slot=512)
    >>> [group.documents for group in plan.micro_batches[0].groups]
    [(0,), (1, 2)]

    Every slot runs the same number of micro-batches, a multiple of `micro_batch_multiple`, and holds at most
    `max_tokens_per_slot` rows in each, in whole multiples of `row_multiple`. `targets` is what divides the loss
    (default length − 1 a document). `hierarchical_context_parallel_sizes` count if a layer uses a2a+p2p; None: the
    sizes that are fastest for each group. `partition` is how the rows of a group are divided between its slots.
    "zigzag": of each document equal shares from its beginning and its end, so that every slot has as much causal
    attention. "contiguous": documents end to end, one run of rows a slot; it pays under `a2a`, which divides heads, not
    rows; under the other types slots with the ends of long documents compute more, and a step takes longer than `cost`
    predicts. With `heads`, the model's query heads, which the home's tp divides, a degree or first size that does not
    divide them is an error here; without it, one of `attend` in the step. All keyword arguments are fields of
    `PlanOptions`, which `options` takes as one value.

    No documents give a step of dummy micro-batches; with `allow_empty=False`, an error. Raises PlanError if cp does not
    divide the slots, a document is longer than cp x max_tokens_per_slot, or a type or number is impossible; LayoutError
    for a bad length.
    """
    request = Request.from_arguments(lengths, home, options, keywords)
    cp = request.check_degree(home, cp)
    return request.make_plan(Packer(request, cp).micro_batches() if request.lengths else (), "fixed")


def smallest_fitting_degree(lengths: Sequence[int], home: Layout, options: PlanOptions) -> int:
    """Return the smallest degree that divides the slots, that the heads allow, and whose slots' caps hold the longest
    document. If there is none, return all slots: a planner then raises the error that says why.
    """
    cap = options.rows
    longest = longest_item(lengths, home, options)
    fits = [d for d in range(1, home.slots + 1) if home.slots % d == 0 and (not cap or longest <= cap * d)]
    return next((degree for degree in fits if options.allows(degree, home.tp)), home.slots)


def pack_first_fit(lengths: Sequence[int], room: int) -> list[int]:
    """Choose the bin of each document: the first with room for its rows, of bins with `room` rows each. With lengths in
    falling order this is first-fit decreasing. The bins are the leaves of a binary tree in an array (node n has the
    children 2n and 2n + 1), whose nodes hold the most room of any bin below: a search goes left where that has room
    enough.
    """
    leaves = 1
    # Two neighbouring bins hold more than `room` rows together, so no more than this many bins are filled.
    while leaves < min(len(lengths), 2 * sum(lengths) // room + 1):
        leaves *= 2
    most_room = [room] * (2 * leaves)
    bins: list[int] = []
    for length in lengths:
        node = 1
        while node < leaves:
            node *= 2
            if most_room[node] < length:
                node += 1
        bins.append(node - leaves)
        room_below = most_room[node] - length
        most_room[node] = room_below
        while node > 1:
            sibling_room = most_room[node ^ 1]
            node //= 2
            room_below = max(room_below, sibling_room)
            if most_room[node] == room_below:  # so nothing changes above either
                break
            most_room[node] = room_below
    return bins


def pack_least_loaded(lengths: Sequence[int], work: Sequence[float], bins: int, room: int) -> list[int] | None:
    """Choose the bin of each document, of `bins` bins that hold `room` rows each: the one with the least work among
    those that still have room for it. Returns None if a document fits none. Lengths (rows) must be in falling order;
    `work` are seconds.
    """
    room_left = [room] * bins
    idle = [(0.0, b) for b in range(bins)]  # a heap of (load, bin): those that may hold the next document
    # Bins too full for it, (−room left, bin, load), wait until the documents have become short enough.
    full: list[tuple[int, int, float]] = []
    places: list[int] = []
    for length, seconds in zip(lengths, work, strict=True):
        while full and -full[0][0] >= length:
            _, b, load = heappop(full)
            heappush(idle, (load, b))
        while idle and room_left[idle[0][1]] < length:
            load, b = heappop(idle)
            heappush(full, (-room_left[b], b, load))
        if not idle:
            return None
        load, b = idle[0]
        heapreplace(idle, (load + seconds, b))
        room_left[b] -= length
        places.append(b)
    return places


class Packer:
    """Documents longest first, and the groups of `cp` slots, which divide those of the request, that they can go to; a
    tree counts as one document here.

    An *assignment* is an array (documents,) with the place of each document, in that order: micro-batch x groups +
    group. A *bin* holds the documents of one place, before it is decided which place that is.
    """

    def __init__(self, request: Request, cp: int) -> None:
        self.request = request
        self.cp = cp
        rows, squares = request.tree_sizes
        self.order: Integers = np.argsort(-rows, kind="stable")  # ids, longest first, equal lengths by id
        lengths = rows[self.order]
        # Lengths, squares and work are in that order.
        self.lengths: list[int] = lengths.tolist()
        # Squares of trees are those of `Request.tree_sizes`.
        self.squares: Integers = squares[self.order]
        self.work: list[float] = request.cost.work_seconds(lengths, self.squares).tolist()  # seconds
        self.room: int = (
            int(lengths.sum()) if request.rows is None else request.rows * cp
        )  # rows that a group holds
        first = np.arange(0, request.slots, cp)
        self.groups: int = len(first)
        # (groups,) whether all its slots share a node
        self.inside: Flags = first // request.node_size == (first + cp - 1) // request.node_size

    def assignments_to_price(self) -> Iterator[Integers]:
        """Yield assignments that are worth pricing.

        These are the fewest bins; bins of about equal work, in as few micro-batches and in one multiple more; and in
        free mode, where groups do not wait for each other, micro-batches that each group fills on its own.
        """
        fewest_bins = self._sort_bins(pack_first_fit(self.lengths, self.room))
        yield self._place_bins(self._balance_groups(fewest_bins))
        groups = self.groups
        multiple = self.request.micro_batch_multiple
        fewest_micro_batches = self._count_micro_batches(fewest_bins)
        for count in (fewest_micro_batches, fewest_micro_batches + multiple):
            level = pack_least_loaded(self.lengths, self.work, count * groups, self.room)
            if level is not None:
                yield self._place_bins(self._balance_groups(self._sort_bins(level)))
        if self.request.mode == "free":  # documents to groups of about equal work, whatever their rows
            group_of_document = np.array(
                pack_least_loaded(self.lengths, self.work, groups, sum(self.lengths)), dtype=np.int64
            )
            assignment = np.empty_like(group_of_document)
            for group in range(groups):
                documents = np.flatnonzero(group_of_document == group)
                bins = pack_first_fit([self.lengths[i] for i in documents.tolist()], self.room)
                assignment[documents] = np.array(bins, dtype=np.int64) * groups + group
            yield assignment

    def seconds(self, assignment: Integers) -> float:
        """Return the seconds of the step, exactly rounded, so that all hosts prefer the same assignment. In lockstep
        the slowest group of each micro-batch counts, in free mode the busiest group.
        """
        matrix = self._seconds_of_places(assignment, self.inside)
        launch = self.request.cost.micro_batch_seconds
        if self.request.mode == "lockstep":
            return self.request.cost.lockstep_seconds(matrix.max(axis=1).tolist())
        return max(math.fsum(column[column > 0] + launch) for column in matrix.T)

    def micro_batches(self, assignment: Integers | None = None) -> list[MicroBatch]:
        """Make the micro-batches of an assignment (None: the fastest): for each place with documents a group, with
        rising ids.
        """
        assignment = min(self.assignments_to_price(), key=self.seconds) if assignment is None else assignment
        documents_of = defaultdict[int, list[int]](list)
        for item, place in sorted(zip(self.order.tolist(), assignment.tolist(), strict=True)):
            documents_of[place] += self.request.trees[item]
        batches: list[list[Group]] = [[] for _ in range(self._count_micro_batches(assignment))]
        for place in sorted(documents_of):
            m, g = divmod(place, self.groups)
            batches[m].append(self.request.make_group(range(g * self.cp, (g + 1) * self.cp), documents_of[place]))
        return [MicroBatch(tuple(groups)) for groups in batches]

    def _sort_bins(self, bins: Sequence[int]) -> Integers:
        """The slowest bin is first. The groups of bins are not chosen yet, so every bin is priced inside a node."""
        places = np.array(bins, dtype=np.int64)
        rank = np.argsort(np.argsort(-self._bin_seconds(places, int(places.max()) + 1, inside=True), kind="stable"))
        return rank[places]

    def _balance_groups(self, assignment: Integers) -> Integers:
        """The documents of each micro-batch are dealt anew by equal work, where that makes its slowest group faster.
        Groups are placed later, so all are priced inside a node."""
        count = self._count_micro_batches(assignment)
        # Each document has the index of its micro-batch.
        micro_batch = assignment // self.groups
        new_assignment = assignment.copy()
        by_micro_batch = np.argsort(micro_batch, kind="stable")
        documents_of_batches = np.split(by_micro_batch, np.cumsum(np.bincount(micro_batch))[:-1])
        for m, documents in enumerate(documents_of_batches):
            indices: list[int] = documents.tolist()
            lengths = [self.lengths[i] for i in indices]
            work = [self.work[i] for i in indices]
            bins = pack_least_loaded(lengths, work, self.groups, self.room)
            if bins is not None:
                new_assignment[documents] = m * self.groups + np.array(bins, dtype=np.int64)
        seconds_before, seconds_after = (
            self._seconds_of_places(places, inside=True, count=count).max(axis=1)
            for places in (assignment, new_assignment)
        )
        return np.where((seconds_after < seconds_before)[micro_batch], new_assignment, assignment)

    def _place_bins(self, assignment: Integers) -> Integers:
        """In lockstep groups inside a node get the slowest bins, as messages are faster there. In free mode groups
        with the least work in the micro-batches before get them, as only a group's total counts."""
        groups = self.groups
        matrix = self._seconds_of_places(assignment, inside=True)
        load = np.zeros(groups)  # seconds of each group in the micro-batches before
        place = np.empty(matrix.shape, dtype=np.int64)  # where each bin of each micro-batch goes
        for m, seconds in enumerate(matrix):
            penalty = ~self.inside if self.request.mode == "lockstep" else load
            place[m, np.argsort(-seconds, kind="stable")] = m * groups + np.argsort(penalty, kind="stable")
            load[place[m] - m * groups] += seconds
        return place.reshape(-1)[assignment]

    def _seconds_of_places(self, assignment: Integers, inside: Flags | bool, count: int | None = None) -> Floats:
        """Seconds (micro-batches, groups), without the launch; 0 for a place without documents. `inside`: the slots
        of each group, or of all, share a node; `count` micro-batches (None: those of the assignment)."""
        count = count or self._count_micro_batches(assignment)
        flags = np.broadcast_to(inside, (count, self.groups)).reshape(-1)
        return self._bin_seconds(assignment, flags.size, flags).reshape(count, self.groups)

    def _bin_seconds(self, bins: Integers, count: int, inside: Flags | bool) -> Floats:
        """Seconds without the launch; 0 for an empty bin. `bins` has the bin of each document; `inside`: the slots
        of each bin's group, or of all, share a node."""
        rows = np.array(self.lengths, dtype=np.int64)
        tokens, squares = np.zeros((2, count), dtype=np.int64)
        np.add.at(tokens, bins, rows)
        np.add.at(squares, bins, self.squares)
        documents = np.bincount(bins, minlength=count)
        return np.where(
            tokens > 0, self.request.cost.group_seconds(tokens, squares, self.cp, inside, documents), 0.0
        )

    def _count_micro_batches(self, assignment: Integers) -> int:
        count = 1 + int(assignment.max()) // self.groups
        multiple = self.request.micro_batch_multiple
        return -(-count // multiple) * multiple


@expand_option_signature
def plan_padded(
    lengths: Sequence[int],
    home: Layout,
    cp: int,
    *,
    options: PlanOptions | None = None,
    **keywords: Unpack[PlanKeywords],
) -> Plan:
    """Give documents in order to groups of `cp` slots, each document padded to the longest of all documents.

    >>> plan = plan_padded([900, 300, 20], Layout(ranks=8), cp=4, max_tokens_per_slot=512)
    >>> [[group.documents for group in batch.groups] for batch in plan.micro_batches]
    [[(0, 2), (1,)]]

    A group takes as many padded documents in one micro-batch as its slots hold. Arguments and errors are those of
    `plan_fixed`; the cap counts whole padded rows. With partition="contiguous" some slots hold more padding than
    others.
    """
    request = Request.from_arguments(lengths, home, options, keywords)
    if request.parents is not None:
        raise PlanError(
            f"{plural(len(request.lengths), 'document')} are given with parents, of which some share "
            "prefixes, and a padded plan lays documents out alone; use plan_fixed or plan_dynamic, or give it the "
            "documents before share_prefixes"
        )
    cp = request.check_degree(home, cp)
    groups = request.slots // cp
    count = len(request.lengths)
    pad = max(request.lengths, default=0)
    # Without a limit of rows there is one micro-batch.
    documents_of_group = count
    if request.rows is not None and pad:
        documents_of_group = request.rows * cp // pad
    at_once = max(1, groups * documents_of_group)  # documents in a micro-batch; 1 if there are no documents
    batches: list[MicroBatch] = []
    for start in range(0, count, at_once):
        documents = range(start, min(start + at_once, count))
        members = (
            request.make_group(range(g * cp, (g + 1) * cp), documents[g::groups], pad_to=pad)
            for g in range(min(groups, len(documents)))
        )
        batches.append(MicroBatch(tuple(members)))
    return request.make_plan(batches, "padded")
