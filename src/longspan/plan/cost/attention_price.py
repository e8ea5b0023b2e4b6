"""What attention costs a group under each communication type: kernels, and what of the messages they do not hide.

A machine without a `Network` is ideal: only the two speeds of a `Cost` count, attention hides a ring's traffic and
nothing of an exchange or a gather. With one, messages are priced as the code sends them, in each layer and pass:
- `p2p`, a ring of r members: r − 1 of its r blocks travel while another is computed; in backward the gradients of a
  block travel behind it. Where the ring crosses hosts, every step waits for the members that cross.
- `all_gather`: large gathers go in two slices of heads, of which one travels while the other is computed, and so do
  gradients, in an exchange. Between hosts a gather's bytes come through all slots of a host together.
- `a2a`: each slot exchanges with the slots of its host and of other hosts at the same time, in slices if that is large.
  Key/value heads fewer than members are sent several times.
- `a2a+p2p`: exchanges around a ring of fewer, larger blocks; the rings of slices take turns.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.plan.cost.links import Network

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Slices of heads, whose messages hide behind each other's work, and from which bytes on (measured on H200s):
EXCHANGE_SLICES, GATHER_SLICES = 2, 2  # four took longer (bench/records/attention-slices-4xH200.md)
EXCHANGE_SLICE_BYTES = 32 << 20  # of a member's queries in a slice: less costs more in launches than it hides
GATHER_SLICE_BYTES = 128 << 20  # of the keys and values of all rows: from here on slices hide more than they cost
PACKED_COPIES = 0.75  # more for rows of several documents in a gather, which an index orders (attention-time-packed)
SHOWN_KERNELS = 1 / 3  # of kernels beside exchanges of heads that take longer (two-nodes-attention-10g-2xH100.md)
FORWARD_OF_ATTENTION = 2 / 7  # products of a causal pair: 2 forward, 5 backward


class AttentionRates(Protocol):
    """What attention is priced by, of all layers that attend: the constants of `Cost`, which describes them."""

    @property
    def attention_seconds(self) -> float: ...
    @property
    def merge_seconds(self) -> float: ...
    @property
    def copy_seconds(self) -> float: ...
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
    computes, over the mean, and `typical` the length of the document of a typical row (None: squares / tokens). A row
    sees `window` rows at most, and members of a narrow group fetch `foreign` rows together (None: not narrow).
    """

    tokens: Floats
    squares: Floats
    degree: Floats
    together: Floats
    busiest: Floats | float = 1.0
    typical: Floats | None = None
    window: float = np.inf
    foreign: float | None = None

    @property
    def inside(self) -> NDArray[np.bool_]:
        """Whether all members share a host."""
        return self.together >= self.degree


class AttentionPrice(NamedTuple):
    """Seconds of each slot of a group: of kernels, and of the messages that these do not hide."""

    computed: Floats
    exposed: Floats


def exchanging_members(kind: str, a2a_size: int, degree: Floats) -> Floats:
    """Return how many members of a group exchange heads for rows; a ring has `degree` over that number of members."""
    if kind == "a2a":
        return degree
    if kind == "a2a+p2p":
        return np.gcd(degree.astype(np.int64), a2a_size).astype(np.float64)  # so that their sets divide the group
    return np.ones_like(degree)


def kv_copies(heads: int, kv_heads: int, members: ArrayLike) -> Floats:
    """Return how often every key/value head is sent to members that exchange heads (`HeadSplit` deals them out).

    A member computes its query heads in equally long runs that share a key/value head, and needs one such head for each
    run. Where members cut through the queries of a head, each of them is sent a copy.
    """
    members = np.asarray(members, dtype=np.int64)
    _, runs = _deal_heads(heads, kv_heads, members)
    return np.maximum(1.0, np.asarray(members * runs / kv_heads, dtype=np.float64))


