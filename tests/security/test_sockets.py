"""Local ranks, their launcher, and processes that plan or tokenize listen on this host's loopback only."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from longspan import Layout, World
from longspan.launch.launch import LOOPBACK, start_store_server
from longspan.testing import run_ranks
from tests.faults.live_run import LOCAL, started

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="sockets are read from /proc")
LISTENS = "0A"
LOOPBACKS = {"0100007F", f"{0:024X}01000000", f"{0:016X}FFFF00000100007F"}  # 127.0.0.1, ::1, ::ffff:127.0.0.1


def sockets_of(pid: int) -> set[str]:
    """The inodes of the sockets that a process has open."""
    inodes = set[str]()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:"):
            inodes.add(target[len("socket:[") : -1])
    return inodes


def listening_addresses(pids: Iterable[int]) -> set[str]:
    """The addresses, as the kernel writes them, on which these processes listen over TCP."""
    inodes = set[str]().union(*map(sockets_of, pids))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTENS and row[9] in inodes}


def processes_of(pid: int) -> list[int]:
    children = [
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    ]
    return [pid, *(process for child in children for process in processes_of(child))]


def listen_as_rank(rank: int) -> set[str]:
    with World(Layout(2), backend="gloo", timeout=60) as world:
        world.control.gather_objects(rank)
        return listening_addresses([os.getpid()])


def test_local_ranks_listen_on_loopback_only() -> None:
    before = listening_addresses([os.getpid()])
    store = start_store_server()
    assert store.host == LOOPBACK
    assert listening_addresses([os.getpid()]) & LOOPBACKS
    assert listening_addresses([os.getpid()]) - before <= LOOPBACKS
    addresses = run_ranks(listen_as_rank, 2)
    assert all(addresses), "a rank over gloo listens"
    assert set[str]().union(*addresses) <= LOOPBACKS


@pytest.mark.whole
def test_no_process_of_a_run_listens_outside_of_its_host(tmp_path: Path) -> None:
    with started(tmp_path, LOCAL, context__planner="dynamic") as process:
        processes = processes_of(process.pid)
        assert len(processes) >= 5, "launcher, fork server, two ranks and a planner"
        assert listening_addresses(processes) <= LOOPBACKS
