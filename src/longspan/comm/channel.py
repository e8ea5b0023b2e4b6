"""How the members of a plan's group talk: exchanges that are started, and waited for by their handles.

Point-to-point on the plane's parent group works for any members and any order; where the members have a communicator of
their own (`process_groups.py`), one call of it does the same. `Channels` has those of a rank.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from longspan.comm.meshes import Meshes
from longspan.comm.process_groups import CommunicatorChoice, ParentName, ProcessGroups
from longspan.comm.watch import Operation, Watch
from longspan.errors import CommError
from longspan.layout import Layout
from longspan.plain_text import excerpt
from longspan.plan import Plan

# torch's NCCL works hold what they receive, and the last work is watched until the next is waited for. From this many
# bytes on an event is watched instead, which the host records in 40 µs.
EVENT_BYTES = 64 << 20


class Handle:
    """A started exchange. `wait()` returns its result once its tensors may be used; a second call returns it again.

    On a GPU, waiting orders the current stream behind the exchange and does not stop the host. `keep`, what the works
    read or write, is referred to until then. `finish()` makes the result (without it, None). `work_bytes` are the bytes
    that the works themselves hold on to. With `on_host` the works are gloo's.
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
        self._operation = operation
        self._works = works
        self._keep = keep
        self._work_bytes = work_bytes
        self._finish = finish
        self._result = None
        self._on_host = on_host

    def wait(self) -> Any:
        """Wait for the exchange. Raises CommError, with a failure report, where it fails or times out."""
        if self._works:
            with self._operation as operation:
                for work in self._works:
                    # gloo takes the limit that the group was made with, unless a wait has its own
                    if self._on_host:
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
        self._works = ()
        self._keep = None
        self._finish = None
        return self._result

    def then(self, finish: Callable[[Any], Any]) -> "Handle":
        """Return a handle whose result is what `finish` makes of this handle's result."""
        return Handle(self._operation, (), finish=lambda: finish(self.wait()))


