"""Channels move exactly what is given, with and without communicators of their own, whose number is bounded."""

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.channel import EVENT_BYTES, Channel, Handle
from longspan.comm.process_groups import CommunicatorChoice, GroupRecord, ProcessGroups
from longspan.comm.watch import Operation
from longspan.comm.world import World
from longspan.errors import CommError
from longspan.layout import Layout
from longspan.plan import Group, MicroBatch, Plan, plan_fixed
from longspan.testing import backend, run_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
# (slots in group order, rows of each member); every slot of four is in the group or stands aside
GATHERS = [
    ((0, 1, 2, 3), (2, 2, 2, 2)),
    ((3, 1, 0, 2), (1, 0, 3, 2)),
    ((0, 2), (1, 3)),
    ((1, 2, 3), (0, 0, 4)),
    ((0, 3), (0, 0)),
    ((1,), (2,)),
]


def rows(member: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.arange(count * 3, device=device).reshape(count, 3) + 20 * member).to(dtype)


def talk_all(rank: int) -> list[list[GroupRecord]]:
    with World(Layout(ranks=4), backend=backend(), timeout=60) as world:
        disagree(world)
        if rank < 3:
            channel = world.channels.find_channel((2, 0, 1))
            refuse_wrong_rows(channel)
            check_pairs(channel)
    return [talk(rank, max_groups) for max_groups in MAX_GROUPS]


def talk(rank: int, max_groups: int) -> list[GroupRecord]:
    with World(Layout(ranks=4), backend=backend(), timeout=60, max_groups=max_groups) as world:
        for slots, _ in GATHERS:
            world.prepare(Plan(4, (8,), (MicroBatch((Group(slots, (0,), (8,)),)),), targets=7))
        for dtype in DTYPES[: 1 if max_groups == 1 else None]:
            for slots, counts in GATHERS:
                if rank in slots:
                    channel = world.channels.find_channel(slots)
                    assert channel.ranks == slots and channel.index == slots.index(rank) and repr(channel)
                    has_own = world.process_groups.communicator(slots) is not None
                    only = mock.patch.object(dist, "batch_isend_irecv", side_effect=AssertionError("point to point"))
                    with only if has_own else nullcontext():
                        for check in (check_gather, check_sum, check_rows, check_shift):
                            check(channel, counts, dtype)
        made = world.process_groups.made
        communicators = [world.process_groups.communicator(x.ranks) for x in made if x.kind == "communicator"]
        assert None not in communicators, "made, and not used"
        return made


def refuse_wrong_rows(channel: Channel) -> None:
    """What a communication type of a user's own may get wrong is refused in words, before anything is sent."""
    x = rows(channel.index, 2, torch.float64, channel.device)
    other = (channel.index + 1) % channel.degree
    for call, says in (
        (lambda: channel.all_gather(x, (2,), "own"), r"gathers 2 rows under counts \[2\]"),
        (lambda: channel.all_gather_rows(x[:1], (2,) * channel.degree, "own"), "gathers 1 rows"),
        (lambda: channel.all_to_all_rows(x, [1] * 3, [1] * 3, "own"), r"has 2 rows, sends \[1, 1, 1\]"),
        (lambda: channel.exchange([], [(other, x.T)], "own"), r"tensor \(3, 2\) that receives from member"),
    ):
        with pytest.raises(CommError, match=says):
            call()


