"""How the members of a plan's group talk: exchanges that are started, and waited for by their handles.

Point-to-point on the plane's parent group works for any members and any order; where the members have a communicator of
their own (`process_groups.py`), one call of it does the same.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from longspan.comm.groups.process_groups import ParentName, ProcessGroups
from longspan.comm.watch import Operation, Watch
from longspan.layout.layout import excerpt

# torch's NCCL works hold what they receive, and the last work is watched until the next is waited for. From this many
# bytes on an event is watched instead, which the host records in 40 µs.
EVENT_BYTES = 64 << 20


class Handle:
    """A started exchange. `wait()` returns its result once its tensors may be used; a second call returns it again.

    On a GPU, waiting orders the current stream behind the exchange and does not stop the host. `keep` is kept alive
    until then, `finish` makes the result, `work_bytes` are the bytes that the works themselves hold on to. With
    `on_host` the works are gloo's.
    """

    __slots__ = ("_finish", "_keep", "_on_host", "_operation", "_result", "_work_bytes", "_works")

    def __init__(
        self,
        operation: Operation,
        works: Sequence[Work],
        keep: object = None,
        finish: Callable[[], Any] | None = None,
        work_bytes: int = 0,
        *,
        on_host: bool = False,
    ) -> None:
        self._operation, self._works, self._keep, self._work_bytes = operation, works, keep, work_bytes
        self._finish, self._result, self._on_host = finish, None, on_host

    def wait(self) -> Any:
        """Wait for the exchange. Raises CommError, with a failure report, where it fails or times out."""
        if self._works:
            with self._operation as operation:
                for work in self._works:
                    if self._on_host:  # gloo takes the limit that the group was made with, unless a wait has its own
                        work.wait(timedelta(seconds=operation.watch.timeout))
                    else:
                        work.wait()
                # works keep these bytes in memory; an event keeps none, but costs the host time
                if self._work_bytes < EVENT_BYTES:
                    operation.watch.watch_works(operation, self._works)
                else:
                    operation.watch.watch_stream(operation)
        if self._finish is not None:
            self._result = self._finish()
        self._works, self._keep, self._finish = (), None, None
        return self._result

    def then(self, finish: Callable[[Any], Any]) -> "Handle":
        """Return a handle of the same exchange, whose result is what `finish` makes of this handle's result."""
        return Handle(self._operation, (), finish=lambda: finish(self.wait()))


