"""The home of a run: an ordered list of ranks factored into pipeline stages, slots and tensor-parallel ranks.

Weights live in the home. `dp` and `cp` are not properties of it: which slots work together on which documents is
decided per micro-batch, by a plan. Communication groups are made elsewhere (`comm/process_groups.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import NamedTuple, SupportsIndex

import numpy as np

from longspan.errors import LayoutError, plural
from longspan.plain_text import excerpt


class Coordinates(NamedTuple):
    """Where a rank stands in its home: its pipeline stage, slot and tensor-parallel index, each from 0."""

    pp: int
    slot: int
    tp: int


@dataclass(frozen=True, init=False)
class Layout:
    """An ordered list of ranks factored into `pp × slots × tp`, pp slowest and tp fastest.

    A *slot* is one position of the flattened data × context plane: the pp × tp ranks that act as one.

    >>> home = Layout(ranks=8, tp=2)
    >>> home.slots, home.plane(pp=0, tp=1)
    (4, (1, 3, 5, 7))

    `ranks` is a count or a sequence of distinct global ranks; `ep` (expert parallelism) and `dp_replicate` (HSDP) each
    divide the slots. Raises LayoutError, with the sizes that would fit, when the degrees do not.
    """

    ranks: tuple[int, ...]
    pp: int = 1
    tp: int = 1
    ep: int = 1
    dp_replicate: int = 1

    def __init__(
        self, ranks: int | Sequence[int], pp: int = 1, tp: int = 1, ep: int = 1, dp_replicate: int = 1
    ) -> None:
        if isinstance(ranks, Iterable):
            values: tuple[object, ...] = tuple(ranks)
            integers = tuple(rank for rank in map(_as_integer, values) if rank is not None and rank >= 0)
            if not values or len(integers) != len(values) or len(set(integers)) != len(integers):
                raise LayoutError(f"ranks must be distinct integers from 0, at least one; got {excerpt(values)}")
        else:
            count = _as_integer(ranks)
            if count is None or count < 1:
                raise LayoutError(f"ranks is {ranks!r}; give a count of at least 1 or a sequence of distinct ranks")
            integers = tuple(range(count))
        object.__setattr__(self, "ranks", integers)
        for name, value in (("pp", pp), ("tp", tp), ("ep", ep), ("dp_replicate", dp_replicate)):
            object.__setattr__(self, name, check_degree(name, value))
        world = len(self.ranks)
        model = self.pp * self.tp
        if world % model:  # name the multiples next below, unless that is 0, and next above
            fitting = [count for count in (world // model * model, (world // model + 1) * model) if count]
            raise LayoutError(
                f"{plural(world, 'rank')} {'is' if world == 1 else 'are'} not divisible by "
                f"tp {self.tp} x pp {self.pp} = {model}; "
                f"use {' or '.join(map(str, fitting))} ranks, or other degrees"
            )
        for name, degree in (("ep", self.ep), ("dp_replicate", self.dp_replicate)):
            if self.slots % degree:
                fitting = [d for d in range(1, self.slots + 1) if self.slots % d == 0]
                raise LayoutError(
                    f"{name} {degree} does not divide {plural(self.slots, 'slot')} "
                    f"({plural(world, 'rank')} / tp {self.tp} / pp {self.pp}); use one of {fitting}"
                )

    @property
    def slots(self) -> int:
        """Number of slots: positions of the flattened data × context plane."""
        return len(self.ranks) // (self.pp * self.tp)

    def rank_at(self, slot: int, *, pp: int = 0, tp: int = 0) -> int:
        """Return the global rank that stands at these coordinates. Raises LayoutError for one outside the layout."""
        for name, place, size in (("slot", slot, self.slots), ("pp", pp, self.pp), ("tp", tp, self.tp)):
            if not 0 <= place < size:
                raise LayoutError(f"{name} {place} is outside the home, which has {size} ({name} 0 to {size - 1})")
        return self.ranks[(pp * self.slots + slot) * self.tp + tp]

    def coordinates(self, rank: int) -> Coordinates:
        """Return where a global rank stands. Raises LayoutError for one that is not in `ranks`."""
        if rank not in self._index:
            raise LayoutError(f"rank {rank} is not in this home of {len(self.ranks)} ranks: {excerpt(self.ranks)}")
        outer, tp = divmod(self._index[rank], self.tp)
        pp, slot = divmod(outer, self.slots)
        return Coordinates(pp, slot, tp)

    def plane(self, *, pp: int = 0, tp: int = 0) -> tuple[int, ...]:
        """Return the ranks of all slots at one pipeline stage and tensor-parallel position, in slot order."""
        return tuple(self.rank_at(slot, pp=pp, tp=tp) for slot in range(self.slots))

    def planes(self) -> tuple[tuple[int, ...], ...]:
        """Return every plane, pp slowest: together they hold each rank once."""
        return self._groups(0, 2, 1)

    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the tensor-parallel groups, pp slowest."""
        return self._groups(0, 1, 2)

    def pp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the pipelines: the ranks of all stages at one slot and tensor-parallel position."""
        return self._groups(1, 2, 0)

    def _groups(self, *axes: int) -> tuple[tuple[int, ...], ...]:
        """`axes` are those of `pp × slots × tp`, the slowest first; a group lies along the last."""
        grid = np.reshape(self.ranks, (self.pp, self.slots, self.tp)).transpose(axes)
        return tuple(map(tuple, grid.reshape(-1, grid.shape[-1]).tolist()))

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}


def check_degree(name: str, value: object) -> int:
    """Return a degree or count as a Python integer of at least 1. Raises LayoutError, which calls it `name`, for
    anything else.
    """
    degree = _as_integer(value)
    if degree is None or degree < 1:
        raise LayoutError(f"{name} is {value!r}; {name} is an integer of at least 1")
    return degree


def _as_integer(value: object) -> int | None:
    """None for anything but an integer, bools and floats included."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return index(value)
    except TypeError:  # a numpy array has `__index__` too, and refuses here unless it is one integer
        return None
