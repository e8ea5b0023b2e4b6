"""Which communication type suits a group (`cp_comm_type="auto"`), from node size, heads and lengths, and why.

An estimate for one layer, forward and backward: attention at a speed that falls for short pieces, and what of the
communication attention cannot hide. Every rank computes it from the same integers, so that all choose alike.

>>> choice = choose_type(group, Call(heads=32, kv_heads=8, head_size=128, value_size=128), node_size=8)
>>> print(choice)

Not covered: what the types do (`ring.py`, `all_gather.py`, `all_to_all.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from longspan.attention.heads import Deal
from longspan.plan import Group

TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p", "auto")


@dataclass(frozen=True)
class Call:
    """What a choice depends on of one call of `attend`; `itemsize` is the bytes of a number."""

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    itemsize: int = 2
    causal: bool = True
    window: int | None = None


@dataclass(frozen=True)
class Machine:
    """Constants of the estimate; the defaults are an H200 node with FlashAttention-4, and 400 Gbit/s between nodes.

    A kernel reaches half of `flops_per_second` on pieces of `half_speed_rows` rows; `step_seconds` is what a batch of
    messages, with the launches around it, takes however small it is.
    """

    flops_per_second: float = 6.2e14
    half_speed_rows: int = 300
    inside_bytes_per_second: float = 350e9
    across_bytes_per_second: float = 40e9
    step_seconds: float = 50e-6


@dataclass(frozen=True)
class Estimate:
    """Seconds of one layer, forward and backward, under one type; `inner` members exchange heads for rows."""

    cp_comm_type: str
    inner: int
    attention: float
    exposed: float
    links: str

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.attention + self.exposed

    def __str__(self) -> str:
        return (
            f"{self.seconds * 1e3:.3g} ms: {self.attention * 1e3:.3g} ms of attention and "
            f"{self.exposed * 1e3:.3g} ms of communication {self.links} that it does not hide"
        )


@dataclass(frozen=True)
class Choice:
    """A type for a group, its levels where it is a2a+p2p, and one sentence for each thing that was weighed."""

    cp_comm_type: str
    hierarchical_context_parallel_sizes: tuple[int, int] | None
    inner: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.reasons)


def choose_type(group: Group, call: Call, *, node_size: int, machine: Machine | None = None) -> Choice:
    """The fastest type for this group by estimate. Never raises: p2p and all_gather take any heads and lengths."""
    machine = machine or Machine()
    if group.degree == 1:
        return Choice("p2p", None, 1, ("one member holds all rows: nothing is communicated",))
    about = [_facts(group, call, node_size)]
    found: list[tuple[Estimate, str]] = []
    for kind, inner in _candidates(group.degree):
        name = kind if kind != "a2a+p2p" else f"a2a+p2p ({inner}, {group.degree // inner})"
        if call.heads % inner:
            about.append(f"{name} cannot: {call.heads} query heads do not divide by {inner}")
            continue
        found.append((_estimate(kind, inner, group, call, node_size, machine), name))
        about.append(f"{name} takes {found[-1][0]}")
    best, name = min(found, key=lambda each: each[0].seconds)
    sizes = (best.inner, group.degree // best.inner) if best.cp_comm_type == "a2a+p2p" else None
    return Choice(best.cp_comm_type, sizes, best.inner, (*about, f"so {name}, the fastest"))


def _candidates(degree: int) -> Iterator[tuple[str, int]]:
    yield from (("a2a", degree), ("p2p", 1), ("all_gather", 1))
    yield from (("a2a+p2p", inner) for inner in range(2, degree) if degree % inner == 0)


def _facts(group: Group, call: Call, node_size: int) -> str:
    nodes = len({slot // node_size for slot in group.slots})
    window = "" if call.window is None else f", window {call.window}"
    return (
        f"{group.degree} members on {nodes} node{'s' * (nodes > 1)} of {node_size} slots; {len(group.lengths)} "
        f"document{'s' * (len(group.lengths) > 1)} of {sum(group.lengths)} rows together, {max(group.lengths)} at "
        f"most; {call.heads} query and {call.kv_heads} key/value heads{window}"
    )


def _estimate(kind: str, inner: int, group: Group, call: Call, node_size: int, machine: Machine) -> Estimate:
    """One layer forward and backward on the fullest member."""
    around, rows = group.degree // inner, sum(group.lengths) / group.degree
    piece = _typical_length(group) / (around if kind != "all_gather" else group.degree)
    speed = machine.flops_per_second * piece / (piece + machine.half_speed_rows)
    attention = _flops(group, call) / group.degree / speed
    inside = all(_in_one_node(group.slots[i : i + inner], node_size) for i in range(0, group.degree, inner))
    outside = all(_in_one_node(group.slots[i::inner], node_size) for i in range(inner))
    near, far = machine.inside_bytes_per_second, machine.across_bytes_per_second
    exposed, links = 0.0, "inside a node" if _in_one_node(group.slots, node_size) else "across nodes"
    if inner > 1:
        exposed += _swap_bytes(rows, inner, call) / (near if inside else far) + 4 * machine.step_seconds
        links = "inside nodes" if inside else "across nodes"
    if around > 1:
        seconds = _block_bytes(kind, rows * inner, around, inner, group, call) / (near if outside else far)
        hidden = 0.0 if kind == "all_gather" else attention * (around - 1) / around
        steps = 3 if kind == "all_gather" else 3 * (around - 1)
        exposed += max(0.0, seconds - hidden) + steps * machine.step_seconds
        links += f" and {'inside' if outside else 'across'} nodes" if inner > 1 else ""
    return Estimate(kind, inner, attention, exposed, links)


def _in_one_node(slots: tuple[int, ...], node_size: int) -> bool:
    return len({slot // node_size for slot in slots}) == 1


def _typical_length(group: Group) -> float:
    """The length of the document in which a pair of rows typically lies."""
    return sum(length**2 for length in group.lengths) / sum(group.lengths)


def _flops(group: Group, call: Call) -> float:
    """Forward and backward of the whole group: 3.5 times the forward's two products."""
    pairs = sum(
        length * min(length, 2 * (call.window or length)) / (2 if call.causal else 1) for length in group.lengths
    )
    return 3.5 * 2 * pairs * call.heads * (call.head_size + call.value_size)


def _kv_width(heads: int, call: Call) -> int:
    return heads * (call.head_size + call.value_size)


def _swap_bytes(rows: float, inner: int, call: Call) -> float:
    """What a member sends to exchange heads for rows: q, k, v and out; then these and dout, and dq, dk, dv."""
    deal = Deal(call.heads, call.kv_heads, inner)
    kv = _kv_width(sum(deal.kv(m).stop - deal.kv(m).start for m in range(inner)), call)
    q, out = call.heads * call.head_size, call.heads * call.value_size
    return rows * (inner - 1) / inner * call.itemsize * (3 * (q + kv) + 3 * out)


def _block_bytes(kind: str, rows: float, around: int, inner: int, group: Group, call: Call) -> float:
    """What a member gets of the others' keys and values, twice, and sends of their gradients in float32."""
    deal = Deal(call.heads, call.kv_heads, inner)
    others = rows * (around - 1)
    if call.window is not None and kind != "all_gather":
        others = min(others, 2.0 * (call.window - 1) * len(group.lengths))
    width = _kv_width(deal.kv(0).stop - deal.kv(0).start, call)
    return others * width * (2 * call.itemsize + max(4, call.itemsize))
