"""Work on the host that one rank does for all, or all do at once, so that a failure on any becomes every rank's error.

Host objects only, over the world's control group, bounded by its time-out.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from longspan.comm import World
from longspan.errors import LongspanError

Result = TypeVar("Result")
Say = Callable[[str], None]


def is_first(world: World) -> bool:
    """Whether this rank is the one that writes and prints."""
    return world.rank == world.home.ranks[0]


def together(world: World, work: Callable[[], Result], *, refuse: type[LongspanError]) -> list[Result]:
    """Every rank's result of `work`, on every rank. Where one failed, all raise its error (an OSError as `refuse`)."""
    answers = world.gather_objects(_attempt(work, refuse))
    for rank, (_, error) in zip(world.home.ranks, answers, strict=True):
        if error is not None:
            where = "" if rank == world.home.ranks[0] else f" (on rank {rank})"
            raise type(error)(f"{error}{where}")
    return [result for result, _ in answers]


def first_does(world: World, work: Callable[[], Result], *, refuse: type[LongspanError]) -> Result:
    """The first rank's result of `work`, on every rank; its error is raised on every rank."""
    answer: Any = _attempt(work, refuse) if is_first(world) else None
    result, error = world.broadcast_object(answer)
    if error is not None:
        raise error
    return result


def first_does_slowly(world: World, work: Callable[[Say], object], say: Say, *, refuse: type[LongspanError]) -> None:
    """As `first_does`, for work that may outlast the time-out: what it says is also a sign of life to the others."""
    if is_first(world):

        def alive(text: str) -> None:
            say(text)
            world.broadcast_object((True, None))

        _, error = _attempt(lambda: work(alive), refuse)
        world.broadcast_object((False, error))
    else:
        news: Any = (True, None)
        while news[0]:
            news = world.broadcast_object(None)
        error = news[1]
    if error is not None:
        raise error


def _attempt(work: Callable[[], Any], refuse: type[LongspanError]) -> tuple[Any, LongspanError | None]:
    try:
        return work(), None
    except LongspanError as error:
        return None, error
    except OSError as error:
        return None, refuse(f"{error.filename or 'a file'}: {error.strerror or error}")
