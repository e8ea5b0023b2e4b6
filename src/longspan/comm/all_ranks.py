"""Work on the host that one rank does for all, or all do at once, so that a failure on any becomes every rank's error.

Host objects only, over the world's control group. The work may take longer than the world's time-out: the ranks wait
for each other as long as each of them still answers (`leave_together`). It must not communicate.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import Event, Thread
from typing import Any, TypeVar

from longspan.comm.world import World
from longspan.errors import LongspanError
from longspan.files import os_error_text
from longspan.plain_text import LogLine as LogLine

Result = TypeVar("Result")
LongspanErrorKind = TypeVar("LongspanErrorKind", bound=LongspanError)

_BEAT = 10.0  # seconds between two signs of life, at most


@contextmanager
def leave_together(world: World) -> Iterator[None]:
    """Keep every rank in this context until all ranks have done what is inside; all enter, none communicates inside.

    Another thread signals meanwhile that this rank still works: the time-out bounds how long a rank may be silent, not
    how long it works. Raises CommError for a rank that is lost.
    """
    if len(world.home.ranks) == 1:
        yield
        return
    end = Event()
    failures = list[BaseException]()

    def beat() -> None:
        try:  # the flag says that this rank still works; all ranks end when none does
            while world.control.flag_on_any_rank(not end.wait(min(_BEAT, world.watch.timeout / 4))):
                pass
        except BaseException as error:  # raised where the others are waited for
            failures.append(error)

    thread = Thread(target=beat, name="longspan-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
    if failures:
        raise failures[0]


def result_or_first_error(
    world: World, work: Callable[[], Result], error_of: Callable[[Exception], LongspanError]
) -> Result:
    """Return this rank's result of `work`, however long it takes; where a rank failed, all raise the first one's error.

    >>> result_or_first_error(world, read_file, lambda error: DataError(f"the file cannot be read: {error}"))

    Entered by all ranks, which do not communicate in `work`. `error_of` makes the error to raise from that of `work`.
    """
    result = None
    error = None
    with leave_together(world):
        try:
            result = work()
        except Exception as failure:
            error = error_of(failure)
            error.__cause__ = failure if error is not failure else failure.__cause__  # no error causes itself
    raise_first_error(world, error)
    return result  # pyright: ignore[reportReturnType]


def raise_first_error(world: World, error: LongspanError | None) -> None:
    """Raise the error of the first rank that has one, on every rank, with this rank's own as cause; entered by all.

    An error of another rank than the home's first gets the rank's number, unless its text has it. Where no rank has
    one, nothing is raised.
    """
    rank_and_error = world.control.first_object(error, "gather of errors")
    if rank_and_error is not None:
        rank, first_error = rank_and_error
        is_clear = rank == world.home.ranks[0] or re.search(rf"\brank {rank}\b", str(first_error))
        rank_note = "" if is_clear else f" (on rank {rank})"
        raise on_all_ranks(type(first_error)(f"{first_error}{rank_note}")) from error


def on_all_ranks(error: LongspanErrorKind) -> LongspanErrorKind:
    """Mark and return an error that every rank is about to raise at the same place."""
    error.on_all_ranks = True
    return error


def is_first_rank(world: World) -> bool:
    """Whether this is the home's first rank, the one that writes and prints."""
    return world.rank == world.home.ranks[0]


def silence_warnings_of_other_ranks(world: World) -> AbstractContextManager[Any]:
    """Return a context in which only the first rank warns: for work whose warnings are the same on all ranks."""
    if is_first_rank(world):
        return nullcontext()
    return warnings.catch_warnings(action="ignore")


def run_on_every_rank(world: World, work: Callable[[], Result], os_error_as: type[LongspanError]) -> Result:
    """Return this rank's result of `work`. Where one rank failed, all raise its error (an OSError as `os_error_as`)."""
    return result_or_first_error(world, work, partial(_as_shared_error, os_error_as=os_error_as))


def run_on_first_rank(world: World, work: Callable[[], Result], os_error_as: type[LongspanError]) -> Result:
    """Return the first rank's result of `work`, on every rank.

    A LongspanError of `work`, and an OSError as `os_error_as`, is raised on every rank. Any other error is raised on
    the first rank alone, which then leaves: the others raise CommError, as nothing is broadcast to them.
    """
    with leave_together(world):
        answer: Any = result_or_error(work, os_error_as) if is_first_rank(world) else None
    result, error = world.control.broadcast_object(answer)
    if error is not None:
        raise on_all_ranks(error)
    return result


def result_or_error(work: Callable[[], Any], os_error_as: type[LongspanError]) -> tuple[Any, LongspanError | None]:
    """Return (the result of `work`, None), or (None, the error) where it raises a LongspanError or an OSError.

    An OSError is returned as an `os_error_as` with its text. Any other error is raised.
    """
    try:
        return work(), None
    except (LongspanError, OSError) as error:
        return None, _as_shared_error(error, os_error_as)


def _as_shared_error(error: Exception, os_error_as: type[LongspanError]) -> LongspanError:
    """An error of another class is no caller's mistake, and is raised here."""
    if isinstance(error, OSError):
        return os_error_as(os_error_text(error))
    if isinstance(error, LongspanError):
        return error
    raise error
