"""Log-probabilities and scores of a plan's tokens: collected by passes on each rank, put together on every rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.comm import World
from longspan.errors import LossError
from longspan.layout import Floats
from longspan.plain_text import short_text
from longspan.train.loss import Head
from longspan.train.rows.read_rows import WEIGHTS, LocalBatch
from longspan.train.terms.loss_tokens import BatchTargets


@dataclass(frozen=True, eq=False)
class TokenLogProbs:
    """Log-probabilities of the tokens of documents of these lengths, the same on every rank; `values` end to end.

    `sums` (D,) are those of each document times the weights of its tokens, as a DocumentLoss gets them. `also` are
    other numbers of tokens by name, end to end as well. Where documents share prefixes, `lengths` are of their own
    tokens, and `bases` (D,) count the tokens of prefixes before these, of which every number is 0.
    """

    lengths: tuple[int, ...]
    values: Floats
    sums: Floats
    also: Mapping[str, Floats] = field(default_factory=dict)
    bases: tuple[int, ...] = ()

    def of(self, document: int) -> Floats:
        """Return the log-probability of each token of a document (length,), those of its shared prefix among them.

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
        """Zeros stand for a document's shared prefix."""
        start = self._starts[document]
        own_values = values[start : start + self.lengths[document]]
        if self.bases:
            return np.concatenate([np.zeros(self.bases[document]), own_values])
        return own_values

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.cumsum((0, *self.lengths))


class CollectedLogProbs:
    """A loss of passes that is 0 and collects numbers of this rank's targets: log-probabilities and `also`; or
    `scores`.

    `lengths` are the plan's tokens of each document, `scores` how many a row has (0: a log-probability). `columns`
    names the weights by which documents' sums are made, `bases` the tokens of prefixes before each document.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        chunk_rows: int,
        also: tuple[str, ...] = (),
        *,
        scores: int = 0,
        bases: tuple[int, ...] = (),
        columns: Sequence[str] = (WEIGHTS,),
    ) -> None:
        """Begin with no numbers; the passes call it once for each micro-batch of this rank."""
        self._columns = columns
        self._lengths = tuple(lengths)
        self._bases = bases
        self._chunk_rows = chunk_rows
        self._also = also
        self._scores = scores
        self._starts = np.cumsum((0, *lengths))
        self._parts: list[tuple[BatchTargets, Tensor]] = []

    def __call__(self, batch: LocalBatch, hidden: Tensor, head: Head) -> Tensor:
        targets = BatchTargets(batch, hidden.device)
        self._parts.append((targets, targets.compute_values(hidden, head, self._also, self._chunk_rows)))
        return hidden.new_zeros((), dtype=torch.float64)

    def sum_over_ranks(self, world: World) -> TokenLogProbs:
        """Return the log-probabilities of all ranks' tokens, on every rank, which all enter.

        They are a sum over ranks, as a rank has 0 for tokens of others.
        """
        values, sums = self.gather_tables(world)
        also = dict(zip(self._also, values[self._scores or 1 :], strict=True))
        return TokenLogProbs(self._lengths, values[0], sums[0], also, self._bases)

    def gather_tables(self, world: World) -> tuple[Floats, Floats]:
        """Return numbers (k, rows of all documents), 0 at rows that do not count, and documents' weighted sums (k', D).

        Both are the same on every rank, which all enter. The order of k' is that of `BatchTargets.weighted_rows`.
        """
        values = np.zeros(((self._scores or 1) + len(self._also), self._starts[-1]))
        sums = np.zeros(((self._scores or len(self._columns)) + len(self._also), len(self._lengths)))
        ahead = 0 if self._scores else 1  # a log-probability is of the token after a row
        if world.coordinates.tp == 0:  # tensor-parallel ranks of a slot hold the same
            for targets, on_device in self._parts:
                numbers = on_device.double().cpu().numpy()
                values[:, self._starts[targets.documents] + targets.positions + ahead] = numbers
                for total, column in zip(
                    sums, targets.weighted_rows(numbers, self._columns, self._scores), strict=True
                ):
                    np.add.at(total, targets.documents, column)
        # Both tables take one collective; elsewhere than on this rank's tokens they are 0.
        flat = np.concatenate([values.ravel(), sums.ravel()])
        flat = world.control.sum_array_over_ranks(flat, "log-probabilities of tokens")
        return flat[: values.size].reshape(values.shape), flat[values.size :].reshape(sums.shape)
