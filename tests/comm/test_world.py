"""A world opens on the right processes, agrees on host values, and refuses what does not fit, on every rank."""

import math
import os
import re
import resource
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from longspan.comm.process_groups import ProcessGroups
from longspan.comm.rendezvous import CONNECTIONS, allow_open_files
from longspan.comm.shard import bind
from longspan.comm.world import World, world_of
from longspan.errors import CommError
from longspan.layout import Layout
from longspan.plan import MicroBatch
from longspan.testing import backend, run_ranks

HOMES = [
    Layout(ranks=1),
    Layout(ranks=3),
    Layout(ranks=4, tp=2),
    Layout(ranks=4, pp=2, tp=2),
    Layout(ranks=4, dp_replicate=2),
    Layout(ranks=(2, 0, 3, 1)),
]


def visit(rank: int, home: Layout) -> None:
    """Every host value, in two worlds in turn."""
    n = len(home.ranks)
    for _ in range(2):
        files = open_files()
        with World(home, backend=backend(), timeout=60) as world:
            assert (world.rank, world.coordinates) == (rank, home.coordinates(rank))
            assert world.plane[world.slot] == rank and world_of(world.key) is world
            mates = world.plane
            assert world.control.sum_over_slots([rank + 0.5, 1.0]) == [sum(mates) + 0.5 * len(mates), len(mates)]
            assert math.isnan(world.control.sum_over_slots([float("nan") if world.slot == 0 else 0.0])[0])
            assert world.control.gather_objects({"rank": rank}) == [{"rank": r} for r in home.ranks]
            assert (
                world.control.broadcast_object(rank) == home.ranks[0]
                and world.control.broadcast_object(rank, source=n - 1) == n - 1
            )
            assert world.control.any_rank(rank == n - 1) and not world.control.any_rank(False)
            assert world.control.any_ranks(rank == 0, False, rank == n - 1) == (True, False, True)
            assert not world.control.agree("0f" * 32) and world.control.agree("0f" * 32, flag=rank == n - 1)
            world.step = 3
            assert world.watch.step == world.step == 3
            check_mesh(world)
            check_files(world, files)
            assert [record.kind for record in world.process_groups.made][:2] == ["control", "parent"]
    with pytest.raises(CommError, match="not open"):
        world.control.barrier()


def open_files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def check_files(world: World, before: int) -> None:
    """With every group that a home may have: no more new files than a world allows for; on GPUs drivers open theirs."""
    _ = world.channels.everyone, world.home.tp > 1 and world.channels.tp, world.channels.pipeline
    spare = 40 if backend() == "gloo" else 256
    assert open_files() - before <= spare + CONNECTIONS * len(world.home.ranks)


def check_mesh(world: World) -> None:
    mesh, copies = world.meshes.fsdp, world.home.dp_replicate
    assert mesh is world.meshes.fsdp and mesh.size() == world.home.slots
    assert mesh.mesh_dim_names == (("slots",) if copies == 1 else ("replicate", "slots"))
    group = mesh.get_group("slots")
    assert group is not world.process_groups.parent("plane"), "point-to-point never runs on FSDP's group"
    total = torch.ones(1, device=world.device) * world.rank
    dist.all_reduce(total, group=group)
    width = world.home.slots // copies
    begin = world.slot // width * width
    assert total.item() == sum(world.plane[begin : begin + width])


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_the_control_group_and_meshes_of_every_home(home: Layout) -> None:
    run_ranks(visit, len(home.ranks), home)


def reuse(rank: int) -> None:
    dist.init_process_group("gloo")
    with World(Layout(ranks=2), backend="gloo") as world:
        assert world.control.sum_over_slots([1.0]) == [2.0]
    dist.barrier()
    with World(Layout(ranks=2), backend="gloo"), pytest.raises(ValueError, match="own error"):
        raise ValueError("own error")
    assert dist.is_initialized()


def test_an_initialised_default_group_is_reused_and_left_alone() -> None:
    run_ranks(reuse, 2)


