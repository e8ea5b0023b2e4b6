"""A world opens on the right processes, agrees on host values, and refuses what does not fit, on every rank.

Worlds of different homes over the same ranks may be open inside each other, and through a store that outlives them.
"""

import math
import os
import re
import resource
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore
from torch.distributed.tensor import DTensor, Shard

from longspan.comm import leave_together
from longspan.comm.all_ranks import run_on_every_rank, run_on_first_rank
from longspan.comm.process_groups import CONNECTIONS, ProcessGroups, raise_open_file_limit
from longspan.comm.rendezvous import Place, join_world_of_all_ranks
from longspan.comm.shard import bind
from longspan.comm.world import World, _leave_open_worlds as leave_open_worlds, world_of
from longspan.errors import CheckpointError, CommError, DataError
from longspan.layout import Layout
from longspan.plan import MicroBatch
from longspan.testing import backend, run_ranks

HOMES = (Layout(ranks=4, pp=2, tp=2), Layout(ranks=4, dp_replicate=2), Layout(ranks=(2, 0, 3, 1)))


def visit_all(rank: int) -> str:
    for home in (HOMES[0], *HOMES):  # of the first, one world after another
        n, files = len(home.ranks), open_files()
        with World(home, backend=backend(), timeout=60) as world:
            assert (world.rank, world.coordinates) == (rank, home.coordinates(rank))
            assert world.plane[world.slot] == rank and world_of(world.key) is world
            mates = world.plane
            assert world.control.sum_over_slots([rank + 0.5, 1.0]) == [sum(mates) + 0.5 * len(mates), len(mates)]
            assert math.isnan(world.control.sum_over_slots([float("nan") if world.slot == 0 else 0.0])[0])
            assert world.control.gather_objects({"rank": rank}) == [{"rank": r} for r in home.ranks]
            assert world.control.broadcast_object(rank) == home.ranks[0]
            assert world.control.broadcast_object(rank, source=n - 1) == n - 1
            assert world.control.flag_on_any_rank(rank == n - 1) and not world.control.flag_on_any_rank(False)
            assert world.control.flags_on_any_rank(rank == 0, False, rank == n - 1) == (True, False, True)
            assert world.control.compare_digests("0f" * 32, rank == n - 1, False) == (True, False)
            world.step = 3
            assert world.watch.step == world.step == 3
            # with every group that a home may have, no more files than a world allows for; on GPUs drivers open theirs
            _ = world.channels.everyone, home.tp > 1 and world.channels.tp, world.channels.pipeline
            assert open_files() - files <= (40 if backend() == "gloo" else 256) + CONNECTIONS * n
            assert kinds_of(world)[:2] == ["control", "parent"]
        with pytest.raises(CommError, match="not open"):
            world.control.barrier()
    nested()
    return apart(rank)


def open_files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_the_control_group_and_meshes_of_every_home_also_inside_another() -> None:
    reports = run_ranks(visit_all, RANKS)  # that of the first rank whose time is over has all of them
    assert any("rank 2 is in 'encoding'" in said and "is in 'embedding'" in said for said in reports), reports


def of_two(rank: int, folder: Path) -> None:
    close_after(rank)
    refuse()
    misuse(rank)
    for turn in range(2):  # no communicator of an earlier default group is shared
        dist.init_process_group(backend(), init_method=f"file://{folder}/{turn}", rank=rank, world_size=2)
        world = World(Layout(ranks=2), backend=backend(), timeout=20)
        world.__enter__()
        assert world.control.sum_over_slots([1.0]) == [2.0] and kinds_of(world) == ["control", "parent"]
        dist.destroy_process_group()
    dist.init_process_group("gloo")
    with World(Layout(ranks=2), backend="gloo") as world:
        assert world.control.sum_over_slots([1.0]) == [2.0]
    dist.barrier()
    with World(Layout(ranks=2), backend="gloo"), pytest.raises(ValueError, match="own error"):
        raise ValueError("own error")
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_processes_that_are_not_the_home_misuse_and_groups_that_are_there(tmp_path: Path) -> None:
    run_ranks(of_two, 2, tmp_path)


