"""Which documents a step trains on: a function of the seed and the step, of nothing else.

World size, degrees and planner do not enter, so a run goes on with the same documents wherever it is resumed.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from longspan.errors import DataError

_HELD_OUT, _EPOCH, _EVAL_SET = 0, 1, 2  # which of the seed's streams


class StepOrder:
    """Shuffled epochs of the training documents, taken whole, up to `tokens_per_step` a step and at least one.

    >>> order = StepOrder([5, 3, 9, 4, 2], tokens_per_step=8, seed=0, eval_documents=1)
    >>> sorted([*order.evaluation, *order.training.tolist()])
    [0, 1, 2, 3, 4]

    `targets` are the tokens that each document predicts (None: all but its first), which a plan counts by.
    `evaluation` are the held-out documents, chosen by the seed before anything else and never trained on.
    A step may reach into the next epoch. An order pickles as the lengths: all else follows from the seed. Raises
    DataError where no document is left to train on.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        *,
        tokens_per_step: int,
        seed: int,
        eval_documents: int,
        targets: np.ndarray | None = None,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.targets = targets
        if eval_documents >= len(self.lengths):
            raise DataError(
                f"data.eval_documents {eval_documents} leaves nothing to train on: the corpus has "
                f"{len(self.lengths)} documents; hold out at most {max(0, len(self.lengths) - 1)}"
            )
        self._budget, self._seed, self._held_out = tokens_per_step, seed, eval_documents
        self._starts = [0]  # of every step so far, in the endless stream of epochs
        self._deal()

    def _deal(self) -> None:
        shuffled = _shuffled(len(self.lengths), self._seed, _HELD_OUT)
        self.evaluation: tuple[int, ...] = tuple(sorted(shuffled[: self._held_out].tolist()))
        self.training: np.ndarray = np.sort(shuffled[self._held_out :])  # document ids, int32
        self._epoch = lru_cache(maxsize=2)(self._shuffled_epoch)

    def __getstate__(self) -> tuple[Any, ...]:
        shortest = self.lengths.astype(np.min_scalar_type(self.lengths.max()))
        return shortest, self.targets, self._budget, self._seed, self._held_out

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        lengths, self.targets, self._budget, self._seed, self._held_out = state
        self.lengths, self._starts = lengths.astype(np.int64), [0]
        self._deal()

    def documents_of_step(self, step: int) -> tuple[int, ...]:
        """Document ids of a step, counted from 0."""
        while len(self._starts) < step + 2:
            self._starts.append(self._end(self._starts[-1]))
        ids, position, end = list[int](), self._starts[step], self._starts[step + 1]
        while position < end:
            epoch, index = divmod(position, len(self.training))
            ids += self._epoch(epoch)[0][index : index + end - position].tolist()
            position = self._starts[step] + len(ids)
        return tuple(ids)

    def steps_of_epochs(self, epochs: float) -> int:
        """The steps until every training document was trained on so many times; the last may reach into the next epoch.

        >>> StepOrder([4, 4, 4, 4, 4], tokens_per_step=8, seed=0, eval_documents=0).steps_of_epochs(1.0)
        3
        """
        documents = math.ceil(round(epochs * len(self.training), 6))
        while self._starts[-1] < documents:
            self._starts.append(self._end(self._starts[-1]))
        return bisect_left(self._starts, documents)

    def _end(self, start: int) -> int:
        """Where the step that begins at a stream position ends: as many documents as fit, at least one."""
        size, left, position = len(self.training), self._budget, start
        while True:
            epoch, index = divmod(position, size)
            ends = self._epoch(epoch)[1]  # ends[i] tokens of the first i documents
            fits = int(np.searchsorted(ends, ends[index] + left, side="right")) - 1
            left -= int(ends[fits] - ends[index])
            position += fits - index
            if fits < size:
                return max(position, start + 1)

    def _shuffled_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Document ids in the epoch's order, and how many tokens stand before each place (one more than the ids)."""
        order = self.training[_shuffled(len(self.training), self._seed, _EPOCH, epoch)]
        ends = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(self.lengths[order], out=ends[1:])
        return order, ends


def some_documents(count: int, most: int, seed: int) -> tuple[int, ...]:
    """Of so many documents at most so many, chosen by the seed, in order; 0: all of them.

    >>> some_documents(5, 0, seed=0), len(some_documents(5, 2, seed=0))
    ((0, 1, 2, 3, 4), 2)
    """
    return tuple(sorted(_shuffled(count, seed, _EVAL_SET)[: most or count].tolist()))


def _shuffled(count: int, *seed: int) -> np.ndarray:
    """A permutation from the raw bits of the generator, which numpy keeps the same in every version."""
    order = np.argsort(np.random.PCG64(list(seed)).random_raw(count), kind="stable")
    return order.astype(np.int32 if count < 2**31 else np.int64)
