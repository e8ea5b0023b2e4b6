"""Reading that fails on every rank where it fails on one, with a digest that all ranks compare in the same message."""

from collections.abc import Callable
from hashlib import sha256
from typing import TypeVar

from longspan.comm import World, raise_first_error
from longspan.errors import DataError, LongspanError

T = TypeVar("T")


def text_digest(text: str) -> str:
    """Return the SHA-256 of a text, in hexadecimal, which ranks compare in place of the text."""
    return sha256(text.encode()).hexdigest()


def reading_error(error: Exception, world: World) -> LongspanError:
    """Return the DataError by which all ranks learn that this one could not read, with the error's notes."""
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
    """Call `read` and return its result, once all ranks could read and have the same digest; entered by all ranks.

    Where any rank cannot read, every rank raises that rank's error, as `make_error` words it. Raises CommError for
    another digest; `names` are the words `what` and `hint` of that error.
    """
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
