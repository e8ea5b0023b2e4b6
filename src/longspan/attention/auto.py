"""Which communication type suits a group (`cp_comm_type="auto"`), from node size, heads and lengths, and why.

An estimate for one layer, forward and backward: attention at a speed that falls for short pieces, and what of the
communication attention cannot hide. Every rank computes it from the same integers, so that all choose alike.

>>> call = AttentionCall(heads=32, kv_heads=8, head_size=128, value_size=128)
>>> choice = choose_type(group, call, node_size=8)
>>> print(choice)

Not weighed: memory; all_gather takes more of it the longer the group's documents are.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longspan.attention.all_to_all import HeadSplit
from longspan.attention.call import AttentionCall
from longspan.attention.tiles_between import is_narrow
from longspan.layout import Floats, Integers, Partition
from longspan.plan import Group

TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p", "auto")


@dataclass(frozen=True)
class Machine:
    """Constants of the estimate; the defaults fit figures of H200 nodes with FlashAttention-4 and 400 Gbit/s between.

    A kernel reaches half of `flops_per_second` on pieces of `half_speed_rows` rows. Bytes per second are those of one
    member and include the packing of what is sent; `step_seconds` is what a batch of messages, with the launches around
    it, takes however small it is. A step of a ring makes `merge_passes` passes over the output's rows in float32.
    """

    flops_per_second: float = 6.2e14
    half_speed_rows: int = 300
    inside_bytes_per_second: float = 180e9
    across_bytes_per_second: float = 40e9
    memory_bytes_per_second: float = 4e12
    merge_passes: int = 30
    step_seconds: float = 50e-6


@dataclass(frozen=True)
class Estimate:
    """Seconds of one layer, forward and backward, under one type; `sizes` (a2a, p2p) members exchange heads and blocks.

    `attention` includes merging; `exposed` is the communication over `links` that does not hide behind it.
    """

    cp_comm_type: str
    sizes: tuple[int, int]
    attention: float
    exposed: float
    links: str

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.attention + self.exposed

    def __str__(self) -> str:
        return (
            f"{_name(self.cp_comm_type, self.sizes)} takes {self.seconds * 1e3:.3g} ms: {self.attention * 1e3:.3g} ms "
            f"of attention, and {self.exposed * 1e3:.3g} ms of communication {self.links} nodes that it does not hide"
        )


@dataclass(frozen=True)
class Choice:
    """A type for a group, its levels where it is a2a+p2p, and a line for each thing that was weighed."""

    cp_comm_type: str
    hierarchical_context_parallel_sizes: tuple[int, int] | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.reasons)


def choose_type(group: Group, call: AttentionCall, *, node_size: int, machine: Machine | None = None) -> Choice:
    """The fastest type for this group by estimate. Never raises: p2p and all_gather take any heads and lengths."""
    if group.degree == 1:
        return Choice("p2p", None, ("one member holds all rows: nothing is communicated",))
    estimates = estimates_of(group, call, node_size=node_size, machine=machine)
    cannot = [
        f"{_name(kind, sizes)} cannot: {call.heads} query heads do not divide by {sizes[0]}"
        for kind, sizes in _candidates(group.degree)
        if call.heads % sizes[0]
    ]
    best = min(estimates, key=lambda estimate: estimate.seconds)
    so = f"{_name(best.cp_comm_type, best.sizes)} is chosen: it is the fastest"
    levels = best.sizes if best.cp_comm_type == "a2a+p2p" else None
    return Choice(best.cp_comm_type, levels, (_facts(group, call, node_size), *map(str, estimates), *cannot, so))


def estimates_of(
    group: Group, call: AttentionCall, *, node_size: int, machine: Machine | None = None
) -> list[Estimate]:
    """An estimate of each type and pair of levels that the heads allow."""
    able = [(kind, sizes) for kind, sizes in _candidates(group.degree) if call.heads % sizes[0] == 0]
    return [_estimate(kind, sizes, group, call, node_size, machine or Machine()) for kind, sizes in able]


def _candidates(degree: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield from (("a2a", (degree, 1)), ("p2p", (1, degree)), ("all_gather", (1, degree)))
    yield from (("a2a+p2p", (inner, degree // inner)) for inner in range(2, degree) if degree % inner == 0)


def _name(kind: str, sizes: tuple[int, int]) -> str:
    return f"{kind} {sizes}" if kind == "a2a+p2p" else kind


def _facts(group: Group, call: AttentionCall, node_size: int) -> str:
    nodes, documents = len({slot // node_size for slot in group.slots}), len(group.lengths)
    limits = {"window": call.mask.window, "chunk": call.mask.chunk}
    limited = "".join(f", {name} {limit}" for name, limit in limits.items() if limit is not None)
    return (
        f"{group.degree} members on {nodes} node{'s' * (nodes > 1)} of {node_size} slots; {documents} "
        f"document{'s' * (documents > 1)} of {sum(group.lengths)} rows together, {max(group.lengths)} at most; "
        f"{call.heads} query and {call.kv_heads} key/value heads{limited}"
    )


def _estimate(
    kind: str, sizes: tuple[int, int], group: Group, call: AttentionCall, node_size: int, machine: Machine
) -> Estimate:
    """One layer forward and backward on the fullest member: `inner` members exchange heads, `around` blocks."""
    inner, around = sizes
    inside_speed, across_speed = machine.inside_bytes_per_second, machine.across_bytes_per_second
    heads_stay_inside = all(
        _spans_one_node(group.slots[i : i + inner], node_size) for i in range(0, group.degree, inner)
    )
    blocks_stay_inside = all(_spans_one_node(group.slots[i::inner], node_size) for i in range(inner))
    attention, exposed = _attention_seconds(kind, sizes, group, call, machine), 0.0
    if inner > 1:
        exposed += (
            _swap_bytes(sizes, group, call) / (inside_speed if heads_stay_inside else across_speed)
            + 4 * machine.step_seconds
        )
    if around > 1:
        seconds = _block_bytes(kind, sizes, group, call) / (inside_speed if blocks_stay_inside else across_speed)
        hidden = 0.0 if kind == "all_gather" else attention * (around - 1) / around
        exposed += max(0.0, seconds - hidden)
        exposed += 3 * (1 if kind == "all_gather" else around - 1) * machine.step_seconds
    levels = ((heads_stay_inside, inner), (blocks_stay_inside, around))
    links = {"inside" if stays_inside else "across" for stays_inside, size in levels if size > 1}
    return Estimate(kind, sizes, attention, exposed, " and ".join(sorted(links, reverse=True)))


def _attention_seconds(kind: str, sizes: tuple[int, int], group: Group, call: AttentionCall, machine: Machine) -> float:
    inner, around = sizes
    rows = sum(group.lengths) / around  # of a member of the ring, for heads / inner heads
    piece = min(_typical_length(group) / around, call.mask.chunk or math.inf)
    speed = machine.flops_per_second * piece / (piece + machine.half_speed_rows)
    merged = kind != "all_gather" and not is_narrow(call.mask, group.lengths, around)
    merges = machine.merge_passes * (around - 1) if merged else 0
    merged_bytes = merges * rows * call.heads / inner * call.value_size * 4
    computed = _flops(group, call) / group.degree / speed * _busiest(group, call, around)
    return computed + merged_bytes / machine.memory_bytes_per_second


def _busiest(group: Group, call: AttentionCall, around: int) -> float:
    """What the busiest member of a ring computes, over the mean of its members; 1 where their rows are zigzag."""
    if around == 1 or group.partition == "zigzag":
        return 1.0
    shares, lengths = Partition.contiguous(group.laid_out, around), np.array(group.lengths, dtype=np.int64)
    pairs: list[float] = []
    for member in range(around):
        segments = shares.segments(member)
        length = lengths[segments.document]
        pairs.append(float((_pairs(segments.stop, length, call) - _pairs(segments.start, length, call)).sum()))
    return max(pairs) * around / sum(pairs)


def _pairs(stop: Integers, length: Integers, call: AttentionCall) -> Floats:
    """Keys that the first `stop` rows of documents of `length` rows see together, to half a key a row."""
    rows = np.minimum(stop, length).astype(np.float64)  # the rest pads the document out
    if not call.mask.causal:
        return rows * length
    if call.mask.chunk is not None:
        chunks, rest = np.divmod(rows, call.mask.chunk)
        return (chunks * call.mask.chunk**2 + rest**2) / 2
    limited = rows if call.mask.window is None else np.minimum(rows, call.mask.window)
    return rows * limited - limited**2 / 2


def _spans_one_node(slots: tuple[int, ...], node_size: int) -> bool:
    return len({slot // node_size for slot in slots}) == 1


def _typical_length(group: Group) -> float:
    """The length of the document in which a pair of rows typically lies."""
    return sum(length**2 for length in group.lengths) / sum(group.lengths)


def _flops(group: Group, call: AttentionCall) -> float:
    """Forward and backward of the whole group: 3.5 times the forward's two products."""
    pairs = sum(
        length
        * min(length, 2 * (call.mask.window or length), call.mask.chunk or length)
        / (2 if call.mask.causal else 1)
        for length in group.lengths
    )
    return 3.5 * 2 * pairs * call.heads * (call.head_size + call.value_size)


