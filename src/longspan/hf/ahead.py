"""Steps that run ahead of a Trainer's loss: what they are made of, what they leave, and the batches of the next one.

The host makes the next step's batches, documents and plan while the device works on this one. Batches stay on the host
until their step, so that reading them waits for no device.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import send_to_device
from torch import Tensor

from longspan.comm import World, to_device
from longspan.data.batch_documents import BatchDocuments
from longspan.data.document import NO_TARGET, Document
from longspan.hf.facade import document_entries, read_batch, versions_of
from longspan.plan import Plan
from longspan.train import LossRows, TokenLogProbs
from longspan.train.step_end import gather_and_add, sums_on_device


class _Failure(NamedTuple):
    """An error that a data loader raised in the place of a batch, also the StopIteration at its end."""

    error: Exception


class BatchesAhead:
    """The batches of a data loader, some of which are made before they are asked for.

    Accelerate's loader asks for one batch more than the Trainer got, to know which is the last.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self._newest = batches, None
        self._ready = deque[Any]()  # made ahead, and not asked for yet

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next batch, which may have been made ahead; raise the loader's error in its place."""
        batch = self._ready.popleft() if self._ready else next(self._batches)
        if isinstance(batch, _Failure):
            raise batch.error
        self._newest = batch
        return batch

    def make_batches(self, count: int) -> list[Any]:
        """Make what the next step of `count` batches will ask for; return the step's batches, as many as there are.

        Accelerate's loader holds back the newest batch, which is the step's first. So the step asks for its other
        batches and one that is held back next. An error of the loader is kept until its batch is asked for.
        """
        while len(self._ready) < count and not (self._ready and isinstance(self._ready[-1], _Failure)):
            try:
                self._ready.append(next(self._batches))
            except Exception as error:
                self._ready.append(_Failure(error))
        coming = [self._newest, *islice(self._ready, count - 1)]
        return [batch for batch in coming if not isinstance(batch, _Failure)]


class HostBatches:
    """The batches of a Trainer's loader, which it leaves on the host; `make_batches` has some of them made ahead."""

    def __init__(self) -> None:
        self._batches: BatchesAhead | None = None

    def take_over_loader(self, loader: Any) -> None:
        """Change a loader so that its batches stay on the host until `training_step` moves them, and can be made ahead.

        Loaders of other kinds than DataLoaderShard stay as they are: they fetch batches in another order.
        """
        self._batches, base = None, getattr(loader, "base_dataloader", None)
        if type(loader) is not DataLoaderShard or base is None or getattr(loader, "use_stateful_dataloader", False):
            return
        loader.device = None
        iterate_stock = type(base).__iter__

        def begin_batches() -> BatchesAhead:
            """Begin an epoch, with no batch made ahead."""
            self._batches = BatchesAhead(iterate_stock(base))
            return self._batches

        base.__iter__ = begin_batches  # Accelerate calls it by this name, not by iter()

    def make_batches(self, count: int) -> list[Any]:
        """Make the batches of the next step ahead; return them, [] where they are not known."""
        return [] if self._batches is None else self._batches.make_batches(count)


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the device; the host waits for no copy to a GPU.

    A batch that is there already is returned itself: callers recognize batches and tensors by identity.
    """
    if isinstance(batch, Tensor):
        if batch.device.type == device.type == "cpu":  # "cpu:0" would be a copy
            return batch
        if batch.device.type != "cpu" or device.type != "cuda":
            return batch.to(device)
        return batch.pin_memory().to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        moved = {name: move_to_device(x, device) for name, x in batch.items()}
        return batch if all(moved[name] is x for name, x in batch.items()) else type(batch)(moved)  # pyright: ignore
    return send_to_device(batch, device)


@dataclass(frozen=True, eq=False)
class ComingStep:
    """The documents of a step whose loss is the mean cross entropy, with their coefficients, and their plan.

    `rows` are those of each batch; its documents with targets begin at `firsts` in `documents`.
    """

    batches: Sequence[Any]
    rows: Sequence[BatchDocuments]
    documents: list[Document]
    firsts: Sequence[int]
    digest: str
    plan: Plan
    versions: Sequence[tuple[int, ...]]  # of each batch as it was read

    def has_batches(self, batches: Sequence[Any]) -> bool:
        """Return whether these are the step's batches, into which nothing was written since they were read."""
        return len(batches) == len(self.batches) and all(
            batch is batch_read and versions_of(document_entries(batch)) == versions
            for batch, batch_read, versions in zip(batches, self.batches, self.versions, strict=True)
        )


