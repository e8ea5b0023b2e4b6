"""Ranks that stay: calls see nothing of each other, and a failure costs only the ranks that it broke."""

import os
from collections.abc import Iterator

import pytest
import torch

from longspan import Layout, World
from longspan.comm import rendezvous, ring
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


def leave_what_cannot_be_put_back(rank: int) -> None:
    def refuse() -> None:
        raise RuntimeError("cannot be destroyed")

    torch.distributed.is_initialized = lambda: True  # type: ignore[assignment]
    torch.distributed.destroy_process_group = refuse  # type: ignore[assignment]


def test_new_ranks_answer_after_a_call_that_broke_them(pool: RankPool) -> None:
    before = total_of(pool, 2)
    pool.run(leave_what_cannot_be_put_back, 2, timeout=60)
    assert {*before}.isdisjoint(total_of(pool, 2))