def _swap_bytes(sizes: tuple[int, int], group: Group, call: AttentionCall) -> float:
    """What a member sends to exchange heads for rows: q, k, v and out; then dout, dq, dk and dv."""
    inner, rows = sizes[0], sum(group.lengths) / group.degree
    split = HeadSplit(call.heads, call.kv_heads, inner)
    width = 2 * (call.heads + call.kv_heads * split.kv_copies) * (call.head_size + call.value_size)
    return rows * (inner - 1) / inner * call.dtype.itemsize * width


def _block_bytes(kind: str, sizes: tuple[int, int], group: Group, call: AttentionCall) -> float:
    """What a member gets of the others' keys and values, twice, and sends of their gradients in float32."""
    inner, around = sizes
    foreign_rows = sum(group.lengths) * (around - 1) / around
    if call.mask.window is not None and kind != "all_gather":
        foreign_rows = min(foreign_rows, 2.0 * (call.mask.window - 1) * len(group.lengths))
    if call.mask.chunk is not None and kind != "all_gather":
        foreign_rows = min(foreign_rows, float(call.mask.chunk * len(group.lengths)))  # two runs, of half a chunk each
    width = HeadSplit(call.heads, call.kv_heads, inner).member_kv_heads * (call.head_size + call.value_size)
    return foreign_rows * width * (2 * call.dtype.itemsize + max(4, call.dtype.itemsize))
