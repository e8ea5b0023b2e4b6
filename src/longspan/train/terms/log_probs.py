"""The log-probability that a model gives to each token of documents: what is returned, and how passes collect it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.comm import World
from longspan.layout import Floats
from longspan.train.loss import Head, chunked_log_probs
from longspan.train.passes import Passes, run_passes
from longspan.train.reading.read_rows import LocalBatch
from longspan.train.terms.token_loss import BatchTargets


@dataclass(frozen=True, eq=False)
class TokenLogProbs:
    """Log-probabilities of the tokens of documents of these lengths, the same on every rank; `values` end to end.

    `sums` (D,) are those of each document times the weights of its tokens, as a DocumentLoss gets them.
    """

    lengths: tuple[int, ...]
    values: Floats
    sums: Floats

    def of(self, document: int) -> Floats:
        """Of each token of a document (length,), at its own position; 0 where there is no label, and at position 0."""
        start = self._starts[document]
        return self.values[start : start + self.lengths[document]]

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.cumsum((0, *self.lengths))


def log_probs_of_passes(passes: Passes, batches: Sequence[LocalBatch], chunk_rows: int) -> TokenLogProbs:
    """Log-probabilities from forward passes over some micro-batches of a step; 0 elsewhere. Entered by all ranks."""
    collected = CollectedLogProbs(passes.plan.lengths, chunk_rows)
    run_passes(replace(passes, backward=False, routing=None, measure=collected, depths=0, terms=()), batches)
    return collected.sum_over_ranks(passes.world)


class CollectedLogProbs:
    """A measure that collects the log-probabilities of this rank's rows, on the device until the passes are over."""

    def __init__(self, lengths: Sequence[int], chunk_rows: int) -> None:
        self._lengths, self._chunk_rows = tuple(lengths), chunk_rows
        self._starts = np.cumsum((0, *lengths))
        self._parts: list[tuple[BatchTargets, Tensor]] = []

    def __call__(self, batch: LocalBatch, hidden: Tensor, head: Head) -> Tensor:
        """Collect those of a micro-batch's rows (T, D); there is no loss."""
        targets = BatchTargets(batch, hidden.device)
        self._parts.append((targets, chunked_log_probs(hidden, targets.targets, head, self._chunk_rows)))
        return hidden.new_zeros((), dtype=torch.float64)

    def sum_over_ranks(self, world: World) -> TokenLogProbs:
        """Sum over all ranks, each of which has its own rows."""
        values, sums = np.zeros(self._starts[-1]), np.zeros(len(self._lengths))
        if world.coordinates.tp == 0:  # tensor-parallel ranks of a slot hold the same
            for targets, on_device in self._parts:
                log_probs = on_device.double().cpu().numpy()
                values[self._starts[targets.documents] + targets.positions + 1] = log_probs  # of the token after a row
                np.add.at(sums, targets.documents, log_probs * targets.weights)
        values_and_sums = world.control.sum_of_arrays(np.concatenate([values, sums]), "log-probabilities of tokens")
        return TokenLogProbs(self._lengths, values_and_sums[: len(values)], values_and_sums[len(values) :])
