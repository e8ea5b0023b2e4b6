"""The log-probability that a model gives to each token of documents: what is returned, and how passes collect it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.comm import World
from longspan.errors import LossError, short_text
from longspan.layout import Floats
from longspan.train.loss import Head, chunked_values, row_log_probs
from longspan.train.passes import Passes, run_passes
from longspan.train.reading.read_rows import LocalBatch
from longspan.train.terms.distribution import distribution_values
from longspan.train.terms.token_loss import BatchTargets


@dataclass(frozen=True, eq=False)
class TokenLogProbs:
    """Log-probabilities of the tokens of documents of these lengths, the same on every rank; `values` end to end.

    `sums` (D,) are those of each document times the weights of its tokens, as a DocumentLoss gets them. `also` are
    other numbers of tokens by name, end to end as well.
    """

    lengths: tuple[int, ...]
    values: Floats
    sums: Floats
    also: Mapping[str, Floats] = field(default_factory=dict)

    def of(self, document: int) -> Floats:
        """Return the log-probability of each token of a document (length,).

        It is 0 where there is no label, and at position 0.
        """
        return self._document_values(self.values, document)

    def value(self, name: str, document: int) -> Floats:
        """Return another number of each token of a document (length,), 0 where `of` gives 0.

        Raises LossError for a name that `also=` of token_log_probs did not have.
        """
        if name not in self.also:
            raise LossError(
                f"{short_text(name)} of tokens was not asked for (these were: {', '.join(self.also) or 'none'}); call "
                f"token_log_probs(…, also=[{short_text(name)}])"
            )
        return self._document_values(self.also[name], document)

    def _document_values(self, values: Floats, document: int) -> Floats:
        start = self._starts[document]
        return values[start : start + self.lengths[document]]

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.cumsum((0, *self.lengths))


def collect_log_probs(passes: Passes, batches: Sequence[LocalBatch], chunk_rows: int) -> TokenLogProbs:
    """Collect log-probabilities by forward passes over some micro-batches of a step; entered by all ranks.

    Tokens of other micro-batches get 0.
    """
    collected = CollectedLogProbs(passes.plan.lengths, chunk_rows)
    run_passes(replace(passes, backward=False, routing=None, measure=collected, depths=0, terms=()), batches)
    return collected.sum_over_ranks(passes.world)


class CollectedLogProbs:
    """A measure that collects numbers of this rank's rows, on the device until the passes are over.

    They are the log-probabilities, and what `also` names (`distribution.py`).
    """

    def __init__(self, lengths: Sequence[int], chunk_rows: int, also: tuple[str, ...] = ()) -> None:
        """Begin without numbers, for documents of these lengths; `_parts` has those of each micro-batch (1 + k, n)."""
        self._lengths, self._chunk_rows, self._also = tuple(lengths), chunk_rows, also
        self._starts = np.cumsum((0, *lengths))
        self._parts: list[tuple[BatchTargets, Tensor]] = []

    def __call__(self, batch: LocalBatch, hidden: Tensor, head: Head) -> Tensor:
        """Collect the numbers of a micro-batch's rows (T, D); returns 0, as there is no loss."""
        targets = BatchTargets(batch, hidden.device)
        self._parts.append(
            (targets, chunked_values(hidden, targets.targets, self._target_values, head, self._chunk_rows))
        )
        return hidden.new_zeros((), dtype=torch.float64)

    def _target_values(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return log-probabilities and other numbers (1 + k, t) of rows with logits (t, V)."""
        log_probs = row_log_probs(logits, ids).unsqueeze(0)
        return torch.cat([log_probs, distribution_values(logits, ids, self._also)]) if self._also else log_probs

    def sum_over_ranks(self, world: World) -> TokenLogProbs:
        """Put the numbers of all ranks' rows together, on every rank: a sum, as a rank has 0 for tokens of others."""
        values, sums = np.zeros((1 + len(self._also), self._starts[-1])), np.zeros(len(self._lengths))
        if world.coordinates.tp == 0:  # tensor-parallel ranks of a slot hold the same
            for targets, on_device in self._parts:
                numbers = on_device.double().cpu().numpy()
                values[:, self._starts[targets.documents] + targets.positions + 1] = numbers  # of the token after a row
                np.add.at(sums, targets.documents, numbers[0] * targets.weights)
        flat = np.concatenate([values.ravel(), sums])
        flat = world.control.sum_of_arrays(flat, "log-probabilities of tokens")
        values, sums = flat[: values.size].reshape(values.shape), flat[values.size :]
        return TokenLogProbs(self._lengths, values[0], sums, dict(zip(self._also, values[1:], strict=True)))
