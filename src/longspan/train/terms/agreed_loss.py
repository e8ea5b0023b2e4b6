"""What ranks agree on of a step's loss before it runs: its kind and arguments, and the divisor of its sum."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from longspan.comm import World
from longspan.errors import LongspanError, LossError
from longspan.plain_text import short_text
from longspan.train.rows.agreed_reading import read_and_compare_digest, text_digest

AnyLoss = TypeVar("AnyLoss")
_HINT = "Give every rank the same sets and divisor=, and all of them a loss= of the same kind, or none"


def agree_on_loss(
    make: Callable[[], tuple[AnyLoss, float, object]], divisor: float | None, world: World
) -> tuple[AnyLoss, float]:
    """Make a step's loss, and return it with its divisor; entered by all ranks.

    `make` may fail on any rank: it returns the loss, the divisor where none is given, and what of its arguments is to
    be the same on all ranks. Raises its error, or LossError for a divisor that is none, on every rank, and CommError
    where ranks have different losses, or some have none.
    """

    def make_and_describe() -> tuple[AnyLoss, float, str]:
        loss, default, compared = make()
        used_divisor = default if divisor is None else _check_divisor(divisor)
        return loss, used_divisor, f"{type(loss).__name__} {used_divisor} {compared}"

    names = {"what": "losses, sets or divisors", "hint": _HINT}
    # This digest is the same on all ranks with a loss; a rank without one comes with another to the collective.
    loss, used_divisor, text = read_and_compare_digest(
        make_and_describe, text_digest("a loss or a divisor"), world, to_loss_error, **names
    )
    world.control.compare_digests(text_digest(text), **names)
    return loss, used_divisor


def to_loss_error(error: Exception, world: World) -> LongspanError:
    """Return an error of a loss on this rank as a LossError; a LongspanError stays itself."""
    if isinstance(error, LongspanError):
        return error
    loss_error = LossError(f"the loss failed on rank {world.rank}: {type(error).__name__}: {error}")
    loss_error.__cause__ = error
    return loss_error


def _check_divisor(divisor: Any) -> float:
    is_one = isinstance(divisor, Tensor | np.ndarray) and math.prod(divisor.shape) == 1
    number = divisor.item() if is_one else divisor
    if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number) or number <= 0:
        raise LossError(
            f"divisor is {short_text(divisor)}; give a positive number, the same on every rank: the number of "
            "documents, or of targets, or of prompts"
        )
    return float(number)
