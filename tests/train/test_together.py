"""What one rank does for all, and what all do at once: the same result, or the same error, everywhere."""

import pytest

from longspan import Layout, World
from longspan.errors import CheckpointError, DataError
from longspan.testing import backend, run_ranks
from longspan.train.together import Say, first_does, first_does_slowly, together


def rank_outcomes(rank: int) -> list[object]:
    """Results and errors of each function, with a failure on one rank or another."""
    found: list[object] = []

    def failing(where: int) -> int:
        if rank == where:
            raise OSError(28, "No space left on device", "file.bin")
        return rank

    def slow(alive: Say, *, fail: bool) -> None:
        for _ in range(3):
            alive("still at it")
        if fail:
            raise DataError("line 7 is bad")

    with World(Layout(3), backend=backend(), timeout=30) as world:
        said: list[str] = []
        found.append(together(world, lambda: failing(-1), refuse=DataError))
        found.append(first_does(world, lambda: f"from {rank}", refuse=DataError))
        first_does_slowly(world, lambda alive: slow(alive, fail=False), said.append, refuse=DataError)
        found.append(len(said) == (3 if rank == 0 else 0))
        with pytest.raises(CheckpointError) as error:
            together(world, lambda: failing(1), refuse=CheckpointError)
        found.append(str(error.value))
        with pytest.raises(DataError) as other:
            first_does(world, lambda: failing(0), refuse=DataError)
        found.append(str(other.value))
        with pytest.raises(DataError) as last:
            first_does_slowly(world, lambda alive: slow(alive, fail=True), said.append, refuse=DataError)
        found.append(str(last.value))
    return found


def test_every_rank_gets_the_same_results_and_errors() -> None:
    lack = "file.bin: No space left on device"
    wanted = [[0, 1, 2], "from 0", True, f"{lack} (on rank 1)", lack, "line 7 is bad"]
    assert run_ranks(rank_outcomes, 3) == [wanted] * 3