def renew(rank: int, folder: Path) -> None:
    """A world is never left, and the default group that it was opened with is destroyed and made anew."""
    for turn in range(2):
        dist.init_process_group(backend(), init_method=f"file://{folder}/{turn}", rank=rank, world_size=2)
        world = World(Layout(ranks=2), backend=backend(), timeout=20)
        world.__enter__()
        assert world.control.sum_over_slots([1.0]) == [2.0]
        assert [record.kind for record in world.process_groups.made] == ["control", "parent"]
        dist.destroy_process_group()


def test_no_communicator_of_an_earlier_default_group_is_shared(tmp_path: Path) -> None:
    run_ranks(renew, 2, tmp_path)


def refuse(rank: int) -> None:
    cases = [
        (Layout(ranks=4), {}, r"the home has 4 ranks \(0, 1, 2, 3\), but 2 processes were started"),
        (Layout(ranks=(0, 2)), {}, r"the home has 2 ranks \(0, 2\), but 2 processes were started, ranks 0 to 1"),
        (Layout(ranks=1), {}, r"the home has 1 rank \(0\), but 2 processes .* ranks 0 to 1; start 1 process, or make"),
        (Layout(ranks=2), {"backend": "mpi"}, "backend 'mpi' is not known; use 'gloo'"),
        (Layout(ranks=2), {"backend": "gloo", "device": "cuda:99"}, "needs cuda:99, but this host shows"),
    ]
    for home, keywords, message in cases:
        with pytest.raises(CommError, match=message), World(home, **keywords):
            pass
    for names, says in (
        (("RANK",), "RANK is not set"),
        (("WORLD_SIZE",), "WORLD_SIZE is not set"),
        (("MASTER_ADDR",), "MASTER_ADDR is not set"),
        (("MASTER_ADDR", "MASTER_PORT"), "MASTER_ADDR and MASTER_PORT are not set"),
    ):
        values = {name: os.environ.pop(name) for name in names}
        torchrun = "start the ranks with `torchrun --nproc-per-node 2`, which sets RANK, WORLD_SIZE, MASTER_ADDR, M"
        with pytest.raises(CommError, match=f"the home has 2 ranks, but {says}; {torchrun}"):
            World(Layout(ranks=2)).__enter__()
        os.environ.update(values)


def test_processes_that_are_not_the_home_are_refused_before_they_meet() -> None:
    run_ranks(refuse, 2)


def open_again(rank: int) -> list[str]:
    """Worlds that one or both ranks fail to open, each followed by one that opens."""
    said, pair = [], Layout(ranks=2)

    def fails(**keywords: Any) -> None:
        with pytest.raises(CommError) as caught:
            World(pair, **{"backend": "gloo", "timeout": 60} | keywords).__enter__()
        said.append(str(caught.value))
        assert not dist.is_initialized()

    def opens() -> None:
        with World(pair, backend=backend(), timeout=60) as world:
            assert world._made_default and world.control.sum_over_slots([1.0]) == [2.0]

    if rank == 0:
        fails(device="cuda:99")
    opens()
    if rank == 0:
        fails(timeout=0.5)
    else:
        time.sleep(1.0)  # longer than rank 0 waits
    opens()
    with mock.patch.object(dist, "init_process_group", side_effect=RuntimeError("gloo: no route")):
        fails()
    opens()
    with mock.patch.object(ProcessGroups, "make_parent", side_effect=KeyError("plane")), pytest.raises(KeyError):
        World(pair, backend=backend(), timeout=60).__enter__()
    opens()
    end_slowly()
    opens()
    return said


def end_slowly() -> None:
    """Leave a world with an error whose groups take longer to end than a rank waits for them."""
    destroy = dist.destroy_process_group
    slow = mock.patch.object(dist, "destroy_process_group", lambda: time.sleep(1.3) or destroy())
    with slow, pytest.raises(KeyError), World(Layout(ranks=2), backend=backend(), timeout=60):
        raise KeyError("an error of the caller")
    assert dist.is_initialized()


