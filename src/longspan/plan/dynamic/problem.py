"""The documents and slots of one step as the dynamic planner sees them: items, longest first, and blocks of slots.

An item is a document, or a pack of very short ones that stay together so that planning a batch of tiny documents
takes no longer. A block is a run of slots inside one node (or of several nodes, if min_cp is above the node size).
Documents get no slots here: `FreeSlots` only hands out the slots of one micro-batch.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from longspan.plan.planners.request import Request

DegreeSet = range | tuple[int, ...]  # rising
Parts = list[tuple[int, int]]  # (first slot, number of slots), one for each block


def divide_into_blocks(slots: int, node_size: int, min_cp: int, max_cp: int) -> tuple[tuple[int, int], ...]:
    """Divide the slots into nodes, or into runs of nodes if a group needs more than one.

    Returns (first slot, slots) of each block, in which groups of `min_cp` to `max_cp` slots are placed. A run of whole
    nodes that is wider than any group may be is cut to `min_cp` slots. A last block that is too small for a group is
    joined to the one before, if they are no wider together than a group may be; otherwise its slots stay idle.
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
def even_runs(slots: int, degrees: DegreeSet) -> Parts:
    """Divide `slots` slots into runs that each hold a group: few left out, few runs, and as even as degrees allow.

    Returns (first slot, slots) of each run. `degrees` rise. There are as few runs as the largest degree allows, but not
    so many that one is narrower than the smallest. Where even runs are no degrees, `_uneven_runs` divides the slots.
    """
    if slots < degrees[0]:
        return []
    pieces = -(-slots // degrees[-1])
    if slots // pieces < degrees[0]:
        pieces = slots // degrees[0]
    used_slots = min(slots, pieces * degrees[-1])
    edges = [used_slots * piece // pieces for piece in range(pieces + 1)]
    even = [(first, stop - first) for first, stop in pairwise(edges)]
    return even if all(width in degrees for _, width in even) else _uneven_runs(slots, degrees)


def _uneven_runs(slots: int, degrees: DegreeSet) -> Parts:
    """Divide slots as `even_runs` does, where equal parts are no degrees; the widest run comes first.

    `best` has the best division of 0, 1, 2 and more slots. That of n leaves one slot out beside that of n − 1, or adds
    a run of w slots to that of n − w; of divisions with as many slots left out and as many runs, the one with the least
    sum of squared widths is the most even.
    """
    best: list[tuple[int, int, int, tuple[int, ...]]] = [(0, 0, 0, ())]  # left out, runs, squared widths, widths
    for count in range(1, slots + 1):
        left_out, runs, squares, widths = best[-1]
        options = [(left_out + 1, runs, squares, widths)]
        for width in degrees[: bisect_right(degrees, count)]:
            left_out, runs, squares, widths = best[count - width]
            options.append((left_out, runs + 1, squares + width * width, (*widths, width)))
        best.append(min(options))
    widths = sorted(best[slots][3], reverse=True)
    return [(sum(widths[:i]), width) for i, width in enumerate(widths)]


def list_slots(parts: Parts) -> tuple[int, ...]:
    """List all slots of these parts, in rising order."""
    return tuple(sorted(slot for start, count in parts for slot in range(start, start + count)))


class FreeSlots:
    """The free slots of one micro-batch, taken from the start of each block; a group stays in a node if it can."""

    def __init__(self, blocks: tuple[tuple[int, int], ...], degrees: DegreeSet) -> None:
        """Begin with all slots of these blocks; `by_left` lists blocks by how many slots they have left."""
        self.blocks = blocks
        self.degrees = degrees
        self.left: list[int] = [size for _, size in blocks]
        self.total = sum(self.left)
        self.by_left: list[list[int]] = [[] for _ in range(max(self.left) + 1)]
        for block in range(len(self.left) - 1, -1, -1):  # backwards: the last of a list, a first block, is taken first
            self.by_left[self.left[block]].append(block)

    def take_slots(self, width: int) -> Parts:
        """Take `width` slots, at most `total`: from one block if one has them, else from as few as possible."""
        parts: Parts = []
        while width:
            size = self._smallest_fit(width, avoid_remnant=not parts) or self._largest_run()
            count = min(size, width)
            parts.append(self._take_next_slots(self.by_left[size].pop(), count))
            width -= count
        return parts

    def has_block(self, width: int) -> bool:
        """Return whether one block has at least `width` free slots."""
        return bool(self._smallest_fit(width, avoid_remnant=False))

    def remaining_runs(self) -> Parts:
        """Divide the slots that are left into runs that hold a group."""
        return [
            (start + size - left + offset, count)
            for (start, size), left in zip(self.blocks, self.left, strict=True)
            for offset, count in even_runs(left, self.degrees)
        ]

    def _smallest_fit(self, width: int, *, avoid_remnant: bool) -> int:
        """Return the fewest free slots of any block that has at least `width` of them; 0 if none has.

        With `avoid_remnant`, blocks come first in which taking `width` leaves no slot, or enough for another group.
        """
        for size in range(width, len(self.by_left)):
            if self.by_left[size] and not (avoid_remnant and 0 < size - width < self.degrees[0]):
                return size
        return self._smallest_fit(width, avoid_remnant=False) if avoid_remnant else 0

    def _largest_run(self) -> int:
        """Return the most free slots of a block."""
        return next(size for size in range(len(self.by_left) - 1, 0, -1) if self.by_left[size])

    def _take_next_slots(self, block: int, count: int) -> tuple[int, int]:
        """Take the next slots of a block; returns the first of them and their number."""
        start, size = self.blocks[block]
        left = self.left[block]
        self.left[block] = left - count
        self.total -= count
        self.by_left[left - count].append(block)
        return start + size - left, count


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PACKED_ABOVE = 16  # documents a slot on average, above which the short ones are packed together
PACKS = 64  # packs a slot that they make at most
SMALLEST_ANCHOR = 0.1  # share of a block's work in a micro-batch, below which a document is never an anchor
MORE_MICRO_BATCHES = 2  # than the caps demand
LARGE_DRAFT = 5000  # items and bins, from which on fewer settings are tried
SAMPLED_SLOTS = 256  # of a sample, which is used for at least twice as many


@dataclass(frozen=True, eq=False)
class Problem:
    """One step to plan: items in falling order of rows, and what a slot and a group may hold."""

    request: Request
    degrees: DegreeSet  # that a group may have, at most the slots
    cap: int  # rows of a slot, in whole row multiples
    documents: tuple[tuple[int, ...], ...]  # of each item, ids
    tokens: Ints  # (items,) rows
    squares: Ints  # (items,) sum of squared document lengths
    blocks: tuple[tuple[int, int], ...]  # first slot and number of slots

    @classmethod
    def of(cls, request: Request, degrees: DegreeSet) -> "Problem":
        """Make the problem of a request with at least one document; degrees and lengths are checked already."""
        lengths = np.array(request.lengths, dtype=np.int64)
        order = np.argsort(-lengths, kind="stable")
        cap = int(lengths.sum()) if request.rows is None else request.rows
        documents, tokens, squares = _make_items(order, lengths[order], request.slots, cap)
        blocks = divide_into_blocks(request.slots, request.node_size, degrees[0], degrees[-1])
        return cls(request, degrees, cap, documents, tokens, squares, blocks)

    @property
    def min_cp(self) -> int:
        """The lowest degree that a group may have."""
        return self.degrees[0]

    @property
    def max_cp(self) -> int:
        """The highest degree that a group may have."""
        return self.degrees[-1]

    def widest_degree(self, slots: int) -> int:
        """Return the highest degree of at most `slots`; 0 if there is none."""
        at = bisect_right(self.degrees, slots)
        return self.degrees[at - 1] if at else 0

    def split_into_runs(self, part: tuple[int, int]) -> Parts:
        """Split a part (first slot, slots) into runs that hold a group each, and a last run that holds none, if any."""
        start, slots = part
        pieces = [(start + offset, width) for offset, width in even_runs(slots, self.degrees)]
        used_slots = sum(width for _, width in pieces)
        return pieces + ([(start + used_slots, slots - used_slots)] if used_slots < slots else [])

    @cached_property
    def sample_factor(self) -> int:
        """How many times smaller a sample is on which settings are searched; 1: none is needed or possible.

        A sample has `SAMPLED_SLOTS` slots or more, at least four times as many as its longest document needs and as the
        smallest group has, and at least half as many items as `SAMPLED_SLOTS`.
        """
        slots, needed = self.request.slots, -(-int(self.tokens[0]) // self.cap)
        if slots < 2 * SAMPLED_SLOTS:
            return 1
        needed = self.degrees[bisect_left(self.degrees, needed)]
        least = max(4 * needed, 4 * self.min_cp, SAMPLED_SLOTS)
        return max(1, min(slots // least, 2 * len(self.tokens) // SAMPLED_SLOTS))

    @property
    def stride(self) -> int:
        """The step between initial settings that are tried: 1, or more where a draft is large and takes long."""
        size = len(self.tokens) + self.least_micro_batches * len(self.blocks)
        return max(1, size // LARGE_DRAFT)

    def make_sample(self) -> "Problem":
        """Make a problem of fewer slots and items: of each `sample_factor` neighbouring items the middle one stays."""
        factor = self.sample_factor
        slots, sampled = self.request.slots // factor, slice(factor // 2, None, factor)
        degrees = self.degrees[: bisect_right(self.degrees, slots)]
        return Problem(
            replace(self.request, slots=slots),
            degrees,
            self.cap,
            self.documents[sampled],
            self.tokens[sampled],
            self.squares[sampled],
            divide_into_blocks(slots, self.request.node_size, degrees[0], degrees[-1]),
        )

    @cached_property
    def counts(self) -> Ints:
        """Documents of each item (items,)."""
        return np.array([len(documents) for documents in self.documents], dtype=np.int64)

    @cached_property
    def work(self) -> Floats:
        """Seconds of each item on one slot, without communication (items,)."""
        return self.request.cost.work_seconds(self.tokens, self.squares)

    @cached_property
    def light_density(self) -> float:
        """Seconds of work for each row of short documents: of the shortest items, which hold half of all rows."""
        light = 2 * np.cumsum(self.tokens) > int(self.tokens.sum())
        tokens, squares = int(self.tokens[light].sum()), int(self.squares[light].sum())
        return float(self.request.cost.work_seconds(tokens, squares)) / tokens

    @cached_property
    def mean_seconds(self) -> float:
        """Seconds of all work spread evenly over the slots; from exact sums, so that all hosts agree."""
        total = self.request.cost.work_seconds(int(self.tokens.sum()), int(self.squares.sum()))
        return float(total) / self.request.slots

    @cached_property
    def has_few_items(self) -> bool:
        """Whether there are so few items that each may need slots of its own."""
        return len(self.tokens) <= max(2 * len(self.blocks), self.request.slots // 2)

    @cached_property
    def least_anchor_work(self) -> float:
        """The seconds of work below which a document is never an anchor.

        That is `SMALLEST_ANCHOR` of what the widest block does in the shortest mean micro-batch that is tried. It is at
        most the work of the shortest document that fits no run of slots, as such a document must be an anchor.
        """
        if self.has_few_items:  # then any item may be an anchor
            return 0.0
        shortest = self.mean_seconds / (self.least_micro_batches + MORE_MICRO_BATCHES)
        too_long = float(self.request.cost.work_seconds(self.widest_run * self.cap, (self.widest_run * self.cap) ** 2))
        return min(SMALLEST_ANCHOR * self.widest_block * shortest, too_long)

    @cached_property
    def widest_block(self) -> int:
        """Slots of the largest block."""
        return max(size for _, size in self.blocks)

    @cached_property
    def widest_run(self) -> int:
        """Slots of the widest run into which a block without anchors is divided."""
        return max(w for _, size in self.blocks for _, w in even_runs(size, self.degrees))

    def shares_node(self, start: int, slots: int) -> bool:
        """Return whether these slots share a node."""
        return start // self.request.node_size == (start + slots - 1) // self.request.node_size

    @cached_property
    def widest_in_node(self) -> int:
        """Slots of the largest block within one node; 0 if none is: the last block may take in a smaller last node."""
        return max((size for start, size in self.blocks if self.shares_node(start, size)), default=0)

    @cached_property
    def least_micro_batches(self) -> int:
        """Micro-batches below which the caps cannot hold all rows."""
        return max(1, -(-int(self.tokens.sum()) // (self.request.slots * self.cap)))


def _make_items(order: Ints, lengths: Ints, slots: int, cap: int) -> tuple[tuple[tuple[int, ...], ...], Ints, Ints]:
    """Make the items: the documents of each, its rows and its squared rows; short documents share an item.

    `order` are the documents by falling length, `lengths` their rows. With more than `PACKED_ABOVE` of them a slot,
    those of less than a pack's rows are packed one after the other, and items are sorted by their rows again. A pack
    has a sixteenth of a slot's cap at most, and a slot gets some PACKS of them, so that items still divide evenly.
    """
    ids: list[int] = order.tolist()
    if len(ids) <= PACKED_ABOVE * slots:
        return tuple((d,) for d in ids), lengths, lengths * lengths
    pack_rows = max(1, min(cap // 16, int(lengths.sum()) // (PACKS * slots)))
    item = _number_items(lengths, pack_rows)
    count = int(item[-1]) + 1
    tokens, squares = np.zeros((2, count), dtype=np.int64)
    np.add.at(tokens, item, lengths)
    np.add.at(squares, item, lengths * lengths)
    first = np.searchsorted(item, np.arange(count + 1)).tolist()
    documents = [tuple(ids[start:stop]) for start, stop in pairwise(first)]
    rank = np.argsort(-tokens, kind="stable")
    ranked: list[int] = rank.tolist()
    return tuple(documents[i] for i in ranked), tokens[rank], squares[rank]


def _number_items(lengths: Ints, pack_rows: int) -> Ints:
    """Return the item of each document, rising from 0: its own from `pack_rows` on, else the pack that it starts in.

    `lengths` fall. Short documents lie end to end, a pack begins every `pack_rows` rows, and empty packs get no number.
    """
    long = int(np.searchsorted(-lengths, -pack_rows, side="right"))
    item = np.arange(long, dtype=np.int64)
    if long < len(lengths):
        starts = np.cumsum(lengths[long:]) - lengths[long:]
        item = np.concatenate((item, long + starts // pack_rows))
    return np.unique(item, return_inverse=True)[1]
