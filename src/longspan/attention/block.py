"""One block: local query rows against one set of key rows, through the kernel of a call.

The communication patterns (`ring.py`, `all_gather.py`, `all_to_all.py`) decide which key rows there are and when; what
is computed with them is here, and is the same for all patterns.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longspan.attention.kernels import Kernel
from longspan.attention.kernels.dropout import Dropout
from longspan.attention.kernels.launch import Launch
from longspan.attention.merge import Partial, RowSum


@dataclass(frozen=True)
class Rule:
    """What is computed with the rows that see each other, whatever the communication (what sees what: `circle.py`).

    `sinks` (N,) are given in forward only: backward knows them from the log-sum-exp. `max_gather_bytes` bounds what
    `all_gather` holds at a time.
    """

    kernel: Kernel
    scale: float
    softcap: float | None = None
    dropout: Dropout | None = None
    sinks: Tensor | None = None
    max_gather_bytes: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the kernel; dropout only where there is some, for most kernels have none."""
        found: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap}
        return found if self.dropout is None else found | {"dropout": self.dropout}

    def for_heads(self, start: int, stop: int) -> "Rule":
        """The same for query heads start to stop of the tensors at hand."""
        sinks = None if self.sinks is None else self.sinks[start:stop]
        return replace(self, sinks=sinks, dropout=self.dropout and self.dropout.from_head(start))

    def finish(self, total: Partial) -> tuple[Tensor, Tensor]:
        """out (T, N, Hv) and lse (T, N) over all keys, and the sinks.

        A sink is one more key with value 0: it joins the log-sum-exp of each row and thins the output.
        """
        out, lse = total.result()
        if self.sinks is None:
            return out, lse
        with_sinks = torch.logaddexp(lse, self.sinks.to(lse.dtype))
        return out * torch.exp(lse - with_sinks).unsqueeze(-1), with_sinks


def add_block(total: Partial, q: Tensor, k: Tensor, v: Tensor, launches: tuple[Launch, ...], rule: Rule) -> None:
    """Add to `total` the attention of q (T, N, H) to this block's k (Tk, K, H), v (Tk, K, Hv)."""
    for launch in launches:
        rows, keys = launch.q_rows, launch.k_rows
        out, lse = rule.kernel.forward(q[rows], k[keys], v[keys], launch, **rule.options)
        total.add(rows, out, lse)


def add_block_gradients(
    dq: RowSum,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    launches: tuple[Launch, ...],
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """Add this block's part of the query's gradient to `dq`; return dk (Tk, K, H) and dv (Tk, K, Hv).

    `saved` is dout (T, N, Hv), q (T, N, H), out (T, N, Hv), lse (T, N), the last two over the keys of all blocks.
    """
    dk, dv = RowSum(tuple(k.shape), k), RowSum(tuple(v.shape), v)
    for launch in launches:
        rows, keys = launch.q_rows, launch.k_rows
        dout, q, out, lse = (x[rows] for x in saved)
        gradients = rule.kernel.backward(dout, q, k[keys], v[keys], out, lse, launch, **rule.options)
        for total, where, gradient in zip((dq, dk, dv), (rows, keys, keys), gradients, strict=True):
            total.add(where, gradient)
    return dk.result(), dv.result()