def test_after_any_failure_to_open_the_next_world_opens() -> None:
    said, said_by_rank_1 = run_ranks(open_again, 2)
    for message, pattern in zip(
        said,
        ("needs cuda:99", r"world of 2 ranks in 0.5 s: rank\(s\) \(1\) did not come", "gloo: no route"),
        strict=True,
    ):
        assert re.search(pattern, message)
    assert len(said_by_rank_1) == 1


@pytest.mark.parametrize(
    ("ranks", "limits", "becomes"),
    [
        (76, (1024, 4096), None),  # enough
        (330, (1024, 4096), (256 + 10 * 330, 4096)),
        (330, (1024, -1), (256 + 10 * 330, -1)),
        (8192, (-1, -1), None),
        (1024, (1024, 4096), (4096, 4096)),  # and a warning
    ],
)
def test_files_that_a_world_opens_are_allowed(
    ranks: int, limits: tuple[int, int], becomes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[object] = [None]
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda what, new: changed.append(new))
    short = becomes == limits[1:] * 2
    says = r"may open 4,096 files, and a world of 1,024 ranks opens up to 10,496: 10 connections .*ulimit -Hn 10496"
    with pytest.warns(RuntimeWarning, match=says) if short else nullcontext():
        allow_open_files(ranks)
    assert changed[-1] == becomes


def misuse(rank: int) -> None:
    with World(Layout(ranks=2), backend="gloo") as world:
        with pytest.raises(CommError, match="already open"):
            world.__enter__()
        for slots, message in {
            (0, 2): r"\(0, 2\) are not distinct slots of the home, which has slots 0 to 1",
            (0, 0): "not distinct",
            (1 - rank,): f"rank {rank} is slot {rank}, which is not a member",
        }.items():
            with pytest.raises(CommError, match=message):
                world.channels.find_channel(slots)
        channel = world.channels.find_channel((0, 1))
        assert channel is world.channels.find_channel([0, 1]) and channel is not world.channels.find_channel((1, 0))
        digest = ("ab", "cd")[rank] * 32
        with pytest.raises(
            CommError, match=r"hold 2 different plans for step 0: ranks \(0\) hold abab.*ranks \(1\) hold"
        ):
            world.control.agree(digest)
    x = torch.ones(1)
    for call in (
        lambda: channel.exchange([(1 - rank, x)], [(1 - rank, x)], "late"),
        lambda: world.channels.find_channel((0, 1)),
        lambda: world.meshes.fsdp,
        lambda: world_of(world.key),
    ):
        with pytest.raises(CommError, match=r"left|not open"):
            call()


def test_misuse_is_named() -> None:
    run_ranks(misuse, 2)


def come_or_not(rank: int) -> None:
    if rank != 1:
        with pytest.raises(CommError, match=r"world of 3 ranks in 3 s: rank\(s\) \(1\) did not come"):
            World(Layout(ranks=3), backend="gloo", timeout=3).__enter__()


def test_a_rank_that_does_not_come_is_named() -> None:
    run_ranks(come_or_not, 3)


def test_a_world_that_is_not_open_says_so() -> None:
    world, nothing = World(Layout(ranks=1), backend="gloo"), MicroBatch()
    for name in ("rank", "slot", "device", "plane"):
        with pytest.raises(CommError, match=f"this world is not open, so its {name} is not known; use it inside `with"):
            getattr(world, name)
    for use in (lambda: bind(nothing, world), lambda: world.channels.find_channel((0,)), lambda: world.step):
        with pytest.raises(CommError, match="not open"):
            use()
    with world:
        bind(nothing, world)
    with pytest.raises(CommError, match="not open"):
        bind(nothing, world)
    with pytest.raises(AttributeError, match="no attribute 'slots'"):
        world.slots  # type: ignore[attr-defined]  # noqa: B018


def test_one_rank_needs_no_launcher() -> None:
    with World(Layout(ranks=1), backend="gloo") as world:
        assert world.control.sum_over_slots([2.5]) == [2.5]
    assert not dist.is_initialized()
