"""The documents and slots of one step as the dynamic planner sees them: items, longest first, and blocks of slots.

An item is a document, a tree of documents that share prefixes, or a pack of very short ones that stay together so
that planning a batch of tiny documents takes no longer. A block is a run of slots inside one node (or of several nodes,
if min_cp is above the node size), from which groups take free ones.
"""

from bisect import bisect_left, bisect_right
from functools import cache, cached_property
from itertools import chain, pairwise

import numpy as np

from longspan.layout import Flags, Floats, Integers
from longspan.plan.planners.request import Request

DegreeSet = range | tuple[int, ...]  # rising
Parts = list[tuple[int, int]]  # (first slot, number of slots), one for each block

PACKED_ABOVE = 16  # documents a slot on average, above which the short ones are packed together
PACKS = 64  # packs a slot that they make at most, so that items still divide evenly
LEAST_LONG = 0.1  # share of a block's work in a micro-batch, below which a document is never long
# So many more micro-batches are tried than the caps demand.
MORE_MICRO_BATCHES = 2
EXACT_DEGREES = 40  # every degree up to this is considered, then multiples of the node size ever farther apart


class Problem:
    """One step to plan: items in falling order of tokens, and what a slot and a group may hold. Documents have
    tokens; a slot has rows, its share of them. Groups may have these `degrees`, at most the slots. Above `PACKED_ABOVE`
    documents a slot, those of less than a pack's tokens lie end to end, and a pack begins every `pack_tokens`, at most
    a sixteenth of a slot's cap.
    """

    def __init__(self, request: Request, degrees: DegreeSet) -> None:
        self.request = request
        self.degrees = degrees
        rows, squares = request.tree_sizes
        order = np.argsort(-rows, kind="stable")
        cap = int(rows.sum()) if request.rows is None else request.rows
        self.cap = cap  # rows of a slot, in whole row multiples
        ids = order.tolist()
        items: tuple[tuple[int, ...], ...] = tuple((d,) for d in ids)
        tokens = rows[order]
        squares = squares[order]
        if len(ids) > PACKED_ABOVE * request.slots:
            pack_tokens = max(1, min(cap // 16, int(tokens.sum()) // (PACKS * request.slots)))
            first = _first_documents_of_items(tokens, pack_tokens)
            tokens = np.add.reduceat(tokens, first)
            squares = np.add.reduceat(squares, first)
            rank = np.argsort(-tokens, kind="stable")
            documents_of_items: list[tuple[int, ...]] = [
                tuple(documents.tolist()) for documents in np.split(order, first[1:])
            ]
            items = tuple(documents_of_items[i] for i in map(int, rank))
            tokens = tokens[rank]
            squares = squares[rank]
        self.tokens: Integers = tokens  # (items,) with the rows that prefixes share once
        self.squares: Integers = squares  # (items,) sum of squared document lengths; see `Request.tree_sizes`
        # (items,) whether it is a prefix tree
        self.trees: Flags = np.array([len(item) == 1 and len(request.trees[item[0]]) > 1 for item in items])
        # ids of the documents of each item
        self.documents: tuple[tuple[int, ...], ...] = tuple(
            tuple(chain.from_iterable(request.trees[i] for i in item)) for item in items
        )
        # first slot and number of slots
        self.blocks: tuple[tuple[int, int], ...] = divide_into_blocks(
            request.slots, request.node_size, degrees[0], degrees[-1]
        )

    @property
    def min_cp(self) -> int:
        return self.degrees[0]

    @property
    def max_cp(self) -> int:
        return self.degrees[-1]

    def widest_degree(self, slots: int) -> int:
        """Return the highest degree of at most `slots`; 0 if there is none."""
        at = bisect_right(self.degrees, slots)
        return self.degrees[at - 1] if at else 0

    def degrees_to_try(self) -> Integers:
        """Return degrees for long documents: all low ones, then each a sixth or a node higher, in whole nodes."""
        choices = list(self.degrees[: bisect_right(self.degrees, max(EXACT_DEGREES, 2 * self.min_cp))])
        last = choices[-1]
        node = self.request.node_size
        while last < self.max_cp:
            whole_nodes = (last + max(node, last // 6)) // node * node
            higher = min(self.max_cp, max(last + 1, whole_nodes))
            last = self.degrees[bisect_left(self.degrees, higher)]  # the next degree that a group may have
            choices.append(last)
        return np.array(choices, dtype=np.int64)

    def split_into_runs(self, part: tuple[int, int]) -> Parts:
        """Split a part (first slot, slots) into runs that hold a group each, and a last run that holds none, if any."""
        start, slots = part
        runs = [(start + offset, width) for offset, width in divide_into_even_runs(slots, self.degrees)]
        used_slots = sum(width for _, width in runs)
        if used_slots < slots:
            runs.append((start + used_slots, slots - used_slots))
        return runs

    @cached_property
    def document_counts(self) -> Integers:
        return np.array([len(documents) for documents in self.documents], dtype=np.int64)

    @cached_property
    def work(self) -> Floats:
        """Seconds of each item on one slot, without communication (items,)."""
        return self.request.cost.work_seconds(self.tokens, self.squares)

    @cached_property
    def mean_slot_seconds(self) -> float:
        """Seconds of all work spread evenly over the slots; from exact sums, so that all hosts agree."""
        total = self.request.cost.work_seconds(int(self.tokens.sum()), int(self.squares.sum()))
        return float(total) / self.request.slots

    @cached_property
    def has_few_items(self) -> bool:
        """Whether there are so few items that each may need slots of its own."""
        return len(self.tokens) <= max(2 * len(self.blocks), self.request.slots // 2)

    @cached_property
    def least_long_work(self) -> float:
        """The seconds of work below which a document is never long: `LEAST_LONG` of what the widest block does in the
        shortest mean micro-batch that is tried, but no more than the work of the longest document that fits a run of
        slots, since any longer one must be long. 0 with few items, of which any may be long.
        """
        if self.has_few_items:
            return 0.0
        shortest_micro_batch = self.mean_slot_seconds / (self.least_micro_batches + MORE_MICRO_BATCHES)
        longest_in_run = self.widest_run * self.cap
        work_of_longest = float(self.request.cost.work_seconds(longest_in_run, longest_in_run**2))
        return min(LEAST_LONG * self.widest_block * shortest_micro_batch, work_of_longest)

    @cached_property
    def widest_block(self) -> int:
        return max(size for _, size in self.blocks)

    @cached_property
    def widest_run(self) -> int:
        """Slots of the widest run into which a block without long documents is divided."""
        return max(w for _, size in self.blocks for _, w in divide_into_even_runs(size, self.degrees))

    def shares_node(self, start: int, slots: int) -> bool:
        """Return whether these `slots` slots, from `start` on, are on one node."""
        node_size = self.request.node_size
        return start // node_size == (start + slots - 1) // node_size

    @cached_property
    def widest_in_node(self) -> int:
        """Slots of the largest block within one node; 0 if no block is within one. A block is in several nodes if a
        group needs more than one, or if it is the last and was joined with a smaller last node.
        """
        return max((size for start, size in self.blocks if self.shares_node(start, size)), default=0)

    @cached_property
    def least_micro_batches(self) -> int:
        """Micro-batches below which the caps cannot hold all tokens."""
        return max(1, -(-int(self.tokens.sum()) // (self.request.slots * self.cap)))


def _first_documents_of_items(tokens: Integers, pack_tokens: int) -> Integers:
    """Documents shorter than `pack_tokens` lie end to end, and an item has those that begin within the same
    `pack_tokens`. Others are items by themselves. `tokens` are those of the documents, in falling order."""
    long_count = int(np.searchsorted(-tokens, -pack_tokens, side="right"))
    starts = np.cumsum(tokens[long_count:]) - tokens[long_count:]
    packs = np.concatenate((np.arange(long_count), long_count + starts // pack_tokens))
    # Each document has the index of its item.
    item = np.unique(packs, return_inverse=True)[1]
    return np.flatnonzero(np.diff(item, prepend=-1))


def divide_into_blocks(slots: int, node_size: int, min_cp: int, max_cp: int) -> tuple[tuple[int, int], ...]:
    """Divide the slots into nodes, or into runs of nodes if a group needs more than one: (first slot, slots) of each. A
    run of whole nodes that is wider than any group may be is cut to `min_cp` slots. A last block that is too small for
    a group is joined to the one before, if they are no wider together than a group may be; otherwise it stays idle.
    """
    size = node_size if min_cp <= node_size else -(-min_cp // node_size) * node_size
    if size > max_cp and min_cp > node_size:
        size = min_cp
    size = min(size, slots)
    starts = list(range(0, slots, size))
    sizes = [min(size, slots - start) for start in starts]
    if len(sizes) > 1 and sizes[-1] < min_cp and sizes[-2] + sizes[-1] <= max_cp:
        sizes[-2:] = [sizes[-2] + sizes[-1]]
    return tuple(zip(starts, sizes, strict=False))  # a joined block leaves one start over


@cache
def divide_into_even_runs(slots: int, degrees: DegreeSet) -> Parts:
    """Divide slots into runs (first slot, slots) that each hold a group: few slots left out, few runs, as even as the
    degrees allow. Returns no runs where the slots are fewer than the lowest degree.
    """
    if slots < degrees[0]:
        return []
    pieces = -(-slots // degrees[-1])
    if slots // pieces < degrees[0]:
        pieces = slots // degrees[0]
    used_slots = min(slots, pieces * degrees[-1])
    edges = [used_slots * piece // pieces for piece in range(pieces + 1)]
    even = [(first, stop - first) for first, stop in pairwise(edges)]
    if all(width in degrees for _, width in even):
        return even
    # Equal parts have a width that is no degree: `best` gets the best division of 0, 1, 2 and more slots. That of n
    # leaves one slot out beside that of n − 1, or adds a run of w slots to that of n − w; of divisions with as many
    # slots left out and as many runs, the one with the least sum of squared widths is the most even.
    best: list[tuple[int, int, int, tuple[int, ...]]] = [(0, 0, 0, ())]  # left out, runs, squared widths, widths
    for count in range(1, slots + 1):
        left_out, runs, squares, widths = best[-1]
        options = [(left_out + 1, runs, squares, widths)]
        for width in degrees[: bisect_right(degrees, count)]:
            left_out, runs, squares, widths = best[count - width]
            options.append((left_out, runs + 1, squares + width * width, (*widths, width)))
        best.append(min(options))
    widest_first = sorted(best[slots][3], reverse=True)
    return [(sum(widest_first[:i]), width) for i, width in enumerate(widest_first)]


def slots_in_parts(parts: Parts) -> tuple[int, ...]:
    """Return the slots of all parts, rising."""
    return tuple(sorted(slot for start, count in parts for slot in range(start, start + count)))


class FreeSlots:
    """The free slots of one micro-batch, taken from the start of each block; a group stays in a node if it can.

    `left` are the free slots of each block, `total` those of all.
    """

    def __init__(self, blocks: tuple[tuple[int, int], ...], degrees: DegreeSet) -> None:
        self.blocks = blocks
        self.degrees = degrees
        self.left: list[int] = [size for _, size in blocks]
        self.total: int = sum(self.left)
        self.by_left: list[list[int]] = [[] for _ in range(max(self.left) + 1)]  # blocks by free slots
        # backwards: the last of a list, a first block, is taken first
        for block in range(len(self.left) - 1, -1, -1):
            self.by_left[self.left[block]].append(block)

    def take_slots(self, width: int) -> Parts:
        """Take `width` slots, at most `total`, and return their parts: of one block if one has them, else of as few as
        possible, in the order in which they were taken.
        """
        parts: Parts = []
        while width:  # slots still to take: of the smallest block that has them, or all of the one with most
            size = self.smallest_fit(width, avoid_remnant=not parts) or max(
                n for n, b in enumerate(self.by_left) if b
            )
            block = self.by_left[size].pop()
            count = min(size, width)
            start, all_slots = self.blocks[block]
            parts.append((start + all_slots - size, count))
            self.left[block] = size - count
            self.by_left[size - count].append(block)
            self.total -= count
            width -= count
        return parts

    def usable_runs_left(self) -> Parts:
        """Return the runs (first slot, slots) of free slots that each hold a group, by block; none is taken."""
        return [
            (start + size - left + offset, count)
            for (start, size), left in zip(self.blocks, self.left, strict=True)
            for offset, count in divide_into_even_runs(left, self.degrees)
        ]

    def smallest_fit(self, width: int, *, avoid_remnant: bool = False) -> int:
        """Return the fewest free slots of any block that has at least `width`; 0 if none has. With `avoid_remnant`,
        blocks are preferred in which taking `width` leaves no slot, or enough for another group.
        """
        for size in range(width, len(self.by_left)):
            if self.by_left[size] and not (avoid_remnant and 0 < size - width < self.degrees[0]):
                return size
        return self.smallest_fit(width) if avoid_remnant else 0
