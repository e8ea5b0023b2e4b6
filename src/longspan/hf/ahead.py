"""Steps that run ahead of the Trainer's loss: batches made early, guessed coefficients, and whether a guess held."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from longspan.data.batch_documents import BatchDocuments
from longspan.data.document import NO_TARGET, Document
from longspan.hf.batch_entries import IGNORED, counts_of_writes, document_entries, read_documents_of_batch
from longspan.layout import Floats
from longspan.plan import Plan
from longspan.train import TokenLogProbs


class OffsetValues(NamedTuple):
    """Values of tokens of documents that are numbered from `first` on in a longer list."""

    values: TokenLogProbs
    first: int

    def token_value(self, name: str, document: int) -> Floats:
        """Return "log_probs" or another value of a document's tokens (length,), by its number among these documents."""
        number = self.first + document
        if name == "log_probs":
            return self.values.of(number)
        return self.values.value(name, number)


class AheadBatch(NamedTuple):
    """A batch whose step ran already, with guessed coefficients: entries, documents, and values of their tokens."""

    # `document_entries` reads these entries.
    entries: Mapping[str, Any]
    rows: BatchDocuments
    values: OffsetValues
    # `counts_of_writes` reads these versions of the entries.
    versions: tuple[int, ...]

    def has_same_tensors(self, batch: Mapping[str, Any]) -> bool:
        """Return whether a call has these very tensors and no others: its rows need no second reading."""
        entries = document_entries(batch)
        if any(x is not None for name, x in batch.items() if name not in entries and name not in IGNORED):
            return False  # reading refuses other entries, such as images
        return entries.keys() == self.entries.keys() and all(self.entries[name] is x for name, x in entries.items())

    def matches(self, batch: Mapping[str, Any]) -> bool:
        """Return whether a model call's arguments (`batch`) are those of the step that ran ahead, none of whose tensors
        was written to since. Other tensors match if all entries that decide documents are equal.
        """
        if counts_of_writes(self.entries) != self.versions:
            return False
        if self.has_same_tensors(batch):
            return True
        if (entries := document_entries(batch)).keys() != self.entries.keys():
            return False
        pairs = [(torch.as_tensor(x), torch.as_tensor(entries[name])) for name, x in self.entries.items()]
        return all(x.shape == y.shape and torch.equal(x, y) for x, y in pairs)


class BatchesAhead:
    """The batches of a data loader, some of which are made before they are asked for.

    Accelerate's loader asks for one batch more than the Trainer got, to know which is the last. An error of the loader
    is raised where its batch is asked for.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._newest = None
        self._ready = deque[Any]()  # made ahead, and not asked for yet; the last may be the loader's error

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next batch, one that was made ahead if there is one, or raise the loader's error that was kept for
        it.
        """
        batch = self._ready.popleft() if self._ready else next(self._batches)
        if isinstance(batch, Exception):
            raise batch
        self._newest = batch
        return batch

    def make_next_batches(self, count: int) -> list[Any]:
        """Make what the next step of `count` batches will ask for; return the step's batches, as many as there are.

        Accelerate's loader holds back the newest batch, the step's first: the step asks for the others and for the one
        that is held back next. An error of the loader is kept until its batch is asked for.
        """
        while len(self._ready) < count and not (self._ready and isinstance(self._ready[-1], Exception)):
            try:
                self._ready.append(next(self._batches))
            except Exception as error:
                self._ready.append(error)
        coming = [self._newest, *islice(self._ready, count - 1)]
        return [batch for batch in coming if not isinstance(batch, Exception)]


@dataclass(frozen=True, eq=False)
class ComingStep:
    """A step that was read and planned before the Trainer's loss, as if this were the mean cross entropy.

    `rows` has what was read of each batch. `documents` are the documents with targets of all batches, with guessed
    coefficients; those of a batch begin at its number in `firsts`. The plan is of `shared`, the documents as
    `share_prefixes` makes them; `digest` is that of `documents`.
    """

    batches: Sequence[Any]
    rows: Sequence[BatchDocuments]
    documents: list[Document]
    shared: Sequence[Document]
    firsts: Sequence[int]
    digest: str
    plan: Plan
    # Each batch has the versions that it was read with.
    versions: Sequence[tuple[int, ...]]

    def is_read_from(self, batches: Sequence[Any]) -> bool:
        """Return whether these are the step's batches, into which nothing was written since they were read."""
        return len(batches) == len(self.batches) and all(
            batch is batch_read and counts_of_writes(document_entries(batch)) == versions
            for batch, batch_read, versions in zip(batches, self.batches, self.versions, strict=True)
        )


def read_step_documents(
    batches: Sequence[Any], items: float | None
) -> tuple[list[BatchDocuments], list[Document], list[int]]:
    """Return the rows of each batch of a step, its documents with targets, and where those of each batch begin.

    Each document brings its guessed coefficient: −1 / `items`, the targets of all batches, or without `items`
    −1 / (targets of the batch × batches), the mean of the batches' means.
    """
    all_rows = list[BatchDocuments]()
    documents = list[Document]()
    firsts = list[int]()
    for batch in batches:
        all_rows.append(read_documents_of_batch(document_entries(batch)))
        scored = [document for document in all_rows[-1].documents if document.targets]
        divisor = items or max(1, sum(document.targets for document in scored)) * len(batches)
        firsts.append(len(documents))
        documents += [document.with_values(coefficient=-1.0 / divisor) for document in scored]
    return all_rows, documents, firsts


def coefficients_agree(documents: Sequence[Document], guessed: Sequence[Document], dtype: torch.dtype) -> bool:
    """Return whether the derivatives of the Trainer's loss by each target's log-probability (`coefficient`), as its
    backward pass left them in the batches' leaves, equal the guessed ones up to rounding in the loss's dtype.

    Coefficients of tokens that are no targets, such as the first of a document, are not compared.
    """
    if len(documents) != len(guessed):
        return False
    bound = 4 * torch.finfo(dtype).eps
    for document, guess in zip(documents, guessed, strict=True):
        if len(document) != len(guess):
            return False
        positions = np.flatnonzero(document.labels() != NO_TARGET)
        positions = positions[positions > 0]
        actual, guessed_values = (d.token_values(positions)["coefficient"] for d in (document, guess))
        if not np.allclose(actual, guessed_values, rtol=bound, atol=0):
            return False
    return True
