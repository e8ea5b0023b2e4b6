"""Work on the host that one rank does for all, or all do at once, so that a failure on any becomes every rank's error.

Host objects only, over the world's control group. The work itself may take longer than the world's time-out, as reading
and writing many gigabytes does: the ranks wait for each other as long as each of them still answers (`patience`). It
must not communicate.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from longspan.comm import World, patience
from longspan.errors import LongspanError
from longspan.train.disk import reason

Result = TypeVar("Result")
LogLine = Callable[[str], None]


def is_first(world: World) -> bool:
    """Whether this rank is the one that writes and prints."""
    return world.rank == world.home.ranks[0]


def together(world: World, work: Callable[[], Result], *, refuse: type[LongspanError]) -> Result:
    """This rank's result of `work`. Where one rank failed, all raise its error (an OSError as `refuse`)."""
    with patience(world):
        result, error = attempt(work, refuse)
    raise_any(world, error)
    return result


def raise_any(world: World, error: LongspanError | None) -> None:
    """Raise the error of the first rank that has one, on every rank; entered by all."""
    for rank, theirs in zip(world.home.ranks, world.gather_objects(error), strict=True):
        if theirs is not None:
            where = "" if rank == world.home.ranks[0] else f" (on rank {rank})"
            raise type(theirs)(f"{theirs}{where}")


def first_does(world: World, work: Callable[[], Result], *, refuse: type[LongspanError]) -> Result:
    """The first rank's result of `work`, on every rank; its error is raised on every rank."""
    with patience(world):
        answer: Any = attempt(work, refuse) if is_first(world) else None
    result, error = world.broadcast_object(answer)
    if error is not None:
        raise error
    return result


def attempt(work: Callable[[], Any], refuse: type[LongspanError]) -> tuple[Any, LongspanError | None]:
    """The result of `work`, or what it failed with, to tell the others (an OSError as `refuse`)."""
    try:
        return work(), None
    except LongspanError as error:
        return None, error
    except OSError as error:
        return None, refuse(reason(error))
