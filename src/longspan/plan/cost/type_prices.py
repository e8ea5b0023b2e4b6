"""What one call of attention takes under each communication type, by which "auto" is resolved."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from longspan.plan.check import check_choice, check_count
from longspan.plan.cost.cost import Cost, PricedRows, attention_and_message_seconds, attention_imbalance
from longspan.plan.messages import fetched_share
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
        for name in ("heads", "kv_heads", "head_dim", "bytes_per_number"):
            check_count(f"{name} of an attention call", getattr(self, name))
        check_choice("passes of an attention call", self.passes, ("both", "forward"))

    def squares(self, lengths: Sequence[int]) -> float:
        """Return twice the (query, key) pairs in documents of these lengths. A causal document of n rows has n² / 2
        pairs. A window of w rows leaves n · w and chunks of c rows n · c / 2, if these are fewer; without a causal mask
        there are twice as many.
        """
        pairs = sum(n * min(n, 2 * (self.window or n), self.chunk or n) for n in lengths)
        return float(pairs) * (1 if self.causal else 2)


@dataclass(frozen=True)
class TypePrice:
    """What one call of attention takes under a communication type.

    `seconds` are those of each member, of which `exposed` are messages that kernels do not hide. `sizes` are the
    members that exchange heads and those of a ring. A type that the heads forbid takes infinite seconds, and
    `impossible` names the reason.
    """

    cp_comm_type: str
    sizes: tuple[int, int]
    seconds: float
    exposed: float
    impossible: str = ""

    @property
    def name(self) -> str:
        if self.cp_comm_type == "a2a+p2p":
            return f"{self.cp_comm_type} {self.sizes}"
        return self.cp_comm_type


def price_type(cost: Cost, kind: str, inner: int, group: Group, call: AttentionCall, together: int) -> TypePrice:
    """Price a call of a group under the type `kind`, where `inner` members exchange heads (1: none), and each member
    shares its host with at least `together` of them, itself included. The price is infinite, with the reason, if
    `inner` does not divide the query heads.

    A kernel's typical document has Σ n² / Σ n rows, or those of a chunk if that is shorter. Under a narrow window or
    chunk a ring sends only what its members see.
    """
    degree = group.degree
    around = degree // inner  # members of a ring
    sizes = (inner, around) if kind != "all_gather" else (1, degree)
    if call.heads % inner:
        return TypePrice(kind, sizes, math.inf, math.inf, f"{call.heads} query heads do not divide by {inner}")
    tokens = sum(group.laid_out)
    # A document's pairs are those of its path, up to its last row, less those of the rows before its own.
    paths = group.laid_out
    before: tuple[int, ...] = ()
    if group.parents is not None:
        paths = group.path_lengths
        before = group.bases
    squares = sum(length * length for length in paths) - sum(length * length for length in before)
    typical = squares / max(1, tokens)
    # as float64 scalars, which are priced as arrays are
    rows, pairs, members, neighbours, causal_squares, ring_members = np.array(
        [tokens, call.squares(paths) - call.squares(before), degree, together, squares, sizes[1]],
        dtype=np.float64,
    )
    even = call.window or call.chunk or not call.causal  # members of a ring see about as much as each other
    price = PricedRows(
        tokens=rows,
        squares=pairs,
        degree=members,
        together=neighbours,
        busiest=1.0 if even else attention_imbalance(group.partition, rows, causal_squares, ring_members),
        typical=np.float64(min(typical, call.chunk or typical)),  # pyright: ignore[reportArgumentType]
        window=call.window or math.inf,
        sent=1.0 if kind == "all_gather" else fetched_share(group.path_lengths, around, call.window, call.chunk),
    )
    computed, messages = attention_and_message_seconds(replace(cost, cp_comm_type=kind, a2a_size=inner), price)
    exposed = float(messages) if degree > 1 else 0.0
    return TypePrice(kind, sizes, float(computed) + exposed, exposed)
