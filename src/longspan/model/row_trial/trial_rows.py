"""The rows of a model's trial: the same ones beside others, and in another number and order.

Every slot has a few documents of its own, which the shard says as in any step; a row is known by its number, and every
second one, at random, is compared. What stands beside it, how many rows there are, where it is among them and how long
the longest document is must not matter to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from longspan.comm import World, bind, to_device
from longspan.layout.segments import Integers
from longspan.model.seams.call_rules import PositionTable
from longspan.model.seams.rows_alone import RowsAlone
from longspan.plan import Group, MicroBatch

_LENGTHS = (19, 1, 9, 3, 13, 5, 11, 2, 8)  # 71 rows, and 29 of the documents `_FEWER`: no width of a model is so many
_ALL, _FEWER = (0, 1, 2, 3, 4, 5, 6, 7, 8), (8, 5, 4, 1, 7)
_SEED = 29  # by which the first and the last of the fewer rows are compared
COUNT = sum(_LENGTHS)  # of the numbers of rows, for each part


@dataclass(frozen=True, eq=False)
class TrialRows:
    """The rows of one pass: `numbers` (T,) of rows in their order, and the `shard` in which they see themselves alone.

    With `others`, rows that are not compared have other tokens than without. `parts` is how many equal parts of the
    rows tensor-parallel ranks hold under sequence parallelism, `part` the one that is here.
    """

    numbers: Integers
    shard: RowsAlone
    others: bool
    parts: int
    part: int

    def numbers_of(self, rows: int) -> Integers | None:
        """The numbers of a tensor's rows, which are all or this rank's part of them; None for another size."""
        if rows == len(self.numbers):
            return self.numbers
        return self.numbers.reshape(self.parts, -1)[self.part] if rows * self.parts == len(self.numbers) else None

    def choose(self, values: Tensor) -> Tensor:
        """Of values (2, numbers, …) those of these rows (T, …): the second ones of rows that are others."""
        others = (~is_compared(self.numbers) & self.others).astype(np.int64)
        return values[to_device(others, values.device), to_device(self.numbers, values.device)]


def is_compared(numbers: Integers) -> Integers:
    """Which rows are compared, by their numbers."""
    return np.random.default_rng(_SEED).random(numbers.max(initial=0) + 1)[numbers] < 0.5


def rows_beside_others(world: World, parts: int, table: PositionTable | None) -> tuple[TrialRows, TrialRows, TrialRows]:
    """The rows of a pass; the same ones beside others; and some of them, in another order, beside others."""
    longest = max(_LENGTHS) if table is None else table.positions
    lengths = [min(length, longest) for length in _LENGTHS]
    return (
        _rows(world, parts, lengths, _ALL, others=False),
        _rows(world, parts, lengths, _ALL, others=True),
        _rows(world, parts, lengths, _FEWER, others=True),
    )


def _rows(world: World, parts: int, lengths: Sequence[int], documents: Sequence[int], *, others: bool) -> TrialRows:
    starts = np.cumsum([0, *lengths])
    of_part = np.concatenate([np.arange(starts[d], starts[d + 1]) for d in documents])
    numbers = np.concatenate([part * COUNT + of_part for part in range(parts)])
    rows = tuple(lengths[d] for d in documents) * parts
    groups = tuple(
        Group((slot,), tuple(range(slot * len(rows), (slot + 1) * len(rows))), rows) for slot in range(world.home.slots)
    )
    shard = RowsAlone.of(bind(MicroBatch(groups), world).with_spans({}))
    return TrialRows(numbers, shard, others, parts, world.coordinates.tp if parts > 1 else 0)