def check_gather(channel: Channel, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    local = rows(channel.index, counts[channel.index], dtype, channel.device)
    handle = channel.all_gather(local, counts, "gather")
    parts = handle.wait()
    for member, part in enumerate(parts):
        assert torch.equal(part, rows(member, counts[member], dtype, channel.device)), (member, part)
    assert handle.wait() is parts


def check_sum(channel: Channel, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rounded once, whatever the degree: the sum of bfloat16 rows is the exact sum's nearest bfloat16."""
    addends = [addend(member, channel, counts, dtype) for member in range(channel.degree)]
    exact = torch.stack([part.double() for part in addends]).sum(0).split(list(counts))[channel.index]
    total = channel.reduce_scatter(addends[channel.index], counts, "sum").wait()
    assert total.dtype == dtype and torch.equal(total, (exact % 256 if dtype == torch.uint8 else exact).to(dtype))


def addend(member: int, channel: Channel, counts: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a member sends to all; in bfloat16 small numbers beside large ones, which are lost if rounded one by one."""
    x = torch.cat([rows(m, n, torch.int64, channel.device) for m, n in enumerate(counts)]) * (member + 1)
    return (x / 64.0**member if dtype == torch.bfloat16 else x).to(dtype)


def check_rows(channel: Channel, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    """Member m sends n rows to member n, and what arrives lies in member order, whatever the order of ranks."""
    sends, receives = list(range(channel.degree)), [channel.index] * channel.degree
    x = torch.cat([rows(10 * channel.index + m, n, dtype, channel.device) for m, n in enumerate(sends)])
    arrived = channel.all_to_all_rows(x, sends, receives, "rows").wait()
    expected = [rows(10 * m + channel.index, channel.index, dtype, channel.device) for m in range(channel.degree)]
    assert torch.equal(arrived, torch.cat(expected))


def check_shift(channel: Channel, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    if channel.degree == 1:
        return
    left = (channel.index - 1) % channel.degree
    into = rows(0, counts[left], dtype, channel.device)
    channel.shift(rows(channel.index, counts[channel.index], dtype, channel.device), into, "shift").wait()
    assert torch.equal(into, rows(left, counts[left], dtype, channel.device))


MAX_GROUPS = (0, 1, 9)


def test_channels_with_and_without_communicators() -> None:
    for rank, of_rank in enumerate(run_ranks(talk_all, 4)):
        for max_groups, records in zip(MAX_GROUPS, of_rank, strict=True):
            communicators = [record for record in records if record.kind == "communicator"]
            assert all(rank in record.ranks and record.seconds > 0 for record in communicators)
            assert len(communicators) <= max_groups
            if rank == 0:  # (0, 1, 2, 3), in another order without one, (0, 2), (0, 3)
                assert len(communicators) == min(max_groups, 3)


@pytest.mark.parametrize(("work_bytes", "seen"), [(EVENT_BYTES - 1, "watch_works"), (EVENT_BYTES, "watch_stream")])
def test_works_that_hold_much_are_not_kept_to_be_watched(work_bytes: int, seen: str) -> None:
    watch, works = mock.Mock(current=None, named_operation=None, timeout=60.0), (mock.Mock(),)
    handle = Handle(Operation(watch, "gather", (0, 1)), works, finish=lambda: "rows", work_bytes=work_bytes)
    assert handle.wait() == handle.wait() == "rows"
    assert [name for name, *_ in watch.method_calls] == [seen] and watch.last_label == "gather"


def check_pairs(channel: Channel) -> None:
    device = channel.device
    peers = [m for m in range(3) if m != channel.index]
    sizes = (2, 0, 5)
    sends = [(m, torch.full((n,), 10.0 * channel.index + n, device=device)) for n in sizes for m in peers]
    receives = [(m, torch.zeros(n, device=device)) for n in sizes for m in peers]
    assert channel.exchange(sends, receives, "pairs").wait() is None
    for member, arrived_there in receives:
        assert (arrived_there == 10.0 * member + len(arrived_there)).all()
    strided = torch.arange(6.0, device=device).reshape(3, 2).t()
    arrived = torch.empty(2, 3, device=device)
    right, left = (channel.index + 1) % 3, (channel.index - 1) % 3
    channel.exchange([(right, strided)], [(left, arrived)], "strided").wait()
    assert torch.equal(arrived, strided)
    with pytest.raises(CommError, match="copy its own tensor"):
        channel.exchange([(channel.index, arrived)], [], "self")
    assert channel.exchange([], [], "nothing").wait() is None


def disagree(world: World) -> None:
    with pytest.raises(CommError, match="hold 2 different plans"):
        world.prepare(plan_fixed([8 + world.rank % 2, 4], world.home, cp=2))
    with pytest.raises(CommError, match="the plan is for 8 slots, the home has 4"):
        world.prepare(plan_fixed([8], Layout(ranks=8), cp=2))


def plan_of(*micro_batches: tuple[tuple[int, ...], ...]) -> Plan:
    document = iter(range(1000))
    groups = [MicroBatch(tuple(Group(s, (next(document),), (8,)) for s in slots)) for slots in micro_batches]
    lengths = (8,) * sum(len(slots) for slots in micro_batches)
    return Plan(8, lengths, tuple(groups), targets=sum(lengths))


CHOICES = [  # (most per slot, plans in turn, what each gains)
    (4, [plan_of(((0, 1), (2, 3)), ((0, 1),))], [[(0, 1), (2, 3)]]),  # one degree: all of them
    (4, [plan_of(((0, 1), (2,)), ((0, 1),))], [[(0, 1)]]),  # slots alone talk to nobody
    (4, [plan_of(((0, 1, 2), (3, 4)))], [[]]),  # mixed degrees, seen once
    (4, [plan_of(((0, 1, 2), (3, 4))), plan_of(((3, 4), (0, 1, 2, 5)))], [[], [(3, 4)]]),  # seen again
    (1, [plan_of(((0, 1), (2, 3))), plan_of(((1, 2), (4, 5)))], [[(0, 1), (2, 3)], [(4, 5)]]),  # full slots gain none
    (0, [plan_of(((0, 1),))], [[]]),
]


@pytest.mark.parametrize(("most", "plans", "gains"), CHOICES)
def test_the_number_of_communicators_is_bounded(most: int, plans: list[Plan], gains: list[object]) -> None:
    choice = CommunicatorChoice(most)
    assert [choice.choose_groups(plan) for plan in plans] == gains
    for _ in range(2):
        again = [choice.choose_groups(plan) for plan in plans]
    assert again == [[]] * len(plans), "what is there is not made again"


def test_messages_that_travel_beside_kernels_go_on_streams_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[Any] = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **more: options.append(more["pg_options"]))
    watch: Any = SimpleNamespace(rank=5, enter_operation=lambda *what, **more: nullcontext())
    groups = ProcessGroups(backend="cpu:gloo,cuda:nccl", timeout=9.0, watch=watch)
    for kind, backend_ in (("parent", None), ("communicator", None), ("slots", None), ("tp", None), ("parent", "gloo")):
        assert groups.make_group((0, 1), kind, backend=backend_) is None
    urgent, of_a_plan, *usual = options
    assert urgent == of_a_plan == SimpleNamespace(is_high_priority_stream=True, _timeout=timedelta(seconds=9))
    assert usual == [None] * 3