# torch 2.13 renamed all_gather_into_tensor and warns about the old name.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Channel:
    """The members of one plan group in this rank's plane, and how they talk.

    `ranks` are the members' global ranks in the order of the group's slots, `index` this rank's place among them.
    Every method is entered by all members, in one order on every rank. Point-to-point runs on the parent group: the
    plane's, or that of all ranks ("everyone"), of the stages of a slot ("pipeline"), of a slot's tensor-parallel ranks
    ("tp"), or the gloo group of all ranks' hosts ("control").
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
        self._groups = groups
        self._parent: ParentName = parent
        group = groups.parent(parent)
        self._peers = tuple(dist.get_group_rank(group, rank) for rank in ranks)  # the members' ranks in that group

    @property
    def degree(self) -> int:
        return len(self.ranks)

    @property
    def group(self) -> ProcessGroup:
        return self._groups.parent(self._parent)

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        label: str,
        result: Tensor | None = None,
        work_bytes: int = 0,
    ) -> Handle:
        """Start one batch of sends to and receives from members, each a (member index, contiguous tensor).

        Tensors without elements are dropped on both sides. Between two members, tensors match in their order here.
        `result` is what the handle's `wait()` returns; `work_bytes` is that of `Handle`.
        """
        parent = self.group
        operation = self.watch.enter_operation(label, self.ranks)
        ops: list[dist.P2POp] = []
        for member, tensor in sends:
            if tensor.numel():
                ops.append(dist.P2POp(dist.isend, tensor.contiguous(), group=parent, group_peer=self._peer(member)))
        for member, tensor in receives:
            if not tensor.is_contiguous():
                raise CommError(
                    f"{label}: the tensor {tuple(tensor.shape)} that receives from member {member} is not contiguous; "
                    "give one made by torch.empty"
                )
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

    def all_to_all_rows(self, x: Tensor, sends: Sequence[int], receives: Sequence[int], label: str) -> Handle:
        """Start sending runs of rows of x (sum of sends, …), `sends[m]` to member m, one after another.

        `wait()` returns the rows that arrive, `receives[m]` from member m: (sum of receives, …). What a member sends
        itself is copied. One call of the members' own communicator where there is one.
        """
        into = x.new_empty((sum(receives), *x.shape[1:]))
        if x.shape[0] != sum(sends) or sends[self.index] != receives[self.index]:
            raise CommError(
                f"{label}: member {self.index} has {x.shape[0]} rows, sends {list(sends)} and receives "
                f"{list(receives)}; its rows are the sum of what it sends, and it sends itself what it receives from "
                "itself"
            )
        communicator = self._groups.communicator(self.ranks)
        if communicator is not None:
            return self._all_to_all(communicator, x.contiguous(), into, (sends, receives), label)
        into.split(list(receives))[self.index].copy_(x.split(list(sends))[self.index])
        return self.exchange_runs(x, sends, into, receives, label)

    def exchange_runs(
        self, x: Tensor, sends: Sequence[int], into: Tensor, receives: Sequence[int], label: str
    ) -> Handle:
        """Start sending runs of rows of x, `sends[m]` to member m, one after another, and receiving runs in `into`.

        `wait()` returns `into`; this member's own run in it is left as it is. One message for each pair that has rows:
        an all-to-all of torch sends empty ones too over NCCL, so that all members would wait for each other and be
        connected.
        """
        leaving = x.split(list(sends))
        arriving = into.split(list(receives))
        peers = self._other_members()
        sent = [(m, leaving[m]) for m in peers]
        received = [(m, arriving[m]) for m in peers]
        return self.exchange(sent, received, label, into, into.nbytes)

    def shift(self, x: Tensor, into: Tensor, label: str) -> Handle:
        """Start sending x to the next member and receiving `into`, contiguous, from the one before; rows may differ."""
        next_member = (self.index + 1) % self.degree
        previous_member = (self.index - 1) % self.degree
        communicator = self._groups.communicator(self.ranks)
        if communicator is None:
            return self.exchange([(next_member, x)], [(previous_member, into)], label)
        sends = [0] * self.degree
        receives = [0] * self.degree
        sends[next_member] = x.shape[0]
        receives[previous_member] = into.shape[0]
        return self._all_to_all(communicator, x.contiguous(), into, (sends, receives), label)

    def _all_to_all(
        self,
        communicator: ProcessGroup,
        x: Tensor,
        into: Tensor,
        counts: tuple[Sequence[int], Sequence[int]],
        label: str,
    ) -> Handle:
        sends, receives = map(list, counts)
        with self.watch.enter_operation(label, self.ranks) as operation:
            work = communicator.alltoall_base(into, x, receives, sends)
        return self._make_handle(operation, (work,), x, lambda: into, into.nbytes)

    def all_gather(self, x: Tensor, counts: Sequence[int], label: str) -> Handle:
        """Start gathering every member's rows; `wait()` returns (counts[m], …) tensors, views of one buffer. `x` is
        (counts[index], …).
        """
        bounds = [(start, start + count) for start, count in zip(self.row_starts(counts), counts, strict=True)]
        return self.all_gather_rows(x, counts, label).then(
            lambda buffer: [buffer[start:stop] for start, stop in bounds]
        )

    def all_gather_rows(self, x: Tensor, counts: Sequence[int], label: str) -> Handle:
        """Start `all_gather` so that `wait()` returns the buffer: member m's rows begin at `row_starts(counts)[m]`."""
        if len(counts) != self.degree or x.shape[0] != counts[self.index]:
            raise CommError(
                f"{label}: member {self.index} of {self.degree} gathers {x.shape[0]} rows under counts {list(counts)}; "
                "give the rows of each member, its own among them"
            )
        communicator = self._communicator_to_gather(counts)
        if communicator is not None:
            padded = x.contiguous()
            if len(x) < max(counts):
                padded = x.new_zeros((max(counts), *x.shape[1:]))
                padded[: len(x)].copy_(x)
            buffer = x.new_empty((self.degree * max(counts), *x.shape[1:]))
            with self.watch.enter_operation(label, self.ranks) as operation:
                work = all_gather_single(buffer, padded, group=communicator, async_op=True)
            return self._make_handle(operation, (work,), padded, lambda: buffer, buffer.nbytes)
        buffer = x.new_empty((sum(counts), *x.shape[1:]))
        parts = buffer.split(list(counts))
        parts[self.index].copy_(x)
        peers = self._other_members()
        sends = [(m, parts[self.index]) for m in peers]
        receives = [(m, parts[m]) for m in peers]
        return self.exchange(sends, receives, label, buffer, buffer.nbytes)

    def row_starts(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return where each member's rows begin in what `all_gather_rows` gives for these counts."""
        communicator = self._communicator_to_gather(counts)
        if communicator is None:
            return tuple(accumulate(counts[:-1], initial=0))
        # every member sends max(counts) rows, padding included
        return tuple(member * max(counts) for member in range(self.degree))

    def _communicator_to_gather(self, counts: Sequence[int]) -> ProcessGroup | None:
        """None stands for members that do not gather by their own communicator; by it each gathers as many rows as the
        longest."""
        if max(counts) > 0 and self.degree > 1:
            return self._groups.communicator(self.ranks)
        return None

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], label: str) -> Handle:
        """Start sending runs of rows of x (sum of counts, …), `counts[m]` to member m, one after another.

        `wait()` returns the sum (counts[index], …) of the runs that arrive here, this member's own included, in the
        dtype of x. It is taken in member order, so that it does not depend on timing, and in float32 (float64 for
        float64, integers in their own dtype), so that its error does not grow with the number of members.
        """
        rows = counts[self.index]
        arriving = self.all_to_all_rows(x, counts, [rows] * self.degree, label)
        return arriving.then(lambda parts: sum_parts(parts.split(rows or 1)))  # split refuses 0

    @property
    def watch(self) -> Watch:
        """The world's watch, which every operation of this channel enters."""
        return self._groups.watch

    def _other_members(self) -> list[int]:
        return [member for member in range(self.degree) if member != self.index]

    def _peer(self, member: int) -> int:
        if member == self.index:
            raise CommError(f"member {member} sends to or receives from itself; copy its own tensor")
        return self._peers[member]


