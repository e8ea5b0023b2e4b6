"""Work on the host that one rank does for all, or all do at once, so that a failure on any becomes every rank's error.

Host objects only, over the world's control group. The work itself may take longer than the world's time-out, as reading
and writing many gigabytes does: the ranks wait for each other as long as each of them still answers (`patience`). It
must not communicate.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from longspan.comm import World, on_all_ranks, patience, result_or_first_error
from longspan.errors import LongspanError
from longspan.files import os_error_text

Result = TypeVar("Result")
LogLine = Callable[[str], None]


def is_first_rank(world: World) -> bool:
    """Whether this rank is the one that writes and prints."""
    return world.rank == world.home.ranks[0]


def on_every_rank(world: World, work: Callable[[], Result], os_error_as: type[LongspanError]) -> Result:
    """This rank's result of `work`. Where one rank failed, all raise its error (an OSError as `os_error_as`)."""
    return result_or_first_error(world, work, partial(_told, os_error_as=os_error_as))


def on_first_rank(world: World, work: Callable[[], Result], os_error_as: type[LongspanError]) -> Result:
    """The first rank's result of `work`, on every rank; its error is raised on every rank."""
    with patience(world):
        answer: Any = result_or_error(work, os_error_as) if is_first_rank(world) else None
    result, error = world.control.broadcast_object(answer)
    if error is not None:
        raise on_all_ranks(error)
    return result


def result_or_error(work: Callable[[], Any], os_error_as: type[LongspanError]) -> tuple[Any, LongspanError | None]:
    """The result of `work`, or what it failed with, to tell the others (an OSError as `os_error_as`)."""
    try:
        return work(), None
    except (LongspanError, OSError) as error:
        return None, _told(error, os_error_as)


def _told(error: Exception, os_error_as: type[LongspanError]) -> LongspanError:
    """What the other ranks are told of an error. One that is nobody's mistake is raised here, alone."""
    if isinstance(error, OSError):
        return os_error_as(os_error_text(error))
    if isinstance(error, LongspanError):
        return error
    raise error