def _deal_heads(heads: int, kv_heads: int, members: Integers) -> tuple[Integers, Integers]:
    """Return the query heads of a member, and in how many runs that share a key/value head it computes them."""
    member_heads = np.maximum(1, heads // members)
    return member_heads, member_heads // np.gcd(max(1, heads // kv_heads), member_heads)


def price_attention(cost: AttentionRates, rows: Rows) -> AttentionPrice:
    """Return the price of groups under the communication type of a cost, which is not "auto".

    Kernels take attention_seconds · squares / degree of each slot, times `busiest`, on measured links 1 + h / piece
    times that, h being half_speed_rows. A ring of r members cuts the typical document into pieces of 1 / r of its rows;
    in a gather such queries meet all keys, a piece of 1 / √r; under a window none is longer than a causal document
    whose rows see as many keys. A ring adds each step to the output, in `merge_seconds`. A gather orders all rows by
    document, in `copy_seconds` a row; a narrow group's member its own and fetched rows, which it joins before.
    """
    around = rows.degree / exchanging_members(cost.cp_comm_type, cost.a2a_size, rows.degree)  # members of a ring
    computed = cost.attention_seconds * rows.squares / rows.degree * rows.busiest
    typical = rows.squares / np.maximum(rows.tokens, 1) if rows.typical is None else rows.typical
    if cost.network:
        piece = typical / (np.sqrt(rows.degree) if cost.cp_comm_type == "all_gather" else around)
        computed = computed * (1 + cost.network.half_speed_rows / np.clip(piece, 1, 2 * rows.window))
    if cost.cp_comm_type == "all_gather":
        copies = 1 + PACKED_COPIES * (1 - np.minimum(typical / np.maximum(rows.tokens, 1), 1))
        computed = computed + cost.copy_seconds * copies * rows.tokens * (rows.degree > 1)
    elif rows.foreign is not None:
        computed = computed + 2 * cost.copy_seconds * (rows.tokens + rows.foreign) / rows.degree * (around > 1)
    else:
        computed = computed + cost.merge_seconds * rows.tokens / rows.degree * (around - 1)
    if cost.network is None:
        return AttentionPrice(computed, _ideal_wait_seconds(cost, rows, around, computed))
    return AttentionPrice(computed, _LayerMessages(cost, cost.network, rows, around, computed).wait_seconds())


def latency_seconds(cost: AttentionRates, degree: Floats) -> Floats:
    """Return the seconds that groups of these degrees wait for messages however few rows they carry.

    Under "auto" they are the lesser of a ring's and a gather's: unlike exchanges, these two suit any number of heads.
    """
    if cost.cp_comm_type == "auto":
        return np.minimum(*(_type_latency_seconds(cost, kind, degree) for kind in ("p2p", "all_gather")))
    return _type_latency_seconds(cost, cost.cp_comm_type, degree)


def _type_latency_seconds(cost: AttentionRates, kind: str, degree: Floats) -> Floats:
    """Return the seconds of waiting for messages of no bytes, in all layers, under a type that is not "auto".

    A ring of r members has r − 1 steps, a gather one, and an exchange of heads one more. On ideal links each takes
    `ring_step_seconds`. On measured links each is several messages of `step_seconds` in every layer.
    """
    exchanging = exchanging_members(kind, cost.a2a_size, degree)
    swaps = (exchanging > 1).astype(np.float64)
    steps: Floats = np.minimum(degree - 1, 1.0) if kind == "all_gather" else degree / exchanging - 1
    if cost.network is None:
        return cost.ring_step_seconds * (steps + swaps)
    forward_only = cost.passes == "forward"
    # A step's block goes round in both passes, and its gradients in backward. An exchange goes there and back.
    messages = (1 if forward_only else 3) * steps + (2 if forward_only else 4) * swaps
    return cost.network.layers * cost.network.step_seconds * messages


def _ideal_wait_seconds(cost: AttentionRates, rows: Rows, around: Floats, computed: Floats) -> Floats:
    """Return the seconds of messages that show on ideal links, with a latency for each step.

    A slot sends its share of `ring_bytes` r − 1 times in t seconds. Of a ring of r members max(0, t − computed) shows,
    of a gather all of t. Exchanges of heads show as a whole; those inside a host take place beside those between hosts.
    """
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


class _LayerMessages:
    """The messages of one layer that kernels do not hide, of all groups at once.

    Bytes are those that a member sends once: `block` its keys and values, `gradients` those of a block, `queries` its
    queries (outputs are as many), `keys` and `key_gradients` the keys and values that it exchanges, with all copies.
    """

    def __init__(self, cost: AttentionRates, network: Network, rows: Rows, around: Floats, computed: Floats) -> None:
        """Take from a cost of all layers the bytes of one layer and pass, and the kernels' seconds of one layer."""
        self.cost, self.network, self.rows, self.around = cost, network, rows, around
        self.exchanging = rows.degree / around  # members that exchange heads; a ring has `around` members
        self.computed = computed / network.layers
        self.copies = kv_copies(network.heads, network.kv_heads, self.exchanging)  # of a key/value head among members
        self.has_backward = cost.passes != "forward"
        member_rows = rows.tokens / rows.degree / network.layers  # bytes of a cost are of all layers
        block_share, gradient_share = (network.block_share, network.gradient_share) if self.has_backward else (1.0, 0.0)
        self.block = block_share * cost.ring_bytes * member_rows
        self.gradients = gradient_share * cost.ring_bytes * member_rows
        exchanged = cost.exchange_bytes * member_rows / (2 if self.has_backward else 1)
        self.queries = (1 - network.key_share) / 2 * exchanged  # or as many bytes of outputs
        self.keys = network.key_share * exchanged * self.copies
        # Gradients of the copies of a head are summed, and travel in the dtype of sums.
        self.key_gradients = self.keys * np.where(self.copies > 1, network.gradient_share / network.block_share, 1.0)
        self.slices, self.rings = self._count_slices()

    def wait_seconds(self) -> Floats:
        """Return the seconds of messages that show, of all layers."""
        both_passes = [(True, FORWARD_OF_ATTENTION), (False, 1 - FORWARD_OF_ATTENTION)]
        passes = both_passes if self.has_backward else [(True, 1.0)]  # whether forward, and the share of the kernels
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
        """Return what shows of a ring's messages in one pass, and their latencies.

        Messages take W seconds and kernels C, in pieces: r blocks, for each of n slices of heads, whose n rings take
        turns. Messages of one ring travel beside the kernels of another. Nothing travels beside the last piece, so
        max(0, W − (1 − 1 / (n · r)) · C) shows. In backward gradients of blocks, G of the W seconds, travel as well.
        With several rings all pieces then hide messages, but gradients leave only after two pieces: the longer of W − C
        and G − (1 − 2 / (n · r)) · C shows, or nothing. Rows of a narrow group come before the kernels, and gradients
        leave after these: all of it shows.
        """
        rings, steps = self.rings, self.around - 1
        sizes = [self.block * self.copies] if is_forward else [self.block * self.copies, self.gradients * self.copies]
        if self.rows.foreign is not None:
            return self._step_seconds(steps * np.array(sizes)).sum(axis=0) + len(sizes) * self.network.step_seconds
        travels = [steps * rings * self._step_seconds(size / rings) for size in sizes]
        pieces = rings * self.around
        exposed = np.maximum(sum(travels) - computed * (1 - 1 / pieces), 0.0)
        if not is_forward:
            sliced = np.maximum(sum(travels) - computed, travels[1] - computed * (1 - 2 / pieces))
            exposed = np.where(rings > 1, np.maximum(sliced, 0.0), exposed)
        return exposed + len(sizes) * rings * steps * self.network.step_seconds

    def _step_seconds(self, size: Floats) -> Floats:
        """Return the seconds of a message of `size` bytes to the next member of a ring.

        Every step waits for the members that cross hosts: one of a host, which has the card for itself, or all of them.
        """
        inside, across = self.network.inside, self.network.across
        alone = np.minimum(self.exchanging, self.rows.together) <= 1  # one member of a host crosses
        crossing = np.where(alone, across.point_alone.seconds(size), across.point.seconds(size))
        return np.where(self.rows.inside, inside.point.seconds(size), crossing)

    def _gather_seconds(self, is_forward: bool, computed: Floats) -> Floats:
        """Return what shows in one pass of a gather of all keys and values, and of the exchange of their gradients.

        Kernels of C seconds wait for a gather of G, and in backward gradients go home in B seconds after them: G shows,
        or G + B. Large ones go in two slices of heads, for which G and B are half as many bytes. The second gather
        travels beside the kernels of the first slice: G + max(C / 2, G) + C / 2 − C. In backward the gradients of the
        first slice travel beside the kernels of the second: G + max(C / 2, G) + max(C / 2, B) + B − C.
        """
        degree, together = self.rows.degree, self.rows.together
        is_sliced = self.block * degree >= GATHER_SLICE_BYTES
        slices = np.where(is_sliced, GATHER_SLICES, 1)
        gather = self._gather_wire_seconds(self.block * (degree - 1) / slices)
        slice_computed = computed / slices
        second_gather = np.where(is_sliced, np.maximum(slice_computed, gather), 0.0)
        messages = slices * (1 if is_forward else 2)
        latency = messages * self.network.step_seconds
        if is_forward:
            return gather + np.where(is_sliced, second_gather + slice_computed, slice_computed) - computed + latency
        sent = self.gradients / slices
        back = self._exchange_seconds(sent * (together - 1), sent * (degree - together))
        last_kernels = np.where(is_sliced, np.maximum(slice_computed, back), slice_computed)
        return gather + second_gather + last_kernels + back - computed + latency

    def _gather_wire_seconds(self, received: Floats) -> Floats:
        """Return the seconds in which each member receives `received` bytes of a gather.

        Where a group spans hosts, the bytes also go around a ring of hosts, and the members of a host share each
        boundary. Both happen at the same time, so the longer counts.
        """
        inside = self.network.inside.gather.seconds(received)
        across = self.network.across.gather.seconds(received / self.rows.together)
        return np.where(self.rows.inside, inside, np.maximum(inside, across))

    def _swap_seconds(self, is_forward: bool, computed: Floats) -> Floats:
        """Return what shows in one pass of the exchange of heads for rows before the kernels, and back after them.

        Forward sends queries, keys and values, and outputs back; backward sends gradients of outputs, and those of
        queries, keys and values back. This takes A and B seconds for each of n slices of heads. In one slice, all of
        A + B shows. In several, messages travel beside the kernels of other slices, which take C seconds in all: the
        pass takes the longer of A + C + B and n · (A + B) + `SHOWN_KERNELS` · C, of which C does not show.
        """
        members, slices = self.exchanging, self.slices
        neighbours = np.minimum(self.rows.together, members)  # that share a host, with the member itself
        arriving = self.queries + (self.keys if is_forward else 0.0)
        leaving = self.queries + (0.0 if is_forward else self.key_gradients)
        near, far = (neighbours - 1) / members / slices, (members - neighbours) / members / slices
        there, back = (self._exchange_seconds(sent * near, sent * far) for sent in (arriving, leaving))
        sliced = np.maximum(there + computed + back, slices * (there + back) + SHOWN_KERNELS * computed) - computed
        return np.where(slices > 1, sliced, there + back) + 2 * slices * self.network.step_seconds

    def _count_slices(self) -> tuple[Floats, Floats]:
        """Count the slices of heads in which large exchanges go, and the rings of keys: one a slice, or one for all.

        A member computes its heads in runs that share a key/value head. Only equal slices are made: either the runs are
        dealt to slices, each with a ring of its own, or the heads of each run are, and all slices share one ring. What
        members of a narrow group fetch is whole.
        """
        most, large = EXCHANGE_SLICES, self.queries >= EXCHANGE_SLICES * EXCHANGE_SLICE_BYTES
        heads, runs = _deal_heads(self.network.heads, self.network.kv_heads, self.exchanging.astype(np.int64))
        even = (runs % most == 0) | ((most % runs == 0) & (heads % most == 0))
        slices = np.where(large & even & (self.exchanging > 1) & (self.rows.foreign is None), float(most), 1.0)
        return slices, np.where(runs % most == 0, slices, 1.0)

    def _exchange_seconds(self, near: Floats, far: Floats) -> Floats:
        """Return the seconds in which a member exchanges bytes with its host (`near`) and with others, side by side."""
        return np.maximum(self.network.inside.exchange.seconds(near), self.network.across.exchange.seconds(far))