def refuse() -> None:
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


def open_again(rank: int) -> list[str]:
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
        fails(timeout=0.3)
    else:
        time.sleep(0.7)  # longer than rank 0 waits
    opens()
    with mock.patch.object(dist, "init_process_group", side_effect=RuntimeError("gloo: no route")):
        fails()
    opens()
    with mock.patch.object(ProcessGroups, "make_parent", side_effect=KeyError("plane")), pytest.raises(KeyError):
        World(pair, backend=backend(), timeout=60).__enter__()
    opens()
    destroy = dist.destroy_process_group
    slow = mock.patch.object(dist, "destroy_process_group", lambda: time.sleep(1.2) or destroy())
    with slow, pytest.raises(KeyError), World(pair, backend=backend(), timeout=60):
        raise KeyError("an error of the caller")
    assert dist.is_initialized()
    opens()
    return said


def test_after_any_failure_to_open_the_next_world_opens() -> None:
    said, said_by_rank_1 = run_ranks(open_again, 2)
    late = r"world of 2 ranks in 0.3 s: rank\(s\) \(1\) did not come"
    for message, pattern in zip(said, ("needs cuda:99", late, "gloo: no route"), strict=True):
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
    raise_open_file_limit(ranks)
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
    x = torch.ones(1)
    for call in (
        lambda: channel.exchange([(1 - rank, x)], [(1 - rank, x)], "late"),
        lambda: world.channels.find_channel((0, 1)),
        lambda: world.meshes.fsdp,
        lambda: world_of(world.key),
    ):
        with pytest.raises(CommError, match=r"left|not open"):
            call()


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


# ---- worlds of different homes over the same ranks, open inside each other

RANKS = 4


def every_group(world: World) -> dict[str, dist.ProcessGroup]:
    _ = world.channels.everyone
    groups = {"control": world.control.group, "parent": world.process_groups.parent("plane")}
    groups["slots"] = world.meshes.fsdp.get_group("slots")
    if world.home.tp > 1:
        groups |= {"tp": world.channels.tp.group, "everyone": world.channels.everyone.group}
    return groups


def kinds_of(world: World) -> list[str]:
    return [record.kind for record in world.process_groups.made]


def nested() -> None:
    with World(Layout(RANKS, tp=2), backend=backend(), timeout=60) as world:
        with World(Layout(RANKS), backend=backend(), timeout=60) as encoder_world:
            inner, outer = every_group(encoder_world), every_group(world)
            world.step = 3
            assert encoder_world.step == 3
            assert outer["control"] is inner["control"] and kinds_of(encoder_world) == ["parent", "slots"]
            # Messages to all ranks go where the encoder's do, of which FSDP2 has its own
            assert outer["everyone"] is inner["parent"] is not inner["slots"]
            assert len({*outer.values()}) == 5 and kinds_of(world) == ["control", "parent", "slots", "tp"]
            with World(Layout(RANKS, tp=2), backend=backend(), timeout=60) as third:
                assert every_group(third) == outer and kinds_of(third) == [] and third.step == 3
            with World(Layout(RANKS), backend=backend(), timeout=50) as other:
                assert not {*every_group(other).values()} & {*inner.values()}, "with another limit of time"
            check_reductions(world, encoder_world)
        check_reductions(world)  # the encoder's group of all ranks lives on, as this world uses it
        assert world.channels.everyone.group is inner["parent"]
    assert not dist.is_initialized()


def check_reductions(*worlds: World) -> None:
    for world in worlds:
        assert world.control.sum_over_ranks([1.0]) == [RANKS]
        x = torch.ones(1, device=world.device)
        assert sum(part.item() for part in world.channels.everyone.all_gather(x, [1] * RANKS, "ones").wait()) == RANKS
        total: Any = DTensor.from_local(x, world.meshes.fsdp, [Shard(0)]).sum()
        assert total.full_tensor().item() == world.home.slots


