"""The exchange of heads for rows inside one neighbourhood: which heads a member computes, and the messages.

`HeadSplit` (`plan/head_split.py`) deals query and key/value heads to members, in integers; `HeadSwap` sends
slices of them and brings results back. What is computed in between, and in which order slices travel, is in
`all_to_all.py`.
"""

from collections.abc import Sequence

from torch import Tensor

from longspan.attention.call import AttendCall, Saved
from longspan.attention.members import Members
from longspan.attention.rows import copy_rows, head_slice_by_member, join_columns, member_views
from longspan.comm import Handle, split_columns
from longspan.plan.head_split import HeadSplit


class HeadSwap:
    """The exchange inside one neighbourhood of M members: (T, all heads) of the local rows for (R, some heads) of all.

    The query heads (N) are M runs, one for each member, and every run is cut into `slices` slices. Key/value heads are
    cut into fewer slices if neighbouring slices of query heads use the same one.
    """

    def __init__(self, members: Members, split: HeadSplit, slices: int) -> None:
        """Take the members, and `split`, by which each computes some heads.

        `_counts` are the numbers of rows of each neighbour, and `_me` is this rank's place among them.
        """
        self.split, self.slices, self._degree = split, slices, split.degree
        self._shared = split.slices_per_kv_head(slices)  # slices in a row that use the same key/value head
        self.heads_of_slice = split.member_heads // slices
        self.members, self._channel, self._counts = members, members.inner_channel, members.inner_counts
        self._me = self._channel.index
        self._local_counts = (self._counts[self._me],) * self._degree

    @property
    def kv_runs(self) -> list[range]:
        """Return the runs of slices that share key/value heads: one ring brings them to a whole run."""
        return [range(first, first + self._shared) for first in range(0, self.slices, self._shared)]

    def opens_run(self, slice_index: int) -> bool:
        """Return whether a slice is the first with its key/value heads."""
        return slice_index % self._shared == 0

    def closes_run(self, slice_index: int) -> bool:
        """Return whether a slice is the last with its key/value heads."""
        return self.opens_run(slice_index + 1)

    def tensors_to_send(self, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, ...]]:
        """Return the tensors to send of each slice: its queries, and keys and values if no slice before has those."""
        copies = self.split.kv_copies
        tensors = (q, *(x if copies == 1 else x.repeat_interleave(copies, 1) for x in (k, v)))
        return [tensors if self.opens_run(slice_index) else tensors[:1] for slice_index in range(self.slices)]

    def slice_saved(self, saved: Sequence[Saved], slice_index: int) -> Saved:
        """Return the saved tensors of a slice, with the keys and values, which the first slice that uses them saves."""
        first = saved[slice_index - slice_index % self._shared]
        return saved[slice_index]._replace(k=first.k, v=first.v)

    def message_gradients(self, slice_index: int) -> list[slice]:
        """Return the messages that leave once a slice is computed: of each, which of (dq, dk, dv) it carries.

        dk and dv leave with the last slice that shares them. A message has one dtype: where heads have copies, dk and
        dv, which are in the accumulation dtype then, leave in one of their own.
        """
        if not self.closes_run(slice_index):
            return [slice(0, 1)]
        return [slice(0, 3)] if self.split.kv_copies == 1 else [slice(0, 1), slice(1, 3)]

    def slice_call(self, call: AttendCall, slice_index: int) -> AttendCall:
        """Return the call for the query heads of a slice that are computed here."""
        start = self.split.q_heads(self._me).start + slice_index * self.heads_of_slice
        return call.for_heads(start, start + self.heads_of_slice)

    def place_heads(self, x: Tensor) -> Tensor:
        """Put values of the query heads computed here at their indices among all heads: (N,), zero elsewhere."""
        all_heads = x.new_zeros(self.split.heads)
        all_heads[self.split.q_heads(self._me)] = x
        return all_heads

    def send_heads(self, tensors: Sequence[Tensor], slice_index: int, label: str) -> Handle:
        """Start sending a slice of the heads of tensors (T, N, size), to every member its own."""
        rows, degree = tensors[0].shape[0], self._degree
        places = self._slice_views(tensors, slice_index)
        widths = [x.shape[2] for x in places]
        packed = tensors[0].new_empty((degree * rows, sum(widths)))
        copy_rows(list(zip(places, member_views(packed, degree, widths), strict=True)))
        return self._channel.all_to_all_rows(packed, self._local_counts, self._counts, label)

    def _slice_views(self, tensors: Sequence[Tensor], slice_index: int) -> list[Tensor]:
        """View this slice of every member's heads in tensors (T, N, size): (T, members, columns).

        Key/value heads may be cut into fewer slices, of which each serves several slices of query heads.
        """
        return [
            head_slice_by_member(x, self._degree, cuts, slice_index * cuts // self.slices)
            for x, cuts in zip(tensors, map(self._slice_count, tensors), strict=True)
        ]

    def _slice_count(self, x: Tensor) -> int:
        """Return how many slices a member's heads of x (T, N, size) are cut into: query heads, or key/value heads."""
        return self.slices if x.shape[1] == self.split.heads else self.slices // self._shared

    def receive_heads(self, handle: Handle, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Receive what `send_heads` sent: (R, n, size) of all rows in document order, for tensors like those sent."""
        arrived, orders = handle.wait(), self.members.arrival_orders
        in_order = arrived if orders is None else join_columns((arrived,), orders[0])
        return split_columns(
            in_order, [(x.shape[1] // (self._degree * self._slice_count(x)), x.shape[2]) for x in like]
        )

    def send_rows(self, tensors: Sequence[Tensor], label: str) -> Handle:
        """Start sending tensors (R, n, size) of one dtype, to every member its rows."""
        orders = self.members.arrival_orders
        packed = join_columns(tensors, None if orders is None else orders[1])
        return self._channel.all_to_all_rows(packed, self._counts, self._local_counts, label)

    def write_rows(self, handle: Handle, into: Sequence[Tensor], slice_index: int) -> None:
        """Wait for the rows of `send_rows`, and write them to this slice of every head group of `into` (T, N, size)."""
        places = self._slice_views(into, slice_index)
        arrived = member_views(handle.wait(), self._degree, [x.shape[2] for x in places])
        copy_rows(list(zip(arrived, places, strict=True)))
