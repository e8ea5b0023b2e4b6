"""A few rows of a table in which every two values of two axes meet: what a suite runs of a table that takes hours."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

Values = tuple[Any, ...]


def every_pair(
    axes: Sequence[Sequence[Any]], seed: int, fits: Callable[[Values], bool] = lambda values: True
) -> list[Values]:
    """Rows, one value of each axis, chosen greedily among drawn ones; without pairs that no row that fits has."""
    draw, combinations = random.Random(seed), list[Values]()
    ends = itertools.combinations(range(len(axes)), 2)
    missing = {
        ((i, a), (j, b)) for i, j in ends for a in axes[i] for b in axes[j] if _is_there(axes, {i: a, j: b}, fits)
    }
    while missing:
        first, second = min(missing, key=str)  # the same on every host: sets of strings have no order
        drawn = [drawn_row(draw, axes, dict((first, second)), fits) for _ in range(40)]
        combinations.append(max(drawn, key=lambda values: len(missing & pairs_of(values))))
        missing -= pairs_of(combinations[-1])
    return combinations


def drawn_row(
    draw: random.Random,
    axes: Sequence[Sequence[Any]],
    fixed: dict[int, Any],
    fits: Callable[[Values], bool] = lambda values: True,
) -> Values:
    while True:
        values = tuple(fixed[i] if i in fixed else draw.choice(axis) for i, axis in enumerate(axes))
        if fits(values):
            return values


def pairs_of(values: Values) -> set[Any]:
    return set(itertools.combinations(enumerate(values), 2))


def _is_there(axes: Sequence[Sequence[Any]], fixed: dict[int, Any], fits: Callable[[Values], bool]) -> bool:
    rows = itertools.product(*([fixed[i]] if i in fixed else axis for i, axis in enumerate(axes)))
    return any(fits(row) for row in rows)