# torch 2.13 renamed all_gather_into_tensor and warns about the old name.
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Channel:
    """The members of one plan group in this rank's plane, and how they talk.

    `ranks` are the members' global ranks in the order of the group's slots, `index` this rank's place among them.
    Every method is entered by all members, in one order on every rank. Point-to-point runs on the parent group, which
    is the plane's, or with `parent="everyone"` that of all ranks, with "pipeline" that of the stages of a slot, with
    "tp" that of a slot's tensor-parallel ranks, with "control" the gloo group of all ranks' hosts.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        ranks: tuple[int, ...],
        index: int,
        device: torch.device,
        parent: ParentName = "plane",
    ) -> None:
        self.ranks: tuple[int, ...] = ranks
        self.index: int = index
        self.device: torch.device = device
        self._by_rank = sorted(range(len(ranks)), key=ranks.__getitem__)  # members in the order that torch has them in
        self._groups = groups
        self._parent: ParentName = parent
        group = groups.parent(parent)
        self._peers = tuple(dist.get_group_rank(group, rank) for rank in ranks)  # the members' ranks in that group

    @property
    def degree(self) -> int:
        """Return how many members there are."""
        return len(self.ranks)

    @property
    def group(self) -> ProcessGroup:
        """Return the parent group."""
        return self._groups.parent(self._parent)

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        what: str,
        result: Tensor | None = None,
        work_bytes: int = 0,
    ) -> Handle:
        """Start one batch of sends to and receives from members, each a (member index, contiguous tensor).

        Tensors without elements are dropped on both sides. Between two members, tensors match in their order here.
        `result` is what the handle's `wait()` returns; `work_bytes` is that of `Handle`.
        """
        parent, operation = self.group, self.watch.during(what, self.ranks)
        ops: list[dist.P2POp] = []
        for member, tensor in sends:
            if tensor.numel():
                ops.append(dist.P2POp(dist.isend, tensor.contiguous(), group=parent, group_peer=self._peer(member)))
        for member, tensor in receives:
            assert tensor.is_contiguous(), f"{what}: a receive buffer must be contiguous"
            if tensor.numel():
                ops.append(dist.P2POp(dist.irecv, tensor, group=parent, group_peer=self._peer(member)))
        works: Sequence[Work] = ()
        if ops:
            with operation:
                works = dist.batch_isend_irecv(ops)
        return self._make_handle(operation, works, ops, lambda: result, work_bytes)

    def _make_handle(
        self, operation: Operation, works: Sequence[Work], keep: object, finish: Callable[[], Any], work_bytes: int
    ) -> Handle:
        return Handle(operation, works, keep, finish, work_bytes, on_host=self.device.type == "cpu")

    def all_to_all_rows(self, x: Tensor, sends: Sequence[int], receives: Sequence[int], what: str) -> Handle:
        """Start sending runs of rows of x (sum of sends, …), `sends[m]` to member m, one after another.

        `wait()` returns the rows that arrive, `receives[m]` from member m, one after another: (sum of receives, …).
        What a member sends itself is copied. One call of the members' own communicator where there is one; where they
        are not in the order of their ranks, which is torch's, rows are copied into that order and back.
        """
        into = x.new_empty((sum(receives), *x.shape[1:]))
        assert x.shape[0] == sum(sends) and sends[self.index] == receives[self.index], (what, x.shape, sends, receives)
        communicator = self._groups.communicator(self.ranks)
        if communicator is not None:
            by_rank = self._by_rank
            packed = _reorder_runs(x, sends, by_rank).contiguous()
            handle = self._all_to_all(communicator, packed, into, (sends, receives), what)
            if by_rank == sorted(by_rank):  # else below: `members` undoes the order `by_rank`
                return handle
            arrived, members = [receives[m] for m in by_rank], sorted(range(self.degree), key=by_rank.__getitem__)
            return handle.then(lambda rows: _reorder_runs(rows, arrived, members))
        into.split(list(receives))[self.index].copy_(x.split(list(sends))[self.index])
        return self.exchange_runs(x, sends, into, receives, what)

    def exchange_runs(
        self, x: Tensor, sends: Sequence[int], into: Tensor, receives: Sequence[int], what: str
    ) -> Handle:
        """Start sending runs of rows of x, `sends[m]` to member m, one after another, and receiving runs in `into`.

        Member m sends `receives[m]` rows. `wait()` returns `into`; this member's own run in it is left as it is. One
        message for each pair that has rows: an all-to-all of torch sends empty ones too over NCCL, so that all members
        would wait for each other and be connected.
        """
        leaving, arriving = x.split(list(sends)), into.split(list(receives))
        peers = self._other_members()
        sent, received = [(m, leaving[m]) for m in peers], [(m, arriving[m]) for m in peers]
        return self.exchange(sent, received, what, into, into.nbytes)

    def shift(self, x: Tensor, into: Tensor, what: str) -> Handle:
        """Start sending x to the next member and receiving `into`, contiguous, from the one before; rows may differ."""
        next_member, previous_member = (self.index + 1) % self.degree, (self.index - 1) % self.degree
        communicator = self._groups.communicator(self.ranks)
        if communicator is None:
            return self.exchange([(next_member, x)], [(previous_member, into)], what)
        sends, receives = [0] * self.degree, [0] * self.degree
        sends[next_member], receives[previous_member] = x.shape[0], into.shape[0]
        return self._all_to_all(communicator, x.contiguous(), into, (sends, receives), what)

    def _all_to_all(
        self,
        communicator: ProcessGroup,
        x: Tensor,
        into: Tensor,
        counts: tuple[Sequence[int], Sequence[int]],
        what: str,
    ) -> Handle:
        """Runs lie in the order of ranks in both tensors; `counts` (sends, receives) are in member order."""
        sends, receives = ([runs[member] for member in self._by_rank] for runs in counts)
        with self.watch.during(what, self.ranks) as operation:
            work = communicator.alltoall_base(into, x, receives, sends)
        return self._make_handle(operation, (work,), x, lambda: into, into.nbytes)

    def all_gather(self, x: Tensor, counts: Sequence[int], what: str) -> Handle:
        """Start gathering every member's rows; `wait()` returns a list of (counts[m], …) tensors, views of one buffer.

        `x` is (counts[index], …). Uses the members' own communicator where `World.prepare` made one.
        """
        bounds = [(start, start + count) for start, count in zip(self.starts(counts), counts, strict=True)]
        return self.all_gather_rows(x, counts, what).then(lambda buffer: [buffer[start:stop] for start, stop in bounds])

    def all_gather_rows(self, x: Tensor, counts: Sequence[int], what: str) -> Handle:
        """Start `all_gather` so that `wait()` returns the buffer: member m's rows begin at `starts(counts)[m]`."""
        assert x.shape[0] == counts[self.index] and len(counts) == self.degree, (what, x.shape, counts, self.index)
        communicator = self._communicator_to_gather(counts)
        if communicator is not None:
            padded = _pad_rows(x, max(counts))
            buffer = x.new_empty((self.degree * max(counts), *x.shape[1:]))
            with self.watch.during(what, self.ranks) as operation:
                work = _all_gather_single(buffer, padded, group=communicator, async_op=True)
            return self._make_handle(operation, (work,), padded, lambda: buffer, buffer.nbytes)
        buffer = x.new_empty((sum(counts), *x.shape[1:]))
        parts = buffer.split(list(counts))
        parts[self.index].copy_(x)
        peers = self._other_members()
        sends, receives = [(m, parts[self.index]) for m in peers], [(m, parts[m]) for m in peers]
        return self.exchange(sends, receives, what, buffer, buffer.nbytes)

    def starts(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return where each member's rows begin in what `all_gather_rows` returns."""
        communicator = self._communicator_to_gather(counts)
        if communicator is None:
            return tuple(accumulate(counts[:-1], initial=0))
        # torch sorts the ranks of a group, and every member sends max(counts) rows, padding included
        return tuple(dist.get_group_rank(communicator, rank) * max(counts) for rank in self.ranks)

    def _communicator_to_gather(self, counts: Sequence[int]) -> ProcessGroup | None:
        return self._groups.communicator(self.ranks) if max(counts) > 0 and self.degree > 1 else None

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], what: str) -> Handle:
        """Start sending runs of rows of x (sum of counts, …), `counts[m]` to member m, one after another.

        `wait()` returns the sum (counts[index], …) of what the members sent here, in the dtype of x. It is taken in
        member order, so that it does not depend on timing, and in float32 (float64 for float64, integers in their own
        dtype), so that its error does not grow with the number of members.
        """
        rows = counts[self.index]
        arriving = self.all_to_all_rows(x, counts, [rows] * self.degree, what)
        return arriving.then(lambda parts: sum_parts(parts.split(rows or 1)))  # split refuses 0

    @property
    def watch(self) -> Watch:
        """Return the world's watch, which names this channel's collectives when they fail."""
        return self._groups.watch

    def _other_members(self) -> list[int]:
        return [member for member in range(self.degree) if member != self.index]

    def _peer(self, member: int) -> int:
        assert member != self.index, "a member does not send to itself"
        return self._peers[member]

    def __repr__(self) -> str:
        return f"Channel(ranks {excerpt(self.ranks)}, index {self.index})"


def _reorder_runs(x: Tensor, counts: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return x (sum of counts, …), runs of `counts` rows, with its runs in this order; x itself for ascending order."""
    if list(order) == sorted(order):
        return x
    runs = x.split(list(counts))
    return torch.cat([runs[index] for index in order])


def wide(x: Tensor) -> Tensor:
    """Return a half-precision tensor in float32, the dtype of sums over ranks; a tensor of another dtype as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def sum_parts(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors in their order and dtype.

    It is taken in float32 (float64 for float64, integers as they are).
    """
    dtype = parts[0].dtype
    total = parts[0].to(torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype, copy=True)
    for addend in parts[1:]:
        total += addend
    return total.to(dtype)


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    """Return x (n, …) with zero rows appended: (rows, …), contiguous."""
    if x.shape[0] == rows:
        return x.contiguous()
    padded = x.new_zeros((rows, *x.shape[1:]))
    padded[: x.shape[0]].copy_(x)
    return padded