def widen_half_precision(x: Tensor) -> Tensor:
    """Return a half-precision tensor in float32, the dtype of sums over ranks; another as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def sum_parts(parts: Sequence[Tensor]) -> Tensor:
    """Sum in this order, in float32 (float64 for float64, integers as they are); returns the dtype of the parts."""
    dtype = parts[0].dtype
    total = parts[0].to(torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype, copy=True)
    for addend in parts[1:]:
        total += addend
    return total.to(dtype)


class Channels:
    """The channels of one rank, `world.channels`: between slots of its plane, and along the axes of its home.

    Made by all ranks together, for making it makes the groups on which slots of every plane talk point to point.

    >>> world.channels.find_channel((0, 1)).all_gather(x, counts, "gather of x").wait()
    """

    def __init__(
        self, home: Layout, rank: int, device: torch.device, groups: ProcessGroups, meshes: Meshes, max_groups: int
    ) -> None:
        self._home = home
        self._rank = rank
        self._device = device
        self._groups = groups
        self._meshes = meshes
        self._place = home.coordinates(rank)
        self._plane = home.plane(pp=self._place.pp, tp=self._place.tp)
        self._choice = CommunicatorChoice(max_groups)
        self._by_slots: dict[tuple[int, ...], Channel] = {}
        # What attention has bound so far: the type and the degree of a group, one of its levels, and the ranks of that.
        self.attended: set[tuple[str, int, str, tuple[int, ...]]] = set()
        groups.make_parent("plane", home.planes(), "parent")
        if home.slots > 1:
            self._warm_up_channel(self.find_channel(range(home.slots)))

    def find_channel(self, slots: Sequence[int]) -> Channel:
        """Return the channel of these slots, which is made where it is first asked for; nothing travels.

        Raises CommError unless these are distinct slots of the home, and this rank's slot is one of them.
        """
        slots = tuple(slots)
        if slots not in self._by_slots:
            if not slots or len(set(slots)) != len(slots) or min(slots) < 0 or max(slots) >= self._home.slots:
                raise CommError(
                    f"{excerpt(slots)} are not distinct slots of the home, which has slots 0 to {self._home.slots - 1}"
                )
            slot = self._place.slot
            if slot not in slots:
                raise CommError(
                    f"rank {self._rank} is slot {slot}, which is not a member of slots {excerpt(slots)}"
                )
            ranks = tuple(self._plane[slot] for slot in slots)
            self._by_slots[slots] = Channel(self._groups, ranks, slots.index(slot), self._device)
        return self._by_slots[slots]

    @cached_property
    def pipeline(self) -> Channel:
        """Return the channel of this slot's pipeline stages, first to last; first used by all ranks together.

        Raises CommError for a home whose ranks descend along its stages: torch orders the members of a group by rank.
        """
        pipelines = self._home.pp_groups()
        if descending := next((ranks for ranks in pipelines if sorted(ranks) != list(ranks)), None):
            raise CommError(
                f"the home's ranks {excerpt(descending)} descend along its pipeline stages, but torch orders the "
                "members of a group by rank; with pp, give the home its ranks in ascending order"
            )
        return self._make_channel("pipeline", pipelines)

    @cached_property
    def tp(self) -> Channel:
        """Return the channel of this slot's tensor-parallel ranks, over the group of `meshes.tp`; first used by all
        together.

        Raises CommError for a home without tensor parallelism.
        """
        self._groups.parents["tp"] = self._meshes.tp.get_group()
        place = self._place
        ranks = tuple(self._home.rank_at(place.slot, pp=place.pp, tp=tp) for tp in range(self._home.tp))
        return Channel(self._groups, ranks, place.tp, self._device, "tp")

    @cached_property
    def everyone(self) -> Channel:
        """Return a channel over all ranks of the home, in its order; first used by all ranks together."""
        home = self._home
        if self._plane == home.ranks:
            return self.find_channel(range(home.slots))
        return self._make_channel("everyone", [home.ranks])

    def _make_channel(self, kind: Literal["pipeline", "everyone"], lines: Sequence[tuple[int, ...]]) -> Channel:
        """Entered by all ranks: make a group of each of these tuples, and return the channel of the one that this rank
        is in."""
        self._groups.make_parent(kind, lines, kind)
        ranks = next(ranks for ranks in lines if self._rank in ranks)
        channel = Channel(self._groups, ranks, ranks.index(self._rank), self._device, kind)
        self._warm_up_channel(channel)
        return channel

    @cached_property
    def hosts(self) -> Channel:
        """Return a channel over all ranks of the home, for arrays of the host: gloo, point to point."""
        ranks = self._home.ranks
        return Channel(self._groups, ranks, ranks.index(self._rank), torch.device("cpu"), "control")

    def connect_pairs(self) -> None:
        """Let every two slots of a plane exchange a number: NCCL connects two ranks at their first message, slowly."""
        channel = self.find_channel(range(self._home.slots))
        other_members = channel._other_members()
        self._exchange_numbers(channel, other_members, other_members, "connecting pairs")

    def make_communicators(self, plan: Plan) -> None:
        """Make communicators for the groups of this plan that gain from one and lack it; entered by all ranks."""
        for slots in self._choice.choose_groups(plan):
            for plane in self._home.planes():
                ranks = tuple(plane[slot] for slot in slots)
                # torch orders a group by rank, so slots whose ranks do not ascend get no communicator.
                if ranks != tuple(sorted(ranks)):
                    continue
                group = self._groups.make_group(ranks, "communicator")
                if group is not None:
                    self._groups.by_ranks[ranks] = group
                    self._warm_up_group(group, ranks)

    def _warm_up_channel(self, channel: Channel) -> None:
        """NCCL connects the members by a collective of the parent group, and by an exchange with both neighbours."""
        self._warm_up_group(channel.group, channel.ranks)
        if channel.degree > 1:
            next_member = (channel.index + 1) % channel.degree
            previous_member = (channel.index - 1) % channel.degree
            self._exchange_numbers(channel, [next_member], [previous_member], "warming point-to-point")

    def _exchange_numbers(
        self, channel: Channel, targets: Sequence[int], sources: Sequence[int], label: str
    ) -> None:
        """On CPUs nothing is sent."""
        if self._device.type == "cuda" and targets:
            x = torch.zeros(1, device=self._device)
            channel.exchange([(m, x) for m in targets], [(m, x.clone()) for m in sources], label).wait()
            torch.cuda.synchronize(self._device)

    def _warm_up_group(self, group: ProcessGroup, ranks: Sequence[int]) -> None:
        """After the first collective of its communicator any two members may talk point to point."""
        if self._device.type == "cuda":
            with self._groups.watch.enter_operation("warming a communicator", ranks):
                dist.all_reduce(torch.zeros(1, device=self._device), group=group)
                torch.cuda.synchronize(self._device)
