"""Ranks that stay: calls see nothing of each other, and a failure costs only the ranks that it broke."""

import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from longspan import Layout, World
from longspan.comm import rendezvous, ring
from longspan.errors import CommError
from tests.launch.rank_pool import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(3)
    yield pool
    pool.close()


def total(rank: int, ranks: int) -> tuple[int, float]:
    with World(Layout(ranks=ranks), backend="gloo") as world:
        assert len(rendezvous._stores) == 1, "a store of an earlier call is kept, whose port may come again"
        return os.getpid(), world.control.sum_over_stages([float(rank + 1)])[0]


def total_of(pool: RankPool, ranks: int) -> list[int]:
    found = pool.run(total, ranks, (ranks,), timeout=60)
    assert [value for _, value in found] == [ranks * (ranks + 1) / 2] * ranks
    return [pid for pid, _ in found]


def leave_marks(rank: int) -> None:
    ring.MARK = 5  # type: ignore[attr-defined]
    ring.annotations = None  # type: ignore[attr-defined]
    os.environ["LONGSPAN_MARK"] = "1"
    torch.manual_seed(rank)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.distributed.init_process_group("gloo")
    World(Layout(ranks=3), backend="gloo").__enter__()  # never left


def marks(rank: int) -> tuple[object, ...]:
    names = hasattr(ring, "MARK"), getattr(ring, "annotations", 0) is None, os.environ.get("LONGSPAN_MARK")
    switches = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    return *names, torch.initial_seed(), *switches, torch.distributed.is_initialized()


def test_ranks_stay_and_a_call_sees_nothing_of_the_call_before_it(pool: RankPool) -> None:
    first = total_of(pool, 3)
    assert total_of(pool, 3) == first and total_of(pool, 2) == first[:2]
    before = pool.run(marks, 3, timeout=60)
    pool.run(leave_marks, 3, timeout=60)
    assert pool.run(marks, 3, timeout=60) == before
    assert total_of(pool, 3) == first


def fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 cannot")


def stay_away(rank: int) -> None:
    if rank == 0:
        with World(Layout(ranks=2), backend="gloo", timeout=1000) as world:
            world.control.barrier("waiting for rank 1")
    else:
        time.sleep(1000)


def leave_what_cannot_be_put_back(rank: int) -> None:
    def refuse() -> None:
        raise RuntimeError("cannot be destroyed")

    torch.distributed.is_initialized = lambda: True  # type: ignore[assignment]
    torch.distributed.destroy_process_group = refuse  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("call", "seconds", "error"),
    [
        (fail, 60, pytest.raises(ValueError, match="rank 1 cannot")),
        (leave_what_cannot_be_put_back, 60, nullcontext()),
        (stay_away, 2, pytest.raises(CommError, match="after 2 seconds")),
    ],
)
def test_new_ranks_answer_after_a_call_that_broke_them(call: Any, seconds: float, error: Any, pool: RankPool) -> None:
    before = total_of(pool, 2)
    with error:
        pool.run(call, 2, timeout=seconds)
    assert {*before}.isdisjoint(total_of(pool, 2))
