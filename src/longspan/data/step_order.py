"""Which documents a step trains on: a function of the seed and the step, of nothing else.

World size, degrees and planner do not enter, so a run goes on with the same documents wherever it is resumed. What is
held in memory does not grow with the corpus: its lengths are mapped from their file, shuffled places are computed
(`order/`), and of steps the start of every 64th is kept.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.data.documents import Corpus, Documents
from longspan.data.order.arrays import as_sent, received
from longspan.data.order.permutation import Integers, first_of_shuffled
from longspan.data.order.source import EVAL_SET, HELD_OUT, ORDER, Mixture, sources_of
from longspan.data.order.stream import DocumentStream
from longspan.errors import DataError

_STRIDE = 64  # steps; the start of every so many is kept


class StepOrder:
    """Shuffled epochs of the training documents, taken whole, up to `tokens_per_step` a step and at least one.

    >>> order = StepOrder([5, 3, 9, 4, 2], tokens_per_step=8, seed=0, eval_documents=1)
    >>> order.evaluation, len(order.documents_of_step(0))
    ((3,), 1)

    `targets` are the tokens that each document predicts (None: all but its first), which a plan counts by.
    `evaluation` are the held-out documents, chosen by the seed before anything else and never trained on.
    Several sources are a `mixture`: the tokens of each stand in the proportion of its weight, and each runs through
    epochs of its own. A step may reach into the next epoch. An order pickles without what files hold. Raises DataError
    where no document is left to train on.
    """

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[Any],
        *,
        tokens_per_step: int,
        seed: int,
        eval_documents: int,
        targets: npt.NDArray[Any] | None = None,
        mixture: Mixture | None = None,
        version: int = ORDER,
    ) -> None:
        self.lengths, self.targets, self.version = np.asarray(lengths), targets, version
        if eval_documents >= len(self.lengths):
            raise DataError(
                f"data.eval_documents {eval_documents} leaves nothing to train on: the corpus has "
                f"{len(self.lengths)} documents; hold out at most {max(0, len(self.lengths) - 1)}"
            )
        held_out = np.sort(first_of_shuffled(len(self.lengths), eval_documents, seed, HELD_OUT))
        self.evaluation: tuple[int, ...] = tuple(held_out.tolist())
        self.stream = DocumentStream(self.lengths, sources_of(self.lengths, mixture, held_out, seed, version))
        self._budget = tokens_per_step
        self._open()

    def _open(self) -> None:
        self._kept = array("q", [0])  # starts, in the stream, of every _STRIDE-th step so far
        self._starts = lru_cache(maxsize=2)(self._starts_of)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("_kept", "_starts", "lengths")}
        return state | {"targets": None if self.targets is None else as_sent(self.targets)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"targets": None if state["targets"] is None else received(state["targets"])}
        self.lengths = self.stream.lengths
        self._open()

    def documents_of_step(self, step: int) -> tuple[int, ...]:
        """Document ids of a step, counted from 0."""
        return tuple(self._ids(step).tolist())

    def lengths_of_step(self, step: int) -> list[int]:
        """The tokens of each document of a step."""
        return self.lengths[self._ids(step)].tolist()

    def targets_of_step(self, step: int) -> int | None:
        """How many tokens the documents of a step predict; None: all but the first of each."""
        return None if self.targets is None else int(self.targets[self._ids(step)].sum(dtype=np.int64))

    def select(self, corpus: Corpus, step: int) -> Documents:
        """The documents of a step, as its plan numbers them."""
        return corpus.select(self.documents_of_step(step))

    def source_tokens(self, step: int) -> list[int]:
        """The tokens of each source in a step."""
        ids = self._ids(step)
        return self.stream.tokens_of_sources(ids, self.lengths[ids])

    def steps_of_epochs(self, epochs: float) -> int:
        """The steps until every training document was trained on so many times; the last may reach into the next epoch.

        >>> StepOrder([4, 4, 4, 4, 4], tokens_per_step=8, seed=0, eval_documents=0).steps_of_epochs(1.0)
        3
        """
        place = self.stream.place_after(epochs)
        while self._kept[-1] < place:
            self._starts(len(self._kept) - 1)
        block = bisect_left(self._kept, place) - 1
        return 0 if block < 0 else block * _STRIDE + bisect_left(self._starts(block), place)

    def _ids(self, step: int) -> Integers:
        block, index = divmod(step, _STRIDE)
        while len(self._kept) <= block:
            self._starts(len(self._kept) - 1)
        start, end = self._starts(block)[index : index + 2]
        ids = list[Integers]()
        while start < end:
            part = self.stream.at(start)
            ids.append(part.ids[start - part.first : end - part.first])
            start += len(ids[-1])
        return np.concatenate(ids)

    def _starts_of(self, block: int) -> list[int]:
        """Where in the stream each step of a block begins, and the one after them."""
        starts = [self._kept[block]]
        while len(starts) <= _STRIDE:
            starts.append(self._end(starts[-1]))
        if block == len(self._kept) - 1:
            self._kept.append(starts[-1])
        return starts

    def _end(self, start: int) -> int:
        """Where the step that begins at a place ends: as many documents as fit, at least one."""
        part, left = self.stream.at(start), self._budget
        index = start - part.first
        while True:
            fits = int(np.searchsorted(part.ends, part.ends[index] + left, side="right")) - 1
            if fits < len(part.ids):
                return max(part.first + fits, start + 1)
            left -= int(part.ends[fits] - part.ends[index])
            part, index = self.stream.after(part), 0


def some_documents(count: int, most: int, seed: int) -> tuple[int, ...]:
    """Of so many documents at most so many, chosen by the seed, in order; 0: all of them.

    >>> some_documents(5, 0, seed=0), len(some_documents(5, 2, seed=0))
    ((0, 1, 2, 3, 4), 2)
    """
    if not 0 < most < count:
        return tuple(range(count))
    return tuple(np.sort(first_of_shuffled(count, most, seed, EVAL_SET)).tolist())
