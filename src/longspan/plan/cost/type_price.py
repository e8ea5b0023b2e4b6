"""The price of one call of attention under each communication type: seconds of a member of a group as it stands, on its
hosts, with its rows, and with what a window or chunk leaves to send.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from longspan.plan.check import check_choice, check_count
from longspan.plan.cost.cost import Cost, Rows, price_attention
from longspan.plan.cost.state_cost import busiest_ratio
from longspan.plan.micro_batch import Group


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
    passes: Literal["both", "forward"] = "both"
    value_dim: int | None = None
    causal: bool = True
    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        """Check the counts and the passes."""
        for name in ("heads", "kv_heads", "head_dim", "bytes_per_number"):
            check_count(f"{name} of an attention call", getattr(self, name))
        check_choice("passes of an attention call", self.passes, ("both", "forward"))

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

    `seconds` of each member, of which `exposed` are messages that kernels do not hide. `sizes` are the members that
    exchange heads and those of a ring. A type that the heads forbid takes infinite seconds, and `impossible` names the
    reason.
    """

    cp_comm_type: str
    sizes: tuple[int, int]
    seconds: float
    exposed: float
    impossible: str = ""

    @property
    def name(self) -> str:
        """The type, with its sizes if it has two levels."""
        return f"{self.cp_comm_type} {self.sizes}" if self.cp_comm_type == "a2a+p2p" else self.cp_comm_type

    def __str__(self) -> str:
        """Describe the price in a line: kernels, and messages that show."""
        if self.impossible:
            return f"{self.name} cannot: {self.impossible}"
        computed, exposed = (self.seconds - self.exposed) * 1e3, self.exposed * 1e3
        return (
            f"{self.name} takes {self.seconds * 1e3:.3g} ms: {computed:.3g} ms of attention, and {exposed:.3g} ms of "
            "messages that it does not hide"
        )


def price_types(cost: Cost, group: Group, call: AttentionCall, node_size: int) -> dict[str, TypePrice]:
    """Price all types by the cost of one layer, of a2a+p2p for the group's sizes or the fastest pair of its degree.

    A prime degree has no two levels: its a2a+p2p has one member that exchanges heads, and so is a ring. A number of
    query heads that the exchanging members do not divide makes a type impossible.
    """
    degree, sizes = group.degree, group.hierarchical_context_parallel_sizes
    inner = [sizes[0]] if sizes else [i for i in range(2, degree) if degree % i == 0] or [1]
    nodes = [slot // node_size for slot in group.slots]
    together = min(nodes.count(node) for node in nodes)
    prices: dict[str, TypePrice] = {}
    for kind, exchanging in (("a2a", degree), ("p2p", 1), ("all_gather", 1), *(("a2a+p2p", i) for i in inner)):
        price = _price_type(cost, kind, exchanging, group, call, together)
        if kind not in prices or price.seconds < prices[kind].seconds:
            prices[kind] = price
    return prices


def _price_type(cost: Cost, kind: str, inner: int, group: Group, call: AttentionCall, together: int) -> TypePrice:
    """Price a type of which `inner` members exchange heads, and `together` members at least share a host.

    A kernel's typical document has Σ n² / Σ n rows, the mean over rows of how long their document is, or those of a
    chunk if that is shorter. Under a narrow window or chunk a ring sends only what its members see.
    """
    degree, laid_out = group.degree, group.laid_out
    around = degree // inner  # members of a ring
    sizes = (inner, around) if kind != "all_gather" else (1, degree)
    if call.heads % inner:
        return TypePrice(kind, sizes, math.inf, math.inf, f"{call.heads} query heads do not divide by {inner}")
    tokens, squares = sum(laid_out), sum(length * length for length in laid_out)
    typical = squares / max(1, tokens)
    counts = np.array([tokens, call.squares(laid_out), degree, together, squares, sizes[1]], dtype=np.float64)
    rows, pairs, members, neighbours, causal, ring = counts
    even = call.window or call.chunk or not call.causal  # members of a ring see about as much as each other
    price = Rows(
        tokens=rows,
        squares=pairs,
        degree=members,
        together=neighbours,
        busiest=1.0 if even else busiest_ratio(group.partition, rows, causal, ring),
        typical=np.float64(min(typical, call.chunk or typical)),  # pyright: ignore[reportArgumentType]
        window=call.window or math.inf,
        sent=1.0 if kind == "all_gather" else fetched_share(group.lengths, around, call.window, call.chunk),
    )
    computed, shown = price_attention(dataclasses.replace(cost, cp_comm_type=kind, a2a_size=inner), price)
    exposed = float(shown) if degree > 1 else 0.0
    return TypePrice(kind, sizes, float(computed) + exposed, exposed)


def fetched_share(lengths: Sequence[int], degree: int, window: int | None, chunk: int | None) -> float:
    """Return the share of a ring's rows that members send if they send only what others see; 1.0 where a ring is used.

    It depends on lengths only, so it is the same on every member. Members send what is seen where that is at most half
    of a ring's rows, and at most twice the rows of the members: a ring holds that many rows of others.

    A document has at most 2 · degree runs, which here count as equally long. Under a window each run sees window − 1
    rows before it, and under chunks the rows from the start of its first row's chunk on.
    """
    if degree == 1 or (window is None and chunk is None):
        return 1.0
    rows = np.asarray(lengths, dtype=np.int64)
    foreign = (degree - 1) * rows
    if window is not None:
        before_run = min(window - 1, int(rows.max()))  # a huge window must not overflow
        foreign = np.minimum(foreign, 2 * degree * before_run)
    if chunk is not None:
        starts = rows[:, None] * np.arange(1, 2 * degree) // (2 * degree)
        foreign = np.minimum(foreign, (starts % chunk).sum(1))
    seen_rows, member_rows = int(foreign.sum()), int(rows.sum())
    return seen_rows / ((degree - 1) * member_rows) if seen_rows <= min((degree - 1) / 2, 2) * member_rows else 1.0
