"""The price of one call of attention under each communication type: seconds of a member, and bytes by level.

A call is priced for a group as it stands: on which hosts its slots are, how its rows are divided, and what a window or
chunk leaves to send. `Machine.attention_seconds` prices all types; attention resolves "auto" by it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from longspan.errors import PlanError, plural
from longspan.layout import Floats, Integers, Partition
from longspan.plan.check import check_count
from longspan.plan.cost.attention_price import Rows, kv_copies, price_attention
from longspan.plan.cost.cost import Cost
from longspan.plan.cost.links import Level
from longspan.plan.micro_batch import Group

CallPasses = Literal["both", "forward"]


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One layer's attention on each rank of a group, as far as its time depends on it.

    `heads` query and `kv_heads` key/value heads of `head_dim` (values of `value_dim`, None: as wide), in numbers of
    `bytes_per_number`. `passes`: "both" forward and backward, or "forward". A query sees all keys, or with `causal`
    those up to its own row, of these the last `window`, or those of its `chunk`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    bytes_per_number: int = 2
    passes: CallPasses = "both"
    value_dim: int | None = None
    causal: bool = True
    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        """Check the counts and the passes."""
        for name in ("heads", "kv_heads", "head_dim", "bytes_per_number"):
            check_count(f"{name} of an attention call", getattr(self, name))
        if self.passes not in get_args(CallPasses):
            raise PlanError(f"passes of an attention call is {self.passes!r}; use 'both' or 'forward'")

    @property
    def width(self) -> int:
        """Numbers of a head's key and value together."""
        return self.head_dim + (self.value_dim or self.head_dim)

    def squares(self, lengths: Sequence[int]) -> float:
        """Return twice the pairs of rows that see each other in documents of these lengths.

        A causal document of n rows has n² / 2 pairs, so that without limits this is the sum of squared lengths. A
        window of w rows leaves n · w pairs and chunks of c rows n · c / 2, if these are fewer. Without a causal mask
        there are twice as many.
        """
        pairs = sum(n * min(n, 2 * (self.window or n), self.chunk or n) for n in lengths)
        return float(pairs) * (1 if self.causal else 2)


@dataclass(frozen=True)
class TypePrice:
    """What one call of attention takes under a communication type.

    `seconds` of each member, of which `exposed` are messages that kernels do not hide; `bytes_by_level` are what all
    members send inside a host and across hosts. `sizes` are the members that exchange heads and those of a ring. A type
    that the heads forbid takes infinite seconds, and `impossible` names the reason.
    """

    cp_comm_type: str
    sizes: tuple[int, int]
    seconds: float
    exposed: float
    bytes_by_level: Mapping[Level, float]
    impossible: str = ""

    @property
    def name(self) -> str:
        """The type, with its sizes if it has two levels."""
        return f"{self.cp_comm_type} {self.sizes}" if self.cp_comm_type == "a2a+p2p" else self.cp_comm_type

    def __str__(self) -> str:
        """Describe the price in a line: kernels, messages that show, and bytes between hosts."""
        if self.impossible:
            return f"{self.name} cannot: {self.impossible}"
        across = self.bytes_by_level["across"]
        sent = f"{across / 1e6:.4g} MB cross hosts" if across else "nothing crosses hosts"
        computed, exposed = (self.seconds - self.exposed) * 1e3, self.exposed * 1e3
        return (
            f"{self.name} takes {self.seconds * 1e3:.3g} ms: {computed:.3g} ms of attention, and {exposed:.3g} ms of "
            f"messages that it does not hide; {sent}"
        )


Ways = tuple[tuple[str, int], ...]


def type_ways(group: Group) -> Ways:
    """Return every type with the members that exchange heads, a2a+p2p with the group's sizes or every pair of levels.

    A prime degree has no two levels: its a2a+p2p has one member that exchanges heads, and so is a ring.
    """
    degree, sizes = group.degree, group.hierarchical_context_parallel_sizes
    inner = [sizes[0]] if sizes else [i for i in range(2, degree) if degree % i == 0] or [1]
    return (("a2a", degree), ("p2p", 1), ("all_gather", 1), *(("a2a+p2p", i) for i in inner))


