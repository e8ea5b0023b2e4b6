"""What attention costs a group under each communication type: kernels, and what of the messages they do not hide.

A machine without a `Network` is ideal: only the two speeds of a `Cost` count, attention hides a ring's traffic and
nothing of an exchange or a gather. With one, each layer and pass has the bytes that the code sends:
- `p2p`, a ring of r members: r − 1 of its r blocks travel while another is computed; in backward the gradients of a
  block travel behind it. What members of a narrow ring fetch comes before the kernels, and leaves after them.
- `all_gather`: a gather in each pass, and an exchange of gradients in backward. Between hosts a gather's bytes come
  through all slots of a host together.
- `a2a`: each slot exchanges with the slots of its host and of other hosts at the same time. Key/value heads fewer than
  members are sent several times.
- `a2a+p2p`: exchanges around a ring of fewer, larger blocks.
Large exchanges and gathers go in two slices of heads, of which one travels while the other is computed: half of them
shows, and what is longer than the kernels of a slice.
"""

from collections.abc import Sequence
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
    member_heads = np.maximum(1, heads // members)
    runs = member_heads // np.gcd(max(1, heads // kv_heads), member_heads)
    return np.maximum(1.0, np.asarray(members * runs / kv_heads, dtype=np.float64))


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
        computed = computed + cost.copy_seconds * (rows.tokens + rows.foreign) / rows.degree * (around > 1)
    else:
        computed = computed + cost.merge_seconds * rows.tokens / rows.degree * (around - 1)
    shown = _network_seconds if cost.network else _ideal_seconds
    return AttentionPrice(computed, shown(cost, rows, around, computed))


def latency_seconds(cost: AttentionRates, degree: Floats) -> Floats:
    """Return the seconds that groups of these degrees wait for messages however few rows they carry.

    Under "auto" they are the lesser of a ring's and a gather's: unlike exchanges, these two suit any number of heads.
    A ring of r members has r − 1 steps, a gather one, and an exchange of heads one more. On ideal links each takes
    `ring_step_seconds`. On measured links each is several messages of `step_seconds` in every layer: a step's block
    goes round in both passes, and its gradients in backward; an exchange goes there and back.
    """
    forward_only = cost.passes == "forward"
    types = ("p2p", "all_gather") if cost.cp_comm_type == "auto" else (cost.cp_comm_type,)
    seconds: list[Floats] = []
    for kind in types:
        exchanging = exchanging_members(kind, cost.a2a_size, degree)
        swaps = (exchanging > 1).astype(np.float64)
        steps: Floats = np.minimum(degree - 1, 1.0) if kind == "all_gather" else degree / exchanging - 1
        if cost.network is None:
            seconds.append(cost.ring_step_seconds * (steps + swaps))
        else:
            messages = (1 if forward_only else 3) * steps + (2 if forward_only else 4) * swaps
            seconds.append(cost.network.layers * cost.network.step_seconds * messages)
    return np.minimum(*seconds) if len(seconds) > 1 else seconds[0]


def _ideal_seconds(cost: AttentionRates, rows: Rows, around: Floats, computed: Floats) -> Floats:
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


def _network_seconds(cost: AttentionRates, rows: Rows, around: Floats, computed: Floats) -> Floats:
    """Return the seconds of messages that kernels do not hide on measured links, of all layers.

    `block` is the bytes of a member's keys and values in a layer, `gradients` those of a block's gradients, `queries`
    those of its queries (outputs are as many), `keys` and `back` those of keys and values that it exchanges with all
    copies, forward and in backward: gradients of the copies of a head are summed, and travel in the dtype of sums.
    """
    network, kind = cost.network, cost.cp_comm_type
    assert network is not None
    inside, across, degree, together = network.inside, network.across, rows.degree, rows.together
    exchanging = degree / around
    copies = kv_copies(network.heads, network.kv_heads, exchanging)
    both = cost.passes != "forward"
    member_rows = rows.tokens / degree / network.layers  # bytes of a cost are of all layers
    block = cost.ring_bytes * member_rows * (network.block_share if both else 1.0)
    gradients = cost.ring_bytes * member_rows * network.gradient_share
    exchanged = cost.exchange_bytes * member_rows / (2 if both else 1)
    queries, keys = (1 - network.key_share) / 2 * exchanged, network.key_share * exchanged * copies
    back = keys * np.where(copies > 1, network.gradient_share / network.block_share, 1.0)

    def step(size: Floats) -> Floats:
        """Return the seconds of a message to the next member of a ring, for which all wait where it crosses hosts."""
        return np.where(rows.inside, inside.point.seconds(size), across.point.seconds(size))

    def exchange(sent: Floats, members: Floats) -> Floats:
        """Return the seconds in which a member sends bytes to each of so many, inside its host and across."""
        near = np.minimum(together, members)
        return np.maximum(inside.exchange.seconds(sent * (near - 1)), across.exchange.seconds(sent * (members - near)))

    seconds = 0.0 * computed
    for forward in (True, False) if both else (True,):
        share = (FORWARD_OF_ATTENTION if forward else 1 - FORWARD_OF_ATTENTION) if both else 1.0
        kernels = share * computed / network.layers
        if kind == "all_gather":
            received = block * (degree - 1)
            near, far = inside.gather.seconds(received), across.gather.seconds(received / together)
            messages = [np.where(rows.inside, near, np.maximum(near, far))]
            messages += [] if forward else [exchange(gradients, degree)]
            seconds = seconds + _shown_seconds(messages, kernels, block * degree >= GATHER_SLICE_BYTES)
            continue
        sizes = [block * copies] if forward else [block * copies, gradients * copies]
        if rows.foreign is None:
            travels = sum((around - 1) * step(size) for size in sizes)
            seconds = seconds + np.maximum(travels - kernels * (1 - 1 / around), 0.0)
        else:
            seconds = seconds + sum(step((around - 1) * size) for size in sizes)
        if "a2a" in kind:
            leaves, returns = (queries + keys, queries) if forward else (queries, queries + back)
            messages = [exchange(size / exchanging, exchanging) for size in (leaves, returns)]
            seconds = seconds + _shown_seconds(messages, kernels, queries >= EXCHANGE_SLICES * EXCHANGE_SLICE_BYTES)
    return network.layers * seconds + latency_seconds(cost, degree)


def _shown_seconds(messages: Sequence[Floats], kernels: Floats, sliced: NDArray[np.bool_]) -> Floats:
    """Return what shows of messages, all of each or, of one in two slices, what is beside no kernels of the other."""
    parts = [np.where(sliced, np.maximum(sent / 2, sent - kernels / 2), sent) for sent in messages]
    return np.sum(np.broadcast_arrays(*parts), axis=0)