def apart(rank: int) -> str:
    """A report says what a rank does in another world."""
    with (
        pytest.raises(CommError) as error,
        World(Layout(RANKS, tp=2), backend="gloo", timeout=60) as world,
        World(Layout(RANKS), backend="gloo", timeout=60) as encoder_world,
    ):
        world.watch.timeout = encoder_world.watch.timeout = 1.0
        if rank == 2:
            encoder_world.control.barrier("encoding")
        else:
            world.control.gather_objects(rank, "embedding")
    return str(error.value)


# ---- opened and closed without a block, and open when a program ends


def test_open_and_close_as_with_does() -> None:
    world = World(Layout(1), backend="gloo")
    world.close()  # it was never open
    assert world.open() is world and world.rank == 0 and world.control.sum_over_slots([2.5]) == [2.5]
    with pytest.raises(CommError, match="already open"):
        world.open()
    world.close()
    world.close()
    assert not dist.is_initialized()
    with pytest.raises(CommError, match=r"not open; use it inside `with .*world.open\(\)"):
        world.check_open()
    with world:  # it may be opened again
        assert world.rank == 0


def close_after(rank: int) -> None:
    """The one rank fails, and closes the world or leaves that to the end of its program; the other waits for it."""
    for leave in (World.close, lambda _: leave_open_worlds()):
        world = World(Layout(2), backend="gloo", timeout=30).open()
        inner = world.open_inner(Layout(2, tp=2))
        inner.control.barrier("both are there")
        try:
            if rank == 1:
                raise KeyError("boom")
            world.control.barrier("a rank waits")
        except (KeyError, CommError) as error:
            assert rank == 1 or "rank 1 left with KeyError: 'boom'" in str(error)
            sys.last_value = error  # as Python sets it for an error that ends a program
            leave(world)
        assert rank == 1 or not dist.is_initialized()


PROGRAM = """
import os, sys
from longspan import Layout, World
from longspan.errors import CommError

ranks = []
while len(ranks) < 2:
    os.environ["RANK"] = str(len(ranks))
    ranks.append(os.fork())
    if not ranks[-1]:
        break
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    print("codes", codes)
    sys.exit()
world = World(Layout(2), backend="gloo", timeout=30).open()
world.control.barrier("both are there")
if world.rank == 1:
    raise KeyError("boom")
try:
    world.control.barrier("a rank waits")
except CommError as error:
    print(error)
"""


@pytest.mark.whole  # in a process of its own; `close_after` has what it does at its end
def test_a_program_may_end_with_an_open_world() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM]
    ran = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=240, check=False)
    assert "codes [0, 1]" in ran.stdout, ran.stderr
    assert "rank 1 left with KeyError: 'boom'" in ran.stdout and "KeyError: 'boom'" in ran.stderr


# ---- what one rank does for all, and what all do at once: the same result, or the same error, everywhere


def rank_outcomes(rank: int) -> list[object]:
    results: list[object] = []

    def failing(where: int) -> int:
        if rank == where:
            raise OSError(5, "Input/output error", "file.bin")
        return rank

    with World(Layout(2), backend=backend(), timeout=60) as world:
        results.append(run_on_every_rank(world, lambda: failing(-1), DataError))
        results.append(run_on_first_rank(world, lambda: f"from {rank}", DataError))
        with pytest.raises(CheckpointError) as error:
            run_on_every_rank(world, lambda: failing(1), CheckpointError)
        results.append(str(error.value))
        with pytest.raises(DataError) as other:
            run_on_first_rank(world, lambda: failing(0), DataError)
        results.append(str(other.value))
        limit, world.watch.timeout = world.watch.timeout, 0.8
        run_on_every_rank(world, lambda: time.sleep(1.1 * rank), DataError)  # work may take longer
        world.watch.timeout = limit
        with pytest.raises(KeyError), leave_together(world):
            raise KeyError(rank)
        return [*results, run_on_first_rank(world, lambda: rank + 1, DataError)]


