"""Move blocks around a ring while the caller computes on the block at hand.

Attention loops over `RingBlocks`, and in backward hands each block's gradient to a `GradientRing`, whose sum travels
with the block and comes home. A block is several tensors with the same rows, side by side in one buffer: a step is one
message. Order of posting, the same on every rank and so free of deadlock on one parent group: blocks of step s,
gradients of step s, blocks of step s + 1. Members without rows send nothing: both sides have the counts from the plan.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.comm.channel import Channel, Handle

Block = tuple[Tensor, ...]


class RingBlocks:
    """Iterate over (owner, block) for every member of a channel, this member's own block first.

    `tensors` are this member's part of the block, each (counts[index], …) and of one dtype; a yielded block has
    `counts[owner]` rows, valid until the next iteration. While the caller works on one block the next is in flight, in
    one of two rotating buffers, whatever the degree.

    >>> for owner, (k, v) in RingBlocks(channel, (k, v), part.counts, "ring forward"):
    ...     total = merge(total, block_attention(q, k, v))
    """

    def __init__(self, channel: Channel, tensors: Sequence[Tensor], counts: Sequence[int], label: str) -> None:
        self._channel = channel
        self._counts = tuple(counts)
        self._label = label
        self._row_shapes = [t.shape[1:] for t in tensors]
        self._tensors = tuple(tensors)
        self._spare: list[Tensor] = []

    def __iter__(self) -> Iterator[tuple[int, Block]]:
        degree = self._channel.degree
        me = self._channel.index
        own_matrix = torch.cat([t.flatten(1) for t in self._tensors], 1)
        buffer = own_matrix  # the memory that the block at hand lies in
        # These are the rows of the block, side by side in the buffer.
        packed = own_matrix
        block = self._tensors  # the same rows, as tensors
        for step in range(degree):
            owner = (me - step) % degree
            if step + 1 == degree:
                yield owner, block
                return
            if self._spare:
                arriving = self._spare.pop()
            else:
                arriving = own_matrix.new_empty((max(self._counts), own_matrix.shape[1]))
            next_matrix = arriving[: self._counts[(owner - 1) % degree]]
            handle = self._channel.shift(packed, next_matrix, self._label)
            yield owner, block
            handle.wait()
            # The own matrix keeps the rows of this member, which another block may need.
            if buffer is not own_matrix:
                self._spare.append(buffer)
            buffer = arriving
            packed = next_matrix
            block = split_columns(next_matrix, self._row_shapes)


class Addend(NamedTuple):
    """A part of a block's gradient: tensors (rows, …) for some rows of the block, which are distinct."""

    rows: slice | Tensor
    tensors: Sequence[Tensor]


class GradientRing:
    """Sum every member's gradient of each block; the sum travels behind the block and comes home to its owner.

    Call the method `add` once for each block but one's own, in the order in which `RingBlocks` yields owners, then
    `finish` with one's own gradient of one's own block, which need not travel: what is computed between the last `add`
    and `finish` hides the last step home. Sums of tensors shaped `like` these are taken in `dtype` and in ring order,
    the owner last, which does not depend on timing. The argument `add` is a function `add(total, addends, fresh=…)`: it
    adds to the tensors of `total` in place, or fills them where they are fresh. Two buffers, whatever the degree.
    """

    def __init__(
        self,
        channel: Channel,
        like: Sequence[Tensor],
        counts: Sequence[int],
        label: str,
        *,
        add: Callable[..., None],
        dtype: torch.dtype,
    ) -> None:
        self._channel = channel
        self._counts = tuple(counts)
        self._label = label
        self._add = add
        self._row_shapes = [t.shape[1:] for t in like]
        shape = (max(self._counts), sum(t.shape[1:].numel() for t in like))
        self._buffers = [like[0].new_empty(shape, dtype=dtype) for _ in range(2)]
        self._step = 0  # sums that were sent on
        # This is None before the first message.
        self._handle: Handle | None = None

    def add(self, owner: int, addends: Sequence[Addend]) -> None:
        """Add this member's gradient of another's block, as any number of addends, and send the sum on."""
        assert owner != self._channel.index, "one's own gradient is given to finish"
        total = self._add_to_sum(owner, addends)
        self._step += 1
        arriving = self._buffer((owner - 1) % self._channel.degree)
        self._handle = self._channel.shift(total, arriving, self._label)

    def finish(self, addends: Sequence[Addend]) -> Block:
        """Return the gradient of one's own block, summed over all members: (counts[index], …) for each tensor in it."""
        assert self._step == self._channel.degree - 1, (self._step, self._channel.degree)
        return split_columns(self._add_to_sum(self._channel.index, addends), self._row_shapes)

    def _add_to_sum(self, owner: int, addends: Sequence[Addend]) -> Tensor:
        """Before the first message nothing arrives, and the fresh buffer is filled."""
        total = self._buffer(owner)
        fresh = self._handle is None
        if self._handle is not None:
            self._handle.wait()
        self._add(split_columns(total, self._row_shapes), addends, fresh=fresh)
        return total

    def _buffer(self, owner: int) -> Tensor:
        return self._buffers[self._step % 2][: self._counts[owner]]


def split_columns(matrix: Tensor, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Return the columns of a matrix as views (rows, *shape), one for each shape.

    It takes the host a quarter of the time of `split` and `unflatten`, and a ring asks for it at each step.
    """
    rows = matrix.shape[0]
    start = matrix.storage_offset()
    views = list[Tensor]()
    row_stride, column_stride = matrix.stride()
    for shape in shapes:
        strides = list[int]()
        stride = column_stride
        for size in reversed(shape):
            strides.append(stride)
            stride *= size
        views.append(matrix.as_strided((rows, *shape), (row_stride, *reversed(strides)), start))
        # The stride is by now that of the whole shape: its columns.
        start += stride
    return tuple(views)
