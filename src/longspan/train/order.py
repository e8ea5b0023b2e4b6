"""Which documents a step trains on: a function of the seed and the step, of nothing else.

World size, degrees and planner do not enter, so a run goes on with the same documents wherever it is resumed.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from longspan.errors import DataError

_HELD_OUT, _EPOCH = 0, 1  # which of the seed's streams


class StepOrder:
    """Shuffled epochs of the training documents, taken whole, up to `tokens_per_step` a step and at least one.

    >>> order = StepOrder([5, 3, 9, 4, 2], tokens_per_step=8, seed=0, eval_documents=1)
    >>> sorted([*order.evaluation, *order.training])
    [0, 1, 2, 3, 4]

    `evaluation` are the held-out documents, chosen by the seed before anything else and never trained on.
    A step may reach into the next epoch. Raises DataError where no document is left to train on.
    """

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, *, tokens_per_step: int, seed: int, eval_documents: int
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        if eval_documents >= len(self.lengths):
            raise DataError(
                f"data.eval_documents {eval_documents} leaves nothing to train on: the corpus has "
                f"{len(self.lengths)} documents; hold out at most {max(0, len(self.lengths) - 1)}"
            )
        shuffled = _shuffled(len(self.lengths), seed, _HELD_OUT)
        self.evaluation: tuple[int, ...] = tuple(sorted(shuffled[:eval_documents].tolist()))
        self.training: tuple[int, ...] = tuple(sorted(shuffled[eval_documents:].tolist()))
        self._budget, self._seed = tokens_per_step, seed
        self._starts = [0]  # of every step so far, in the endless stream of epochs
        self._epoch = lru_cache(maxsize=2)(self._shuffled_epoch)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_epoch"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._epoch = lru_cache(maxsize=2)(self._shuffled_epoch)

    def documents_of_step(self, step: int) -> tuple[int, ...]:
        """Document ids of a step, counted from 0."""
        while len(self._starts) < step + 2:
            self._starts.append(self._end(self._starts[-1]))
        size = len(self.training)
        positions = range(self._starts[step], self._starts[step + 1])
        return tuple(self._epoch(p // size)[0][p % size] for p in positions)

    def _end(self, start: int) -> int:
        """Where the step that begins at a stream position ends: as many documents as fit, at least one."""
        size, left, position = len(self.training), self._budget, start
        while True:
            epoch, index = divmod(position, size)
            ends = self._epoch(epoch)[1]  # ends[i] tokens of the first i documents
            fits = bisect_right(ends, ends[index] + left, lo=index) - 1
            left -= ends[fits] - ends[index]
            position += fits - index
            if fits < size:
                return max(position, start + 1)

    def _shuffled_epoch(self, epoch: int) -> tuple[list[int], list[int]]:
        """Document ids in the epoch's order, and how many tokens stand before each place."""
        order = np.asarray(self.training)[_shuffled(len(self.training), self._seed, _EPOCH, epoch)]
        return order.tolist(), [0, *np.cumsum(self.lengths[order]).tolist()]


def _shuffled(count: int, *seed: int) -> np.ndarray:
    """A permutation from the raw bits of the generator, which numpy keeps the same in every version."""
    return np.argsort(np.random.PCG64(list(seed)).random_raw(count), kind="stable")
