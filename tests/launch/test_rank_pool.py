"""Ranks that stay: calls see nothing of each other, and a failure costs only the ranks that it broke."""

import os
from collections.abc import Iterator

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
    """The process, and a sum over ranks in a world of the first ones."""
    with World(Layout(ranks=ranks), backend="gloo") as world:
        return os.getpid(), world.control.sum_over_stages([float(rank + 1)])[0]


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
    return (
        hasattr(ring, "MARK"),
        getattr(ring, "annotations", 0) is None,
        os.environ.get("LONGSPAN_MARK"),
        torch.initial_seed(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.distributed.is_initialized(),
    )


def fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 cannot")


def test_ranks_stay_for_calls_on_all_and_on_some_of_them(pool: RankPool) -> None:
    first, second, some = (pool.run(total, n, (n,), timeout=60) for n in (3, 3, 2))
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert [pid for pid, _ in some] == [pid for pid, _ in first[:2]]
    assert [value for _, value in first + some] == [6.0] * 3 + [3.0] * 2


def known_stores(rank: int) -> int:
    with World(Layout(ranks=3), backend="gloo"):
        return len(rendezvous._stores)


def test_no_store_of_an_earlier_call_is_kept_for_its_port_may_come_again(pool: RankPool) -> None:
    assert [pool.run(known_stores, 3, timeout=60) for _ in range(2)] == [[1] * 3] * 2


def test_a_call_sees_nothing_of_the_call_before_it(pool: RankPool) -> None:
    before = pool.run(marks, 3, timeout=60)
    pool.run(leave_marks, 3, timeout=60)
    assert pool.run(marks, 3, timeout=60) == before
    assert [value for _, value in pool.run(total, 3, (3,), timeout=60)] == [6.0] * 3


def test_a_failure_is_raised_and_new_ranks_answer_the_next_call(pool: RankPool) -> None:
    before = pool.run(total, 3, (3,), timeout=60)
    with pytest.raises(ValueError, match="rank 1 cannot"):
        pool.run(fail, 3, timeout=60)
    after = pool.run(total, 3, (3,), timeout=60)
    assert {pid for pid, _ in before}.isdisjoint(pid for pid, _ in after)
    assert [value for _, value in after] == [6.0] * 3


def leave_what_cannot_be_put_back(rank: int) -> None:
    def refuse() -> None:
        raise RuntimeError("cannot be destroyed")

    torch.distributed.is_initialized = lambda: True  # type: ignore[assignment]
    torch.distributed.destroy_process_group = refuse  # type: ignore[assignment]


def test_ranks_that_cannot_put_back_what_a_call_changed_are_replaced(pool: RankPool) -> None:
    before = pool.run(total, 2, (2,), timeout=60)
    pool.run(leave_what_cannot_be_put_back, 2, timeout=60)
    after = pool.run(total, 2, (2,), timeout=60)
    assert {pid for pid, _ in before}.isdisjoint(pid for pid, _ in after) and after[0][1] == 3.0


def stay_away(rank: int) -> None:
    if rank == 0:
        with World(Layout(ranks=2), backend="gloo", timeout=1000) as world:
            world.control.barrier("waiting for rank 1")
    else:
        import time

        time.sleep(1000)


def test_a_call_that_takes_too_long_ends_its_ranks(pool: RankPool) -> None:
    with pytest.raises(CommError, match="after 3 seconds"):
        pool.run(stay_away, 2, timeout=3)
    assert [value for _, value in pool.run(total, 2, (2,), timeout=60)] == [3.0] * 2