def read_step(batches: Sequence[Any], items: float | None) -> tuple[list[BatchDocuments], list[Document], list[int]]:
    """Return the rows of each batch of a step, its documents with targets, and where those of each batch begin.

    Each target's coefficient is −1 / `items`, the number of targets of all batches. None: the Trainer does not count
    them, and its loss is the mean of the batches' means: −1 / (targets of the batch × number of batches).
    """
    all_rows, documents, firsts = list[BatchDocuments](), list[Document](), list[int]()
    for batch in batches:
        all_rows.append(read_batch(document_entries(batch)))
        scored = [document for document in all_rows[-1].documents if document.targets]
        divisor = items or max(1, sum(document.targets for document in scored)) * len(batches)
        firsts.append(len(documents))
        documents += [document.with_values(coefficient=-1.0 / divisor) for document in scored]
    return all_rows, documents, firsts


def documents_digest(documents: Sequence[Document]) -> str:
    """Return a digest of the ids and labels of documents."""
    digest = blake2b(digest_size=16)
    for document in documents:
        digest.update(np.int64(len(document)).tobytes())
        digest.update(document.ids.tobytes())
        digest.update(document.labels().tobytes())
    return digest.hexdigest()


class CollectedTokens:
    """The loss of a step by its documents' coefficients, which also keeps each token's log-probability and values.

    `lengths` are those of the step's documents, `names` those of further values to keep, such as "entropy".
    """

    def __init__(self, lengths: Sequence[int], names: tuple[str, ...]) -> None:
        self._lengths, self._names = tuple(lengths), names
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, log_probs: Tensor, at: LossRows) -> Tensor:
        """Return log-probabilities (t,) times their coefficients, and keep the values of these tokens."""
        values = [log_probs.detach(), *(getattr(at, name) for name in self._names)]
        self._parts.append((at.document, at.position, torch.stack(values)))
        return at["coefficient"] * log_probs

    def sum_over_ranks(self, world: World) -> TokenLogProbs:
        """Return the values of all tokens, on every rank; entered by all. On GPUs the device sums them.

        A token's values are on one slot, and 0 on the others, so that sums over ranks are the values themselves.
        """
        starts = np.cumsum((0, *self._lengths))
        table = torch.zeros((1 + len(self._names), starts[-1]), dtype=torch.float64, device=world.device)
        if self._parts and world.coordinates.tp == 0:  # tensor-parallel ranks of a slot hold the same
            documents, positions, values = (torch.cat(parts, -1) for parts in zip(*self._parts, strict=True))
            at = to_device(starts, world.device)[documents] + positions + 1  # of the token that a row predicts
            table[:, at] = values.double()
        if sums_on_device(world):
            sums = gather_and_add(table.flatten(), world).view_as(table).cpu().numpy()
        else:
            flat = table.flatten().cpu().numpy()
            sums = world.control.sum_of_arrays(flat, "values of tokens").reshape(table.shape)
        also = dict(zip(self._names, sums[1:], strict=True))
        no_sums = np.zeros(len(self._lengths))  # sums by document, which nothing here reads
        return TokenLogProbs(self._lengths, sums[0], no_sums, also)


def same_coefficients(documents: Sequence[Document], guessed: Sequence[Document], dtype: torch.dtype) -> bool:
    """Return whether the coefficients that a loss left are those of a guess, up to rounding in the loss's dtype.

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
        slopes, guesses = (d.token_values(positions)["coefficient"] for d in (document, guess))
        if not np.allclose(slopes, guesses, rtol=bound, atol=0):
            return False
    return True
