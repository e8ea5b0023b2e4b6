"""What one rank does for all, and what all do at once: the same result, or the same error, everywhere."""

import time

import pytest

from longspan import Layout, World
from longspan.comm import leave_together
from longspan.comm.all_ranks import run_on_every_rank, run_on_first_rank
from longspan.errors import CheckpointError, DataError
from longspan.testing import backend, run_ranks


def rank_outcomes(rank: int) -> list[object]:
    """Results and errors of each function, with a failure on one rank or another."""
    results: list[object] = []

    def failing(where: int) -> int:
        if rank == where:
            raise OSError(5, "Input/output error", "file.bin")
        return rank

    with World(Layout(3), backend=backend(), timeout=30) as world:
        results.append(run_on_every_rank(world, lambda: failing(-1), DataError))
        results.append(run_on_first_rank(world, lambda: f"from {rank}", DataError))
        with pytest.raises(CheckpointError) as error:
            run_on_every_rank(world, lambda: failing(1), CheckpointError)
        results.append(str(error.value))
        with pytest.raises(DataError) as other:
            run_on_first_rank(world, lambda: failing(0), DataError)
        results.append(str(other.value))
    return results


def test_every_rank_gets_the_same_results_and_errors() -> None:
    lack = "file.bin: Input/output error"
    expected = ["from 0", f"{lack} (on rank 1)", lack]
    assert run_ranks(rank_outcomes, 3) == [[rank, *expected] for rank in range(3)]


TIMEOUT = 3.0


def slow_work(rank: int) -> int:
    """Work of one rank that takes longer than the time-out of collectives."""
    with World(Layout(2), backend=backend(), timeout=TIMEOUT) as world:
        run_on_every_rank(world, lambda: time.sleep(1.3 * TIMEOUT * rank), DataError)
        with pytest.raises(KeyError), leave_together(world):
            raise KeyError(rank)
        return run_on_first_rank(world, lambda: rank + 1, DataError)


def test_work_may_take_longer_than_the_time_out() -> None:
    assert run_ranks(slow_work, 2) == [1, 1]