def price_type(
    cost: Cost, way: tuple[str, int], group: Group, call: AttentionCall, nodes: list[int], *, sent: float = 1.0
) -> TypePrice:
    """Price a type by the cost of one layer: the seconds of its kernels and those of the messages that show.

    `way` is the type and its members that exchange heads, `nodes` are the hosts of the slots. Members send the share
    `sent` of the rows of a ring. Where that is below 1, rows go straight to the members that see them, and no partial
    outputs are merged. A number of query heads that the exchanging members do not divide makes the type impossible.
    """
    (kind, inner), degree = way, group.degree
    around = degree // inner  # members of a ring
    sizes = (inner, around) if kind != "all_gather" else (1, degree)
    if call.heads % inner:
        impossible = f"{call.heads} query heads do not divide by {inner}"
        return TypePrice(kind, sizes, math.inf, math.inf, {"inside": 0.0, "across": 0.0}, impossible)
    cost = dataclasses.replace(cost, cp_comm_type=kind, a2a_size=inner, ring_bytes=cost.ring_bytes * sent)
    together = min(nodes.count(node) for node in set(nodes))
    busiest = _busiest_ratio(group, call, degree if kind == "all_gather" else around)
    foreign = sent * (around - 1) * sum(group.laid_out) if sent < 1.0 else None
    price = price_attention(cost, _call_rows(group, call, together, busiest, foreign))
    exposed = float(price.exposed) if degree > 1 else 0.0
    seconds = float(price.computed) + exposed
    return TypePrice(kind, sizes, seconds, exposed, bytes_by_level(cost, kind, sizes, sum(group.laid_out), nodes))


def _call_rows(group: Group, call: AttentionCall, together: int, busiest: float, foreign: float | None) -> Rows:
    """Return a group as `price_attention` takes it; `together`, `busiest` and `foreign` are as in `Rows`.

    `squares` are twice the pairs that the call's masks leave. A kernel's typical document has Σ n² / Σ n rows, the mean
    over rows of how long their document is, or those of a chunk if that is shorter.
    """
    laid_out = group.laid_out
    tokens = sum(laid_out)
    typical = sum(length * length for length in laid_out) / max(1, tokens)
    counts = np.array([tokens, call.squares(laid_out), group.degree, together], dtype=np.float64)
    return Rows(
        tokens=counts[0],
        squares=counts[1],
        degree=counts[2],
        together=counts[3],
        busiest=busiest,
        typical=np.float64(min(typical, call.chunk or typical)),  # pyright: ignore[reportArgumentType]
        window=call.window or math.inf,
        foreign=foreign,
    )


