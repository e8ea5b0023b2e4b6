"""Move blocks around a ring while the caller computes on the block at hand.

Attention never mentions send or receive: it loops over `RingBlocks`, and in backward hands each block's gradient to a
`GradientRing`, whose sum travels with the block and comes home. What is done with a block is `attention/ring.py`.

Order of posting, the same on every rank and so free of deadlock on one parent group: blocks of step s, gradients of
step s, blocks of step s + 1. Members without rows send and receive nothing: both sides know the counts from the plan.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longspan.comm.groups import Channel, Handle

Block = tuple[Tensor, ...]


class RingBlocks:
    """Iterate over (owner, block) for every member of a channel, one's own block first.

    `tensors` are this member's part of the block, each (counts[index], …); a yielded block has `counts[owner]` rows.
    While the caller works on one block the next is in flight, in one of two rotating buffers, so that
    `peak_blocks` (one's own included) is at most 3, whatever the degree. A yielded block is only valid until the next
    iteration.

    >>> for owner, (k, v) in RingBlocks(part.channel(), (k, v), part.counts, "ring forward"):
    ...     total = merge(total, block_attention(q, k, v))
    """

    def __init__(self, channel: Channel, tensors: Sequence[Tensor], counts: Sequence[int], what: str) -> None:
        self._channel, self._counts, self._what = channel, tuple(counts), what
        self._own = tuple(t.contiguous() for t in tensors)
        self._spare: list[Block] = []
        self._live = self.peak_blocks = 1

    def __iter__(self) -> Iterator[tuple[int, Block]]:
        degree, me = self._channel.degree, self._channel.index
        block = self._own
        for step in range(degree):
            owner = (me - step) % degree
            following, handle = None, None
            if step + 1 < degree:
                following = self._view(self._take(), (owner - 1) % degree)
                handle = _shift(self._channel, block, following, self._what)
            yield owner, block
            if following is None or handle is None:
                return
            handle.wait()
            self._give_back(block)
            block = following

    def _take(self) -> Block:
        """A buffer that nobody reads: a spare one, or a new one of the largest block's size."""
        if self._spare:
            return self._spare.pop()
        self._live += 1
        self.peak_blocks = max(self.peak_blocks, self._live)
        return tuple(t.new_empty((max(self._counts), *t.shape[1:])) for t in self._own)

    def _view(self, buffer: Block, owner: int) -> Block:
        return tuple(t[: self._counts[owner]] for t in buffer)

    def _give_back(self, block: Block) -> None:
        if block is not self._own:
            self._spare.append(tuple(t._base if t._base is not None else t for t in block))


class GradientRing:
    """Sum every member's gradient of each block; the sum travels with the block and comes home to its owner.

    Call `add` once per step, in the order in which `RingBlocks` yields owners, then `finish`. Sums are taken in
    `dtype` and in ring order, which does not depend on timing. Two buffers, whatever the degree.
    """

    def __init__(
        self,
        channel: Channel,
        like: Sequence[Tensor],
        counts: Sequence[int],
        what: str,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._channel, self._counts, self._what = channel, tuple(counts), what
        shape_of = [(max(self._counts), *t.shape[1:]) for t in like]
        rounds = 1 if channel.degree == 1 else 2
        self._buffers = [
            tuple(t.new_empty(s, dtype=dtype) for t, s in zip(like, shape_of, strict=True)) for _ in range(rounds)
        ]
        self._step = 0
        self._handle: Handle | None = None

    def add(self, owner: int, gradients: Sequence[Tensor]) -> None:
        """Add this member's gradient of `owner`'s block, each (counts[owner], …), and send the sum on."""
        total = self._view(self._step, owner)
        if self._handle is None:
            for into, gradient in zip(total, gradients, strict=True):
                into.copy_(gradient)
        else:
            self._handle.wait()
            for into, gradient in zip(total, gradients, strict=True):
                into.add_(gradient)
        self._step += 1
        if self._channel.degree > 1:
            arriving = self._view(self._step, (owner - 1) % self._channel.degree)
            self._handle = _shift(self._channel, total, arriving, self._what)

    def finish(self) -> Block:
        """The sum over all members of the gradient of one's own block, each (counts[index], …)."""
        assert self._step == self._channel.degree, (self._step, self._channel.degree)
        if self._handle is not None:
            self._handle.wait()
        return self._view(self._step if self._channel.degree > 1 else 0, self._channel.index)

    def _view(self, step: int, owner: int) -> Block:
        return tuple(t[: self._counts[owner]] for t in self._buffers[step % len(self._buffers)])


def _shift(channel: Channel, block: Block, into: Block, what: str) -> Handle:
    """Send `block` to the next member and receive `into` from the one before, in one batch."""
    right, left = (channel.index + 1) % channel.degree, (channel.index - 1) % channel.degree
    return channel.exchange([(right, t) for t in block], [(left, t) for t in into], what)
