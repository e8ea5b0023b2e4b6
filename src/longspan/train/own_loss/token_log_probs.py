"""The log-probability that a model gives to each token of documents, under any plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from longspan.comm import World
from longspan.model.multimodal.multimodal_model import check_world, language_model_of
from longspan.plan import Plan
from longspan.train.encoding import items_of, read_encoding
from longspan.train.loss import CrossEntropy, Head, chunked_log_probs
from longspan.train.own_loss.loss_rows import BatchTargets
from longspan.train.passes import Passes, run_passes
from longspan.train.reading.local_batch import read_local_batches
from longspan.train.reading.read_rows import LocalBatch
from longspan.train.step_check import check_step

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TokenLogProbs:
    """Log-probabilities of the tokens of documents of these lengths, the same on every rank; `values` end to end.

    `sums` (D,) are those of each document times the weights of its tokens, as a DocumentLoss gets them.
    """

    lengths: tuple[int, ...]
    values: Numbers
    sums: Numbers

    def of(self, document: int) -> Numbers:
        """Of each token of a document (length,), at its own position; 0 where there is no label, and at position 0."""
        start = self._starts[document]
        return self.values[start : start + self.lengths[document]]

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.cumsum((0, *self.lengths))


def token_log_probs(
    model: nn.Module, plan: Plan, documents: Any, world: World, loss_chunk_rows: int = 0
) -> TokenLogProbs:
    """The log-probability of each token of a plan's documents that has a label, without gradients, on every rank.

    >>> before = token_log_probs(model, plan_fixed(lengths, world.home, cp=4), documents, world)
    >>> before.of(3), before.sums[3]

    The model runs in evaluation mode, as by `run_step(…, backward=False)`, under any plan of these documents. All ranks
    call it together; what is refused is what `run_step` refuses.
    """
    check_world(model, world)
    language_model, items = language_model_of(model), items_of(model, plan, documents)
    check_step(language_model, plan, documents, world, items, backward=False)
    batches = read_local_batches(language_model, plan, documents, world, items)
    encoding = read_encoding(model, plan, documents, items, backward=False)
    passes = Passes(model=language_model, plan=plan, world=world, backward=False, measure=CrossEntropy())
    if encoding is None:
        return log_probs_of_passes(passes, batches, loss_chunk_rows)
    with encoding.around(plan.micro_batches, batches):
        return log_probs_of_passes(passes, batches, loss_chunk_rows)


def log_probs_of_passes(passes: Passes, batches: Sequence[LocalBatch], chunk_rows: int) -> TokenLogProbs:
    """Log-probabilities from forward passes over some micro-batches of a step, which have been read; 0 elsewhere.

    Entered by all ranks.
    """
    collected = _Collected(passes.plan.lengths, chunk_rows)
    run_passes(replace(passes, backward=False, routing=None, measure=collected, depths=0), batches)
    return collected.over_ranks(passes.world)


class _Collected:
    """Log-probabilities of this rank's rows, on the device until the passes are over."""

    def __init__(self, lengths: Sequence[int], chunk_rows: int) -> None:
        self._lengths, self._chunk_rows = tuple(lengths), chunk_rows
        self._starts = np.cumsum((0, *lengths))
        self._waiting: list[tuple[BatchTargets, Tensor]] = []

    def __call__(self, batch: LocalBatch, hidden: Tensor, head: Head) -> Tensor:
        """Keep those of a micro-batch's rows (T, D); there is no loss."""
        targets = BatchTargets(batch, hidden.device)
        self._waiting.append((targets, chunked_log_probs(hidden, targets.targets, head, self._chunk_rows)))
        return hidden.new_zeros((), dtype=torch.float64)

    def over_ranks(self, world: World) -> TokenLogProbs:
        """Those of all ranks."""
        values, sums = np.zeros(self._starts[-1]), np.zeros(len(self._lengths))
        if world.coordinates.tp == 0:  # tensor-parallel ranks of a slot hold the same
            for targets, on_device in self._waiting:
                log_probs = on_device.double().cpu().numpy()
                values[self._starts[targets.documents] + targets.positions + 1] = log_probs  # of the token after a row
                np.add.at(sums, targets.documents, log_probs * targets.weights)
        both = world.control.sum_of_arrays(np.concatenate([values, sums]), "log-probabilities of tokens")
        return TokenLogProbs(self._lengths, both[: len(values)], both[len(values) :])