def describe_group(group: Group, call: AttentionCall, node_size: int) -> str:
    """Describe a group and a call in one line: members, hosts, documents and heads."""
    nodes, documents = len({slot // node_size for slot in group.slots}), len(group.lengths)
    limits = {"window": call.window, "chunk": call.chunk}
    limited = "".join(f", {name} {limit}" for name, limit in limits.items() if limit is not None)
    return (
        f"{group.degree} members on {plural(nodes, 'node')} of {node_size} slots; {plural(documents, 'document')} "
        f"of {sum(group.lengths)} rows together, {max(group.lengths)} at most; {call.heads} query and "
        f"{call.kv_heads} key/value heads{limited}"
    )


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
    """Return, for documents of these rows, a bound on the rows of others that a ring's members see together.

    Without limits each member sees all rows. A document has at most 2 · degree runs. Under a window each run sees
    window − 1 rows before it, and under chunks the rows from the start of its first row's chunk on.
    """
    foreign = (degree - 1) * rows
    if window is not None:
        before_run = min(window - 1, int(rows.max()))  # a huge window must not overflow
        foreign = np.minimum(foreign, 2 * degree * before_run)
    if chunk is not None:
        starts = rows[:, None] * np.arange(1, 2 * degree) // (2 * degree)
        foreign = np.minimum(foreign, (starts % chunk).sum(1))
    return foreign


def ring_share(call: AttentionCall, way: tuple[str, int], group: Group) -> float:
    """Return the share of the rows that a ring would send: 1, or under a narrow window or chunk those that others see.

    `way` is the type and its members that exchange heads. A gather always sends all rows.
    """
    (kind, inner), lengths = way, group.lengths
    around = group.degree // inner  # members of a ring
    if kind == "all_gather" or not is_narrow(lengths, around, call.window, call.chunk):
        return 1.0
    rows = np.asarray(lengths, dtype=np.int64)
    return float(foreign_rows(rows, around, call.window, call.chunk).sum()) / ((around - 1) * int(rows.sum()))


def bytes_by_level(
    cost: Cost, kind: str, sizes: tuple[int, int], tokens: int, nodes: Sequence[int]
) -> dict[Level, float]:
    """Return the bytes that all members send under a type in all layers of a cost: inside a host, and across hosts.

    `sizes` are the members that exchange heads and those of a ring, `nodes` the hosts of the members. A gather counts
    as a ring of all members, as NCCL runs it where the group has a communicator; its gradients are exchanged. All steps
    of a ring carry equally many bytes, and so do all pairs of an exchange: the share of steps or pairs that lead to
    another host is the share of bytes that cross hosts.
    """
    inner, degree = sizes[0], len(nodes)
    turns, gradients, exchanged = _message_bytes(cost, sizes, tokens)
    if kind == "all_gather":
        parts = (
            (turns - gradients, _cross_host_share_of_rings([nodes])),
            (gradients, _cross_host_share_of_pairs([nodes])),
        )
    else:
        rings = [nodes[i::inner] for i in range(inner)]
        sets = [nodes[i : i + inner] for i in range(0, degree, inner)]  # that exchange heads
        parts = ((turns, _cross_host_share_of_rings(rings)), (exchanged, _cross_host_share_of_pairs(sets)))
    across = math.fsum(sent * share for sent, share in parts)
    return {"inside": math.fsum(sent for sent, _ in parts) - across, "across": across}


def _message_bytes(cost: Cost, sizes: tuple[int, int], tokens: int) -> tuple[float, float, float]:
    """Return the bytes that members send around rings, of these the gradients, and the bytes of exchanges of heads.

    Each row goes to the other around − 1 members of its ring, and of a row's heads (inner − 1) / inner leave their
    member. A key/value head that several members need is sent to each; the gradients of its copies travel in the dtype
    of sums, and so are `widened` times as large. Keys and values are `key_share` of what is exchanged, and grow to
    `key_factor` by their copies. A cost without a network knows neither the heads nor these shares: nothing is copied,
    and gradients count as part of the turns.
    """
    network, (inner, around) = cost.network, sizes
    turns = cost.ring_bytes * tokens * (around - 1)
    exchanged = cost.exchange_bytes * tokens * (inner - 1) / inner
    if network is None:
        return turns, 0.0, exchanged
    copies, has_backward = float(kv_copies(network.heads, network.kv_heads, inner)), cost.passes != "forward"
    turns, widened = turns * copies, network.gradient_share / network.block_share if copies > 1 else 1.0
    gradients = network.gradient_share * turns if has_backward else 0.0
    key_factor = network.key_share * copies * ((1 + widened) / 2 if has_backward else 1.0)
    return turns, gradients, exchanged * (1 - network.key_share + key_factor)


def _cross_host_share_of_rings(rings: Sequence[Sequence[int]]) -> float:
    """Return the share of the steps around rings that lead to another host; `rings` have the members' hosts."""
    steps = [(a, b) for ring in rings for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
    return sum(a != b for a, b in steps) / len(steps)


def _cross_host_share_of_pairs(sets: Sequence[Sequence[int]]) -> float:
    """Return the share of pairs on two hosts, of all pairs of members of one set; `sets` have the members' hosts."""
    pairs = sum(len(members) * (len(members) - 1) for members in sets)
    # Both sums of squares have each member with itself, which the difference drops.
    same_host = sum(members.count(node) ** 2 for members in map(list, sets) for node in set(members))
    return (sum(len(members) ** 2 for members in sets) - same_host) / pairs if pairs else 0.0


def _busiest_ratio(group: Group, call: AttentionCall, around: int) -> float:
    """Return what the busiest member of a ring computes, over the mean of its members; 1 where rows are in zigzag."""
    if around == 1 or group.partition == "zigzag":
        return 1.0
    shares, lengths = Partition.contiguous(group.laid_out, around), np.array(group.lengths, dtype=np.int64)
    pairs: list[float] = []
    for member in range(around):
        segments = shares.segments(member)
        length = lengths[segments.document]
        pairs.append(
            float((_key_counts(segments.stop, length, call) - _key_counts(segments.start, length, call)).sum())
        )
    return max(pairs) * around / sum(pairs)


def _key_counts(stop: Integers, length: Integers, call: AttentionCall) -> Floats:
    """Count the keys that the first `stop` rows of documents of `length` rows see together.

    Half a key a row is left out: n causal rows count as n² / 2, not n (n + 1) / 2.
    """
    rows = np.minimum(stop, length).astype(np.float64)  # rows beyond the length are padding
    if not call.causal:
        return rows * length
    if call.chunk is not None:
        chunks, last_rows = np.divmod(rows, call.chunk)
        return (chunks * call.chunk**2 + last_rows**2) / 2
    limited = rows if call.window is None else np.minimum(rows, call.window)
    return rows * limited - limited**2 / 2
