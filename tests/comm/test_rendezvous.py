"""Worlds that ranks open through a store that outlives them, as torchrun's does when it starts them again."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, PrefixStore

from longspan.comm.rendezvous import Place, wait_for_all_ranks
from longspan.errors import CommError

Attempt = tuple[int, tuple[int, ...]]  # the ranks of a launch, and those that come


def open_worlds(store: HashStore, size: int, ranks: tuple[int, ...]) -> list[str]:
    """What each of these ranks opens; "" where it raised, which it must within the time."""

    def open_world(rank: int) -> str:
        try:
            return wait_for_all_ranks(store, Place(rank, size, rank, "", f"node {rank}"), 5.0 if whole else 0.3)
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
        [(3, (0, 2)), (3, (1,)), (2, (1,)), (2, (1, 0)), (3, (0, 2, 1))],
        [(1, (0,)), (2, (1, 0)), (1, (0,))],
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
    """Ranks killed while they wait leave nothing but their keys; those of the next launch open another world."""
    store = HashStore()
    store.set("longspan/newest", "longspan/world 1")
    store.add("longspan/worlds", 1)
    dead = PrefixStore("longspan/world 1", store)
    for rank in (1, 3):
        dead.add(f"joined/{rank}", 1)
        dead.add("joined", 1)
    assert open_worlds(store, 4, (1, 2, 3, 0)) == ["longspan/world 2"] * 4


def test_a_world_that_is_open_is_not_left_for_the_next() -> None:
    """Rank 0 may have left a world with an error, and have begun the next, before the others see that it was opened."""
    store = HashStore()
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(wait_for_all_ranks, store, Place(1, 2, 1, ""), 5.0)
        first = wait_for_all_ranks(store, Place(0, 2, 0, ""), 5.0)
        with pytest.raises(CommError, match=r"rank\(s\) \(1\) did not come"):
            wait_for_all_ranks(store, Place(0, 2, 0, ""), 0.0)
        assert slow.result() == first
