"""What attention costs a group under each communication type: kernels, and what of the messages they do not hide.

This is the one place that prices a type. Planners, `plan --compare`, the choice of a degree for evaluations, `auto` and
benches all come here, with arrays of groups or with a single one.

Two machines are priced. One without a `Network` is ideal: only the two speeds of a `Cost` count, attention hides all of
a ring's traffic that it is longer than, and nothing of an exchange or a gather. With a `Network` messages are priced
as the code sends them, layer by layer, forward and backward:

- `p2p`, a ring of r members: r − 1 of its r blocks travel while another is computed; in backward the gradients of a
  block travel behind it. Where the ring crosses hosts, every step waits for the members that cross.
- `all_gather`: large gathers go in two slices of heads, of which the second travels while the first is computed, and
  so do the gradients, which are exchanged. Between hosts a gather's bytes come through all slots of a host together.
- `a2a`: each slot exchanges with the slots of its host and of other hosts at the same time; large exchanges go in two
  slices of heads, which hide behind each other's work. Key/value heads fewer than members are sent several times.
- `a2a+p2p`: exchanges around a ring of fewer, larger blocks. Large ones go in two slices of heads as well, whose rings
  take turns: blocks and gradients of one travel while another is computed.

Measured against it: tests/plan/cost/test_machine.py, bench/records/attention-*.md.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.plan.cost.links import Network

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Slices of heads, whose messages hide behind each other's work, and from which bytes on (measured on H200s):
EXCHANGE_SLICES = 2  # four took longer (bench/records/attention-slices-4xH200.md)
EXCHANGE_SLICE_BYTES = 32 << 20  # of a member's queries in a slice: less costs more in launches than it hides
GATHER_SLICES = 2
GATHER_SLICE_BYTES = 128 << 20  # of the keys and values of all rows: from here on slices hide more than they cost

FORWARD_OF_ATTENTION = 2 / 7  # products of a causal pair: 2 forward, 5 backward


def is_narrow(lengths: Sequence[int], degree: int, window: int | None, chunk: int | None) -> bool:
    """Return whether a member sees so few rows of the others that sending only those is cheaper than a ring.

    The answer depends only on lengths, so it is the same on every member. A document lies in at most 2 · degree runs.
    With a window, each run sees at most window − 1 rows before it. With chunks, it sees the rows from the start of its
    chunk on; here the runs count as equally long. The sum of these rows is a bound on the foreign rows. The mask is
    narrow if that bound is at most half of the rows that a ring would send, and at most twice the rows of the members:
    a ring holds that many rows of others.
    """
    if degree == 1 or (window is None and chunk is None):
        return False
    rows = np.asarray(lengths, dtype=np.int64)
    foreign = foreign_rows(rows, degree, window, chunk)
    return int(foreign.sum()) <= min((degree - 1) / 2, 2) * int(rows.sum())


def foreign_rows(rows: Integers, degree: int, window: int | None, chunk: int | None) -> Integers:
    """Return a bound on the rows of others that the members of a ring see together, of each document.

    Each of its at most 2 · degree runs sees window − 1 rows before it under a window, and under chunks the rows from
    the start of its first row's chunk on.
    """
    foreign = (degree - 1) * rows
    if window is not None:
        foreign = np.minimum(foreign, 2 * degree * min(window - 1, int(rows.max())))
    if chunk is not None:
        starts = rows[:, None] * np.arange(1, 2 * degree) // (2 * degree)
        foreign = np.minimum(foreign, (starts % chunk).sum(1))
    return foreign


class AttentionRates(Protocol):
    """What attention is priced by, of all layers that attend: the constants of `Cost`, which describes them."""

    @property
    def attention_seconds(self) -> float: ...
    @property
    def merge_seconds(self) -> float: ...
    @property
    def ring_bytes(self) -> float: ...
    @property
    def exchange_bytes(self) -> float: ...
    @property
    def ring_step_seconds(self) -> float: ...
    @property
    def inside_bytes_per_second(self) -> float: ...
    @property
    def across_bytes_per_second(self) -> float: ...
    @property
    def passes(self) -> str: ...
    @property
    def cp_comm_type(self) -> str: ...
    @property
    def a2a_size(self) -> int: ...
    @property
    def network(self) -> Network | None: ...


class Rows(NamedTuple):
    """Groups to price, as arrays that broadcast.

    `tokens` and `squares` are the sums of the documents' rows and of their squares, `degree` the members, `together`
    the fewest members of a group that share a host (the degree if all do), `busiest` what the busiest member of a ring
    computes, over the mean, and `typical` the length of the document of a typical row (None: squares / tokens). Of
    `narrow` groups members send each other only the rows that a window or chunk leaves, in one piece.
    """

    tokens: Floats
    squares: Floats
    degree: Floats
    together: Floats
    busiest: Floats | float = 1.0
    typical: Floats | None = None
    narrow: bool = False

    @property
    def inside(self) -> NDArray[np.bool_]:
        """Whether all members share a host."""
        return self.together >= self.degree


class AttentionPrice(NamedTuple):
    """Seconds of each slot of a group: of kernels, and of the messages that these do not hide."""

    computed: Floats
    exposed: Floats


def exchanging_members(kind: str, a2a_size: int, degree: Floats) -> Floats:
    """Return how many members exchange heads for rows; the others of a group stand in a ring with these."""
    if kind == "a2a":
        return degree
    if kind == "a2a+p2p":
        return np.gcd(degree.astype(np.int64), a2a_size).astype(np.float64)
    return np.ones_like(degree)


def kv_copies(heads: int, kv_heads: int, members: ArrayLike) -> Floats:
    """Return how often every key/value head is sent to members that exchange heads (`HeadSplit` deals them out).

    A member computes its query heads in equally long runs that share a key/value head. It needs a head of its own for
    each run, so that more are sent than there are if members cut through the queries of a head.
    """
    members = np.asarray(members, dtype=np.int64)
    _, runs = _deal_heads(heads, kv_heads, members)
    return np.maximum(1.0, np.asarray(members * runs / kv_heads, dtype=np.float64))


def _deal_heads(heads: int, kv_heads: int, members: Integers) -> tuple[Integers, Integers]:
    """Return the query heads of a member, and in how many runs that share a key/value head it computes them."""
    member_heads = np.maximum(1, heads // members)
    return member_heads, member_heads // np.gcd(max(1, heads // kv_heads), member_heads)


def price_attention(cost: AttentionRates, rows: Rows) -> AttentionPrice:
    """Return the price of groups under the communication type of a cost, which is not "auto"."""
    around = rows.degree / exchanging_members(cost.cp_comm_type, cost.a2a_size, rows.degree)
    computed = cost.attention_seconds * rows.squares / rows.degree * rows.busiest
    if cost.network:
        typical = rows.squares / np.maximum(rows.tokens, 1) if rows.typical is None else rows.typical
        piece = typical / (rows.degree if cost.cp_comm_type == "all_gather" else around)
        computed = computed * (1 + cost.network.half_speed_rows / np.maximum(piece, 1))
    if cost.cp_comm_type != "all_gather":
        computed = computed + cost.merge_seconds * rows.tokens / rows.degree * (around - 1)
    if cost.network is None:
        return AttentionPrice(computed, _ideal_wait_seconds(cost, rows, around, computed))
    return AttentionPrice(computed, _Layer(cost, cost.network, rows, around, computed).wait_seconds())


def latency_seconds(cost: AttentionRates, degree: Floats) -> Floats:
    """Return the seconds that groups of these degrees wait for messages however few rows they carry.

    Under "auto" they are the least.
    """
    if cost.cp_comm_type == "auto":
        ring, gather = _type_latency_seconds(cost, "p2p", degree), _type_latency_seconds(cost, "all_gather", degree)
        return np.where(ring < gather, ring, gather)
    return _type_latency_seconds(cost, cost.cp_comm_type, degree)


def _type_latency_seconds(cost: AttentionRates, kind: str, degree: Floats) -> Floats:
    """Return the seconds of waiting for messages of no bytes, in all layers, under a type that is not "auto"."""
    exchanging = exchanging_members(kind, cost.a2a_size, degree)
    swaps = (exchanging > 1).astype(np.float64)
    steps: Floats = np.minimum(degree - 1, 1.0) if kind == "all_gather" else degree / exchanging - 1
    if cost.network is None:
        return cost.ring_step_seconds * (steps + swaps)
    backward = 1 if cost.passes == "forward" else 3  # in backward gradients travel too; an exchange goes both ways
    messages = backward * steps + (2 if cost.passes == "forward" else 4) * swaps
    return cost.network.layers * cost.network.step_seconds * messages


def _ideal_wait_seconds(cost: AttentionRates, rows: Rows, around: Floats, computed: Floats) -> Floats:
    """Return what attention does not hide of `ring_bytes`, all of the exchanges, and a latency for each step."""
    degree, kind = rows.degree, cost.cp_comm_type
    speed = np.where(rows.inside, cost.inside_bytes_per_second, cost.across_bytes_per_second)
    turn = cost.ring_bytes * rows.tokens * (around - 1) / degree / speed
    exposed = turn if kind == "all_gather" else np.maximum(turn - computed, 0.0)
    exchanging = degree / around
    if "a2a" in kind:
        # Of a2a+p2p exchanges stay inside a host. Of a2a those between hosts take place beside those inside.
        together = rows.together if kind == "a2a" else degree
        near, far = np.minimum(exchanging, together) - 1, np.maximum(exchanging - together, 0)
        sent = cost.exchange_bytes * rows.tokens / degree / exchanging
        exposed = exposed + sent * np.maximum(near / cost.inside_bytes_per_second, far / cost.across_bytes_per_second)
    return exposed + latency_seconds(cost, degree)


class _Layer:
    """The messages of one layer that show, of all groups at once; `computed` is of all layers."""

    def __init__(self, cost: AttentionRates, network: Network, rows: Rows, around: Floats, computed: Floats) -> None:
        self.cost, self.network, self.rows, self.around = cost, network, rows, around
        self.exchanging = rows.degree / around
        self.computed = computed / network.layers
        self.copies = kv_copies(network.heads, network.kv_heads, self.exchanging)  # of a key/value head among members
        self.both = cost.passes != "forward"
        per_row = rows.tokens / rows.degree / network.layers  # of a member
        self.block = network.block_share * cost.ring_bytes * per_row if self.both else cost.ring_bytes * per_row
        self.gradients = network.gradient_share * cost.ring_bytes * per_row if self.both else 0.0 * per_row
        exchanged = cost.exchange_bytes * per_row / (2 if self.both else 1)
        self.queries = (1 - network.key_share) / 2 * exchanged  # or as many bytes of outputs
        self.keys = network.key_share * exchanged * self.copies
        # Gradients of the copies of a head are summed, and travel in the dtype of sums.
        self.key_gradients = self.keys * np.where(self.copies > 1, network.gradient_share / network.block_share, 1.0)
        self.slices, self.rings = self._count_slices()

    def wait_seconds(self) -> Floats:
        """Return the seconds of messages that show, of all layers."""
        passes = [(True, FORWARD_OF_ATTENTION), (False, 1 - FORWARD_OF_ATTENTION)] if self.both else [(True, 1.0)]
        kind, seconds = self.cost.cp_comm_type, np.zeros_like(self.computed)
        for is_forward, share in passes:
            computed = share * self.computed
            if kind == "all_gather":
                seconds = seconds + np.where(self.rows.degree > 1, self._gather_seconds(is_forward, computed), 0.0)
                continue
            seconds = seconds + np.where(self.around > 1, self._ring_seconds(is_forward, computed), 0.0)
            if "a2a" in kind:
                seconds = seconds + np.where(self.exchanging > 1, self._swap_seconds(is_forward, computed), 0.0)
        return self.network.layers * seconds

    def _ring_seconds(self, is_forward: bool, computed: Floats) -> Floats:
        """Return what shows of blocks that travel around a ring while others are computed, their gradients behind them.

        The rings of slices take turns, so that the messages of one travel while another is computed: what shows is the
        work on the last block of the last ring, or in backward on the blocks before the first gradients leave.
        """
        rings, steps = self.rings, self.around - 1
        sizes = [self.block * self.copies] if is_forward else [self.block * self.copies, self.gradients * self.copies]
        wires = [steps * rings * self._step_seconds(size / rings) for size in sizes]
        pieces = rings * self.around
        exposed = np.maximum(sum(wires) - computed * (1 - 1 / pieces), 0.0)
        if not is_forward:
            sliced = np.maximum(sum(wires) - computed, wires[1] - computed * (1 - 2 / pieces))
            exposed = np.where(rings > 1, np.maximum(sliced, 0.0), exposed)
        return exposed + len(sizes) * rings * steps * self.network.step_seconds

    def _step_seconds(self, size: Floats) -> Floats:
        """Return the seconds of a message around the ring."""
        inside, across = self.network.inside, self.network.across
        alone = np.minimum(self.exchanging, self.rows.together) <= 1  # one member of a host crosses
        crossing = np.where(alone, across.point_alone.seconds(size), across.point.seconds(size))
        return np.where(self.rows.inside, inside.point.seconds(size), crossing)

    def _gather_seconds(self, is_forward: bool, computed: Floats) -> Floats:
        """Return what shows of keys and values of all rows, in slices that travel while others are computed.

        Gradients travel back the same way.
        """
        degree, together = self.rows.degree, self.rows.together
        large = self.block * degree >= GATHER_SLICE_BYTES
        slices = np.where(large, GATHER_SLICES, 1)
        received = self.block * (degree - 1) / slices
        gather = self._longer_seconds(
            self.network.inside.gather.seconds(received), self._crossing_seconds(received, together)
        )
        part = computed / slices
        second = np.where(large, np.maximum(part, gather), 0.0)
        messages = slices * (1 if is_forward else 2)
        latency = messages * self.network.step_seconds
        if is_forward:
            return gather + np.where(large, second + part, part) - computed + latency
        sent = self.gradients / slices
        back = self._exchange_seconds(sent * (together - 1), sent * (degree - together))
        last = np.where(large, np.maximum(part, back), part)
        return gather + second + last + back - computed + latency

    def _crossing_seconds(self, received: Floats, together: Floats) -> Floats:
        """Return the seconds of a ring between hosts, each boundary of which the slots of a host share."""
        return self.network.across.gather.seconds(received / together)

    def _swap_seconds(self, is_forward: bool, computed: Floats) -> Floats:
        """Return what shows of the exchange of heads for rows and back; slices hide the messages of others."""
        size, count = self.exchanging, self.slices
        inside_host = np.minimum(self.rows.together, size)
        arriving = self.queries + (self.keys if is_forward else 0.0)
        leaving = self.queries + (0.0 if is_forward else self.key_gradients)
        there, back = (
            self._exchange_seconds(x / count * (inside_host - 1) / size, x / count * (size - inside_host) / size)
            for x in (arriving, leaving)
        )
        sliced = np.maximum(there + computed + back, count * (there + back)) - computed
        return np.where(count > 1, sliced, there + back) + 2 * count * self.network.step_seconds

    def _count_slices(self) -> tuple[Floats, Floats]:
        """Count the slices of large exchanges of heads, and the rings that they stand in: one if they share keys."""
        most, large = EXCHANGE_SLICES, self.queries >= 2 * EXCHANGE_SLICE_BYTES
        heads, runs = _deal_heads(self.network.heads, self.network.kv_heads, self.exchanging.astype(np.int64))
        even = (runs % most == 0) | ((most % runs == 0) & (heads % most == 0))
        slices = np.where(large & even & (self.exchanging > 1) & (not self.rows.narrow), float(most), 1.0)
        return slices, np.where(runs % most == 0, slices, 1.0)

    def _exchange_seconds(self, near: Floats, far: Floats) -> Floats:
        """Return the seconds of what a member exchanges inside its host and between hosts, at the same time."""
        return np.maximum(self.network.inside.exchange.seconds(near), self.network.across.exchange.seconds(far))

    def _longer_seconds(self, inside: Floats, across: Floats) -> Floats:
        return np.where(self.rows.inside, inside, np.maximum(inside, across))
