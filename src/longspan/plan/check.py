"""Checks of what planners and plans have in common: counts, names, communication types, sizes of two levels.

A `check_` raises PlanError that names the value and what would do; `heads_allow_degree` and `replace_argument_names`
raise nothing. What makes a whole plan sound is checked in `plan.py`.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral

from longspan.errors import PlanError

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p", "auto")
MODES = ("lockstep", "free")


class LongDocumentError(PlanError):
    """A document that is longer than the rows of the widest possible group."""


def replace_argument_names(text: str, names: Mapping[str, str]) -> str:
    """Replace arguments of planners in an error's text by the names that its reader gives them, as keys or flags."""
    return re.sub(rf"\b({'|'.join(names)})\b", lambda argument: names[argument[0]], text)


def check_count(name: str, value: object, *, least: int = 1) -> int:
    """Return the value as an int. Raises PlanError, with its `name`, unless it is an integer of at least `least`."""
    if type(value) is int and value >= least:  # the usual case: asking an abstract class takes ten times as long
        return value
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise PlanError(f"{name} is {value!r}; give an integer of at least {least}")
    return int(value)


def check_number(name: str, value: object, *, above_zero: bool = False) -> None:
    """Raise PlanError unless the value is a finite number of at least 0, or, with `above_zero`, above 0. `name` is what
    the error calls it.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        is_large_enough = value > 0 if above_zero else value >= 0
        if is_large_enough:
            return
    raise PlanError(f"{name} is {value!r}; give a finite number {'above 0' if above_zero else 'of at least 0'}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise PlanError if the value is none of the choices. `name` is what the error calls it."""
    if value not in choices:
        raise PlanError(f"{name} is {value!r}; use one of {', '.join(choices)}")


def check_comm_type(name: str, value: object) -> None:
    """Raise PlanError unless the value is a communication type, or a dotted name, which `attend` looks up."""
    if value not in COMM_TYPES and (not isinstance(value, str) or "." not in value):
        raise PlanError(f"{name} is {value!r}; use one of {', '.join(COMM_TYPES)}, or the dotted name of your own")


def check_work_fits_int64(documents: int, longest: int) -> None:
    """Raise PlanError if the squared lengths of so many documents, each at most `longest` rows, might not add up in 63
    bits, in which work is counted.
    """
    limit = (2**63 - 1) // max(1, longest) ** 2
    if documents > limit:
        raise PlanError(
            f"{documents} documents of up to {longest} rows cannot be priced in 64-bit integers; plan at most {limit} "
            f"of that length at once, or cut them"
        )


def check_comm_types(cp_comm_type: str | Sequence[str]) -> tuple[str, ...]:
    """Return the types, one for each layer or one for all. Raises PlanError for an unknown type and an empty list."""
    types = (cp_comm_type,) if isinstance(cp_comm_type, str) else tuple(cp_comm_type)
    if not types:
        raise PlanError("cp_comm_type is an empty list; give one type, or one for each layer")
    for layer, kind in enumerate(types):
        where = "cp_comm_type" if isinstance(cp_comm_type, str) else f"cp_comm_type of layer {layer}"
        check_comm_type(where, kind)
    return types


def check_hierarchical_sizes(sizes: Sequence[int] | None, degree: int) -> None:
    """Raise PlanError if the two sizes, which a2a+p2p needs, are missing or do not multiply to the degree."""
    if sizes is None or len(sizes) != 2:
        raise PlanError(
            f"cp_comm_type a2a+p2p needs hierarchical_context_parallel_sizes=(a2a, p2p) with product {degree}; "
            f"got {sizes if sizes is None else tuple(sizes)}"
        )
    inner, outer = (check_count("a size of hierarchical_context_parallel_sizes", size) for size in sizes)
    if inner * outer != degree:
        fit = ", ".join(f"({a}, {degree // a})" for a in range(1, degree + 1) if degree % a == 0)
        raise PlanError(
            f"hierarchical_context_parallel_sizes ({inner}, {outer}) multiply to {inner * outer}, but the group has cp "
            f"{degree}; use one of {fit}"
        )


def heads_allow_degree(degree: int, heads: int | None, types: Iterable[str], tp: int = 1) -> bool:
    """Return whether a group of this degree can divide the model's query `heads` (None: unknown, so it can).

    Only `a2a`, if it is among the `types`, deals heads to all slots of a group; the `tp` ranks of each slot divide its
    heads once more.
    """
    return heads is None or degree == 1 or "a2a" not in types or heads % (degree * tp) == 0
