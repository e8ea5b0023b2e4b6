"""One block: local query rows against one set of key rows, through the kernel of a call.

The communication patterns (`ring.py`, `all_gather.py`, `all_to_all.py`) decide which key rows there are and when; what
is computed with them is here, and is the same for all patterns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.attention.geometry.launch import Launch
from longspan.attention.kernels import Kernel
from longspan.attention.kernels.dropout import Dropout
from longspan.attention.sums.merge import Partial, RowSum
from longspan.attention.sums.rows import taken
from longspan.comm import Addend

NUMBERS_AT_ONCE = 1 << 23  # of (rows, heads, head size) whose products with the gradient are held: 32 MiB in float32


@dataclass(frozen=True)
class Rule:
    """What is computed with the rows that see each other, whatever the communication (what sees what: `members.py`).

    `sinks` (N,) are those of the heads at hand. `max_gather_bytes` bounds what `all_gather` holds at a time;
    `kv_heads` is how many key/value heads the call has, which an exchange of heads needs to know.
    """

    kernel: Kernel
    scale: float
    softcap: float | None = None
    dropout: Dropout | None = None
    sinks: Tensor | None = None
    max_gather_bytes: int | None = None
    kv_heads: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the kernel; dropout only where there is some, for most kernels have none."""
        found: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap}
        return found if self.dropout is None else found | {"dropout": self.dropout}

    def for_heads(self, start: int, stop: int) -> "Rule":
        """The same for query heads start to stop of the tensors at hand."""
        if self.sinks is None and self.dropout is None:
            return self
        sinks = None if self.sinks is None else self.sinks[start:stop]
        return replace(self, sinks=sinks, dropout=self.dropout and self.dropout.from_head(start))

    def finish(self, total: Partial) -> tuple[Tensor, Tensor]:
        """out (T, N, Hv) and lse (T, N) over all keys, and the sinks.

        A sink is one more key with value 0: it joins the log-sum-exp of each row and thins the output. The lse of rows
        that see neither a key nor a sink (of −inf) is finite, so that their weights are 0.
        """
        out, lse = total.result()
        if self.sinks is None:
            return out, lse
        with_sinks = torch.logaddexp(lse, self.sinks.to(lse.dtype)).clamp_(min=torch.finfo(lse.dtype).min)
        return out.mul_(torch.exp(lse - with_sinks).unsqueeze(-1)), with_sinks

    def sink_gradient(self, saved: "Saved") -> Tensor | None:
        """−Σ rows weight of the sink · (dout · out): with lse over keys and sink, softmax's gradient at value 0.

        Some rows after others: products of all rows at once would take several times the memory of the queries.
        """
        if self.sinks is None:
            return None
        total, rows = self.sinks.new_zeros(self.sinks.shape, dtype=saved.lse.dtype), _rows_at_once(saved.out)
        for dout, out, lse in zip(*(x.split(rows) for x in (saved.dout, saved.out, saved.lse)), strict=True):
            weight = torch.exp(self.sinks.to(lse.dtype) - lse)
            total -= (weight * (dout * out.to(lse.dtype)).sum(-1)).sum(0)
        return total


def _rows_at_once(x: Tensor) -> int:
    return max(1, NUMBERS_AT_ONCE // x.shape[1:].numel())


KEPT = 5  # q, k, v, out and lse, as the kernel had them
Kept = Sequence[Tensor]


class Attended(NamedTuple):
    """What one part's forward pass gives: out (T, N, Hv) of the local rows, and what its backward pass is given.

    `kept` is q, k, v, out and lse of what was computed here, once or for one slice of the heads after another; None
    stands for the local out.
    """

    out: Tensor
    kept: tuple[Tensor | None, ...]


class Gradients(NamedTuple):
    """Gradients of the local q, k and v, those of k and v summed over the group; of the sinks, this rank's part."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None


class Saved(NamedTuple):
    """What a block's backward starts from: dout, q, out and lse (T, N, …), the last two over the keys of all blocks."""

    dout: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor


def add_block(total: Partial, q: Tensor, k: Tensor, v: Tensor, launches: tuple[Launch, ...], rule: Rule) -> None:
    """Add to `total` the attention of q (T, N, H) to this block's k (Tk, K, H), v (Tk, K, Hv)."""
    options = rule.options
    for launch in launches:
        rows, keys = launch.q_rows, launch.k_rows
        out, lse = rule.kernel.forward(taken(q, rows), taken(k, keys), taken(v, keys), launch, **options)
        total.add(rows, out, lse)


def block_gradients(
    dq: RowSum, saved: Saved, k: Tensor, v: Tensor, launches: tuple[Launch, ...], rule: Rule
) -> list[Addend]:
    """Add this block's part of the query's gradient to `dq`; return the keys' and values', in parts."""
    found, options = list[Addend](), rule.options
    for launch in launches:
        rows, keys = launch.q_rows, launch.k_rows
        dout, q, out, lse = (taken(x, rows) for x in saved)
        gradient, *of_keys = rule.kernel.backward(dout, q, taken(k, keys), taken(v, keys), out, lse, launch, **options)
        dq.add(rows, gradient)
        found.append(Addend(keys, of_keys))
    return found


def summed(addends: list[Addend], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The sums dk (Tk, K, H) and dv (Tk, K, Hv) of a block's parts."""
    dk, dv = RowSum(tuple(k.shape), k), RowSum(tuple(v.shape), v)
    for rows, (of_k, of_v) in addends:
        dk.add(rows, of_k)
        dv.add(rows, of_v)
    return dk.result(), dv.result()
