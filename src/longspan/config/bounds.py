"""What values of keys may be: their bounds, and what stands for one that was not given. Decides nothing; no torch."""

from dataclasses import dataclass
from typing import Annotated, get_type_hints

AUTO = "auto"  # for context.max_tokens_per_slot, data.eval_documents and model.compute_dtype
NOT_GIVEN = -1  # of a number whose default depends on other keys; of a word it is ""


@dataclass(frozen=True)
class AtLeast:
    """The smallest value that a key may have; `config_check.py` refuses smaller ones."""

    value: int


@dataclass(frozen=True)
class Above:
    """A number that a key must exceed."""

    value: int


PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, Above(0)]
NonNegativeFloat = Annotated[float, AtLeast(0)]


def bounds_of(kind: type) -> dict[str, AtLeast | Above]:
    """The bound of every key of a section that has one."""
    return {
        key: bound
        for key, hint in get_type_hints(kind, include_extras=True).items()
        for bound in getattr(hint, "__metadata__", ())
    }
