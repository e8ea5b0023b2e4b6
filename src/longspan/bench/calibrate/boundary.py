"""Which ranks share a host, by the seconds of short messages between pairs of them; and whether the launcher agrees.

Plans take slots 0, 1, … of a host to be the first ranks, so a launcher that numbers ranks otherwise makes them wrong.
Not every pair is measured: a few pivots exchange messages with all others, which finds the host of each pivot.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from longspan.errors import CommError
from longspan.layout.layout import excerpt

PIVOTS = 8  # at most: O(ranks) messages
GAP = 2.0  # near and far messages differ at least by this factor
NAMED = 4  # hosts named in a message
TRIES = 4  # of finding the launcher's hosts

Seconds = Mapping[int, float]  # of a message between a pivot and each other rank


@dataclass(frozen=True)
class Boundary:
    """The hosts of the pivots as measured (empty: messages do not tell), and the ranks that no pivot is near to."""

    hosts: tuple[tuple[int, ...], ...]
    others: tuple[int, ...] = ()


def measure_boundary(ranks: int, measure: Callable[[int], Seconds], pivots: int = PIVOTS) -> Boundary:
    """Find the hosts of up to `pivots` ranks by how long the messages of each to all other ranks take.

    `measure(pivot)` gives the seconds of a pivot's messages, the same on every rank. The second pivot is the rank that
    is farthest from the first, and so on another host if there are several; each later one is the first rank
    without a host.
    """
    if ranks < 2:
        return Boundary(())
    measured = {0: measure(0)}
    farthest = max(measured[0], key=lambda rank: measured[0][rank])
    measured[farthest] = measure(farthest)
    boundary = cluster_ranks(ranks, measured)
    while boundary.hosts and boundary.others and len(measured) < pivots:
        pivot = boundary.others[0]
        measured[pivot] = measure(pivot)
        boundary = cluster_ranks(ranks, measured)
    return boundary


def measure_steady_boundary(ranks: int, node_size: int, measure: Callable[[int], Seconds]) -> Boundary:
    """Find the hosts as `measure_boundary` does, again if they are not the launcher's: `TRIES` times at most.

    The fastest message between two ranks counts: on busy hosts a rank may be slow for a while.
    """
    fastest: dict[tuple[int, int], float] = {}

    def measure_again(pivot: int) -> Seconds:
        """Measure from a pivot once more, and return the fastest seconds so far to each other rank."""
        for rank, seconds in measure(pivot).items():
            pair = (min(pivot, rank), max(pivot, rank))
            fastest[pair] = min(seconds, fastest.get(pair, seconds))
        return {rank: fastest[min(pivot, rank), max(pivot, rank)] for rank in range(ranks) if rank != pivot}

    boundary = Boundary(())
    for _ in range(TRIES):
        boundary = measure_boundary(ranks, measure_again)
        if boundary.hosts and not contradicts_launcher(boundary, ranks, node_size):
            break
    return boundary


def cluster_ranks(ranks: int, measured: Mapping[int, Seconds]) -> Boundary:
    """Find the hosts that the messages of pivots show: each pivot's is the pivot and the ranks near it.

    >>> near, far = 2e-5, 3e-4
    >>> cluster_ranks(4, {0: {1: far, 2: near, 3: far}, 1: {0: far, 2: far, 3: near}})
    Boundary(hosts=((0, 2), (1, 3)), others=())

    Near and far are told apart by the widest gap between all seconds. Where that is less than `GAP`, or where the hosts
    of two pivots overlap in part, there are no hosts in the result.
    """
    limit = _near_limit(seconds for of_pivot in measured.values() for seconds in of_pivot.values())
    if limit is None:
        return Boundary(())
    hosts: list[tuple[int, ...]] = []
    for pivot, seconds in measured.items():
        host = tuple(sorted([pivot, *(rank for rank, time in seconds.items() if time < limit)]))
        if host not in hosts:
            hosts.append(host)
    placed = [rank for host in hosts for rank in host]
    if len(set(placed)) != len(placed):
        return Boundary(())
    return Boundary(tuple(sorted(hosts)), tuple(rank for rank in range(ranks) if rank not in set(placed)))


def _near_limit(seconds: Iterable[float]) -> float | None:
    """Return the seconds that messages between near ranks stay below, and those between far ranks do not.

    Of all times in ascending order, it is the geometric mean of the two neighbours with the largest ratio. None if that
    ratio is less than GAP, as between ranks of one host.
    """
    steps = [(longer / shorter, math.sqrt(shorter * longer)) for shorter, longer in pairwise(sorted(seconds))]
    largest_ratio, limit = max(steps, default=(1.0, 0.0))
    return limit if largest_ratio >= GAP else None


def launcher_hosts(ranks: int, node_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host as plans take them: `node_size` neighbours, fewer on the last host."""
    return tuple(tuple(range(first, min(first + node_size, ranks))) for first in range(0, ranks, node_size))


def contradicts_launcher(boundary: Boundary, ranks: int, node_size: int) -> bool:
    """Return whether some measured host is not one of the launcher's; of those without a pivot nothing is known."""
    return not set(boundary.hosts) <= set(launcher_hosts(ranks, node_size))


def check_boundary(boundary: Boundary, ranks: int, node_size: int) -> str:
    """Compare measured hosts with the launcher's; returns a line about them. Raises CommError where they differ."""
    launched = launcher_hosts(ranks, node_size)
    hosts = f"{len(launched)} of {node_size} ranks" if len(launched) > 1 else f"1 of {ranks} ranks"
    if not boundary.hosts:
        reason = "messages between ranks take about the same time" if ranks > 1 else "there is one rank"
        return f"hosts: {hosts}, as the launcher counts them; {reason}, so they were not told apart by it"
    if contradicts_launcher(boundary, ranks, node_size):
        raise CommError(
            f"messages are short between ranks {_hosts_text(boundary.hosts)}, and the launcher has hosts of ranks "
            f"{_hosts_text(launched)} (LOCAL_WORLD_SIZE {node_size}), which plans take to be the fast groups; start "
            "the ranks so that they are numbered host by host, with LOCAL_WORLD_SIZE as it is"
        )
    return f"hosts: {hosts}, by messages between ranks and by the launcher"


def _hosts_text(hosts: tuple[tuple[int, ...], ...]) -> str:
    """Return the first hosts, each as its ranks."""
    more = f" and {len(hosts) - NAMED} more" if len(hosts) > NAMED else ""
    return ", ".join(map(excerpt, hosts[:NAMED])) + more
