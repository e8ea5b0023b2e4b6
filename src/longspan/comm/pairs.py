"""Send every member just the rows that it reads, pair by pair, while the caller computes on the block at hand.

For where members read little of each other, as under a narrow sliding window; where everybody reads everything, a ring
(`ring.py`) crosses the slow links between nodes less often. The two are used alike.

Order of posting, the same on every rank: in step s a member sends to the one s places on and receives from the one s
places back; blocks of step s, gradients of step s, blocks of step s + 1. Pairs without rows send nothing.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longspan.comm.groups import Channel, Handle

Block = tuple[Tensor, ...]


class PairBlocks:
    """Iterate over (owner, the rows of the owner that are read here) for every member, one's own whole block first.

    `tensors` are this member's rows; `sends[m]` says which of them member m reads, `receives[m]` how many rows of
    member m are read here. The rows of one's own are not copied; of the others' at most two blocks are held at a time.
    """

    def __init__(
        self, channel: Channel, tensors: Sequence[Tensor], sends: Sequence[Tensor], receives: Sequence[int], what: str
    ) -> None:
        self._channel, self._sends, self._receives, self._what = channel, sends, receives, what
        self._own = tuple(tensors)

    def __iter__(self) -> Iterator[tuple[int, Block]]:
        degree, me = self._channel.degree, self._channel.index
        following = self._start(1) if degree > 1 else None
        yield me, self._own
        for step in range(1, degree):
            assert following is not None
            block, handle = following
            handle.wait()
            following = self._start(step + 1) if step + 1 < degree else None
            yield (me - step) % degree, block

    def _start(self, step: int) -> tuple[Block, Handle]:
        degree, me = self._channel.degree, self._channel.index
        to, owner = (me + step) % degree, (me - step) % degree
        rows = self._sends[to]
        sent = [(to, t.index_select(0, rows)) for t in self._own] if len(rows) else []
        arriving = tuple(t.new_empty((self._receives[owner], *t.shape[1:])) for t in self._own)
        return arriving, self._channel.exchange(sent, [(owner, t) for t in arriving], self._what)


class PairGradients:
    """Sum the gradients of one's own rows: those of this member, and what each pair sends back.

    Call `add` once per step, in the order in which `PairBlocks` yields owners, then `finish`. Sums are taken in
    `dtype` and in the order of steps, which does not depend on timing.
    """

    def __init__(
        self,
        channel: Channel,
        sends: Sequence[Tensor],
        what: str,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._channel, self._sends, self._what, self._dtype = channel, sends, what, dtype
        self._total: Block = ()
        self._step = 0
        self._arriving: tuple[Tensor, Block, Handle] | None = None

    def add(self, owner: int, gradients: Sequence[Tensor]) -> None:
        """Send the gradient of the rows that were read of `owner` back to it; one's own comes first and is kept."""
        if self._step == 0:
            self._total = tuple(g.to(self._dtype) for g in gradients)
        else:
            self._collect()
            reader = (self._channel.index + self._step) % self._channel.degree
            rows = self._sends[reader]
            arriving = tuple(t.new_empty((len(rows), *t.shape[1:])) for t in self._total)
            sent = [(owner, g.to(self._dtype).contiguous()) for g in gradients]
            handle = self._channel.exchange(sent, [(reader, t) for t in arriving], self._what)
            self._arriving = rows, arriving, handle
        self._step += 1

    def finish(self) -> Block:
        """The sum over all members of the gradient of one's own rows."""
        assert self._step == self._channel.degree, (self._step, self._channel.degree)
        self._collect()
        return self._total

    def _collect(self) -> None:
        if self._arriving is None:
            return
        rows, arriving, handle = self._arriving
        handle.wait()
        for total, arrived in zip(self._total, arriving, strict=True):
            total.index_add_(0, rows, arrived)
        self._arriving = None