def test_every_rank_gets_the_same_results_and_errors() -> None:
    lack = "file.bin: Input/output error"
    assert run_ranks(rank_outcomes, 2) == [[rank, "from 0", f"{lack} (on rank 1)", lack, 1] for rank in range(2)]


# ---- ranks meet through a store that outlives them, as torchrun's does when it starts them again

Attempt = tuple[int, tuple[int, ...]]  # the ranks of a launch, and those that come


def open_worlds(store: HashStore, size: int, ranks: tuple[int, ...]) -> list[str]:
    def open_world(rank: int) -> str:
        try:
            return join_world_of_all_ranks(store, Place(rank, size, rank, "", f"node {rank}"), 5.0 if whole else 0.3)
        except CommError as error:
            assert "could not open the world" in str(error) and not whole
            return ""

    whole = len(ranks) == size
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(open_world, ranks))


@pytest.mark.parametrize(
    "launches",
    [
        [(2, (0, 1)), (2, (0, 1)), (2, (1, 0))],
        [(4, (0, 1, 2, 3)), (2, (0, 1)), (4, (3, 2, 1, 0)), (3, (0, 1, 2))],
        [(3, (1, 2)), (3, (0, 1, 2)), (3, (0,)), (3, (0, 1)), (3, (2, 1, 0))],
        [(3, (0, 2)), (1, (0,)), (2, (1,)), (2, (1, 0)), (3, (0, 2, 1))],
    ],
)
def test_each_launch_opens_a_world_of_its_own(launches: list[Attempt]) -> None:
    store, opened = HashStore(), set[str]()
    for size, ranks in launches:
        worlds = set(open_worlds(store, size, ranks))
        if len(ranks) == size:
            (world,) = worlds
            assert world not in opened
            opened.add(world)
        else:
            assert worlds == {""}


def test_a_world_that_killed_ranks_had_joined_is_passed_over() -> None:
    store = HashStore()
    store.set("longspan/newest", "longspan/world 1")
    store.add("longspan/worlds", 1)
    dead = PrefixStore("longspan/world 1", store)
    for rank in (1, 3):
        dead.add(f"joined/{rank}", 1)
        dead.add("joined", 1)
    assert open_worlds(store, 4, (1, 2, 3, 0)) == ["longspan/world 2"] * 4


def test_a_world_that_is_open_is_not_left_for_the_next() -> None:
    store = HashStore()
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(join_world_of_all_ranks, store, Place(1, 2, 1, ""), 5.0)
        first = join_world_of_all_ranks(store, Place(0, 2, 0, ""), 5.0)
        with pytest.raises(CommError, match=r"rank\(s\) \(1\) did not come"):
            join_world_of_all_ranks(store, Place(0, 2, 0, ""), 0.0)
        assert slow.result() == first


def test_a_world_of_one_rank_waits_for_nobody() -> None:
    with World(Layout(ranks=1), backend="gloo") as world:
        entered = mock.patch.object(world.watch, "enter_operation", side_effect=AssertionError("nobody is there"))
        started = mock.patch("longspan.comm.all_ranks.Thread", side_effect=AssertionError("nobody waits"))
        with entered, started, leave_together(world):
            control, total = world.control, np.arange(3.0)
            assert control.flags_on_any_rank(True, False) == control.compare_digests("ab", True, False) == (True, False)
            assert control.gather_objects("a") == ["a"] and control.first_object("a", "") == (0, "a")
            assert control.broadcast_object(None) is None and control.largest_over_ranks([2.0], "") == [2.0]
            assert (control.sum_array_over_ranks(total) == total).all() and run_on_every_rank(
                world, int, DataError
            ) == 0
