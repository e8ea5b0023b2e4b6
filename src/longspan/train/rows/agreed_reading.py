"""Reading that fails on every rank where it fails on one, with a digest that all ranks compare in the same message."""

from collections.abc import Callable
from hashlib import sha256
from typing import TypeVar

from longspan.comm import World, raise_first_error
from longspan.errors import DataError, LongspanError

T = TypeVar("T")


def text_digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def reading_error(error: Exception, world: World) -> LongspanError:
    message = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    rank_error = DataError(f"rank {world.rank} could not read its rows: {message}")
    rank_error.__cause__ = error
    return rank_error


def read_and_compare_digest(
    read: Callable[[], T],
    digest: str,
    world: World,
    make_error: Callable[[Exception, World], LongspanError] = reading_error,
    **names: str,
) -> T:
    """Read, and compare a digest over all ranks; where any rank cannot read, every rank raises that rank's error."""
    result = None
    failure = None
    try:
        result = read()
    except Exception as error:  # a corpus, or sets, may raise anything: the other ranks must learn of it
        failure = make_error(error, world)
    (failed,) = world.control.compare_digests(digest, failure is not None, **names)
    if failed:
        raise_first_error(world, failure)
    return result  # pyright: ignore[reportReturnType]
