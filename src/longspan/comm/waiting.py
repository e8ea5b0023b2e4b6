"""Waiting for ranks that work on the host for longer than the time-out of collectives, as on a disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from longspan.comm.world import World

_BEAT = 10.0  # seconds between two signs of life, at most


@contextmanager
def patience(world: World) -> Iterator[None]:
    """All ranks leave together, however long each takes inside; entered by all ranks, which do not communicate inside.

    Another thread says meanwhile that this rank still works, so that the time-out bounds how long a rank may be silent
    and not how long it works. Raises CommError for a rank that is lost.
    """
    ended, failures = Event(), list[BaseException]()

    def beat() -> None:
        try:
            while world.control.any_rank(not ended.wait(min(_BEAT, world.timeout / 4))):
                pass
        except BaseException as error:  # raised where the others are waited for
            failures.append(error)

    thread = Thread(target=beat, name="longspan-patience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if failures:
        raise failures[0]
