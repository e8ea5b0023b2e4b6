"""Work on the host that one rank does for all, or all do at once, so that a failure on any becomes every rank's error.

Host objects only, over the world's control group. The work itself may take longer than the world's time-out, as reading
and writing many gigabytes does: the ranks wait for each other as long as each of them still answers (`patience`). It
must not communicate.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from longspan.comm import World, patience
from longspan.errors import LongspanError
from longspan.train.disk import os_error_text

Result = TypeVar("Result")
LogLine = Callable[[str], None]


def is_first_rank(world: World) -> bool:
    """Whether this rank is the one that writes and prints."""
    return world.rank == world.home.ranks[0]


def on_every_rank(world: World, work: Callable[[], Result], os_error_as: type[LongspanError]) -> Result:
    """This rank's result of `work`. Where one rank failed, all raise its error (an OSError as `os_error_as`)."""
    with patience(world):
        result, error = result_or_error(work, os_error_as)
    raise_first_error(world, error)
    return result


def raise_first_error(world: World, error: LongspanError | None) -> None:
    """Raise the error of the first rank that has one, on every rank; entered by all."""
    for rank, theirs in zip(world.home.ranks, world.control.gather_objects(error), strict=True):
        if theirs is not None:
            where = "" if rank == world.home.ranks[0] else f" (on rank {rank})"
            raise type(theirs)(f"{theirs}{where}")


def on_first_rank(world: World, work: Callable[[], Result], os_error_as: type[LongspanError]) -> Result:
    """The first rank's result of `work`, on every rank; its error is raised on every rank."""
    with patience(world):
        answer: Any = result_or_error(work, os_error_as) if is_first_rank(world) else None
    result, error = world.control.broadcast_object(answer)
    if error is not None:
        raise error
    return result


def result_or_error(work: Callable[[], Any], os_error_as: type[LongspanError]) -> tuple[Any, LongspanError | None]:
    """The result of `work`, or what it failed with, to tell the others (an OSError as `os_error_as`)."""
    try:
        return work(), None
    except LongspanError as error:
        return None, error
    except OSError as error:
        return None, os_error_as(os_error_text(error))
