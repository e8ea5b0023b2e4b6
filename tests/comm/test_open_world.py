"""Worlds that are opened and closed without a block, and those that are open when a program ends."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from longspan.comm.world import World
from longspan.errors import CommError
from longspan.layout import Layout
from longspan.testing import run_ranks


def test_open_and_close_as_with_does() -> None:
    world = World(Layout(1), backend="gloo")
    world.close()  # it was never open
    assert world.open() is world and world.rank == 0
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
    """The one rank fails, the other waits for it."""
    world = World(Layout(2), backend="gloo", timeout=30).open()
    inner = world.open_inner(Layout(2, tp=2))
    inner.control.barrier("both are there")
    if rank == 1:
        try:
            raise KeyError("boom")
        except KeyError:
            world.close()
        return
    try:
        world.control.barrier("a rank waits")
    except CommError as error:
        assert "rank 1 left with KeyError: 'boom'" in str(error)
        world.close()
    assert not dist.is_initialized()


def test_closed_in_finally_the_others_learn_of_the_error() -> None:
    run_ranks(close_after, 2)


PROGRAM = """
import sys
from longspan import Layout, World
from longspan.errors import CommError

world = World(Layout(2), backend="gloo", timeout=30).open()
world.control.barrier("both are there")
if sys.argv[1] == "raise" and world.rank == 1:
    raise KeyError("boom")
if sys.argv[1] == "raise":
    try:
        world.control.barrier("a rank waits")
    except CommError as error:
        print(error)
"""


@pytest.mark.parametrize("how", [pytest.param("end", marks=pytest.mark.whole), "raise"])
def test_a_program_may_end_with_an_open_world(how: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how],
            env=os.environ | variables | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    started = time.monotonic()
    (said, errors), (_, failure) = (rank.communicate(timeout=60) for rank in ranks)
    assert time.monotonic() - started < 30
    codes = [rank.returncode for rank in ranks]
    if how == "end":
        assert (codes, errors, failure) == ([0, 0], "", "")
    else:
        assert codes == [0, 1] and "rank 1 left with KeyError: 'boom'" in said and "KeyError: 'boom'" in failure
