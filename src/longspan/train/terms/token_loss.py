"""Losses of one's own of each target, the numbers of distributions that they may read, and log-probabilities of tokens.

The function of a loss runs once for each chunk of logits, outside of what recomputation runs again. Its losses may
depend only on their own rows: which rows are in a chunk, and on which rank, is the plan's affair.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.comm import World, to_device
from longspan.errors import DataError, LossError
from longspan.layout import Floats, Integers
from longspan.plain_text import short_text
from longspan.train.loss import (
    Head,
    Targets,
    chunked_loss,
    chunked_values,
    cut_into_chunks,
    find_softmax_kernels,
    row_scores,
    target_log_probs,
    uses_softmax_kernels,
)
from longspan.train.read_rows import (
    WEIGHTS,
    LocalBatch,
    documents_and_positions,
    rows_before,
    target_rows,
)

DISTRIBUTION_VALUES = ("entropy", "top1", "mean_logits", "log_sum_sq_probs")
_COLUMNS = 2048  # that a program has at a time, with several sums in each lane
_PARTS = 8  # of a chunk's rows: copies of logits are of one part at a time


def check_value_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of numbers, each once. Raises LossError for an unknown one, and for a text or None as the list."""
    is_list = isinstance(names, list | tuple)
    unique: tuple[Any, ...] = tuple(dict.fromkeys(names)) if is_list else (names,)  # which is refused as it is
    unknown_names = [name for name in unique if not is_list or name not in DISTRIBUTION_VALUES]
    if unknown_names:
        raise LossError(
            f"also has {short_text(unknown_names[0])}; give a list of some of {', '.join(DISTRIBUTION_VALUES)}"
        )
    return unique


@torch.no_grad()
def distribution_values(logits: Tensor, ids: Tensor, names: Sequence[str]) -> Tensor:
    """Return numbers (k, t) by k names of the distributions p = softmax(logits), of logits (t, V) and target ids (t,).

    `entropy` is −Σ p log p in nats, `top1` 1 where the target is the likeliest token (of equal ones the first) and 0
    elsewhere, `mean_logits` the mean of the logits, `log_sum_sq_probs` log Σ p². All in float32, in float64 for float64
    logits. Kernels, where there are some, compute all of them in one pass over the logits.
    """
    if (numbers := kernel_distributions(logits.detach(), ids)) is not None:
        return numbers[[DISTRIBUTION_VALUES.index(name) for name in names]]
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    values = logits.new_empty((len(names), len(logits)), dtype=dtype)
    for chunk in cut_into_chunks(len(logits), max(1, len(logits) // _PARTS)):
        for value, name in zip(values, names, strict=True):
            value[chunk] = _distribution_value(logits[chunk].detach(), ids[chunk], name, dtype)
    return values


def kernel_distributions(logits: Tensor, ids: Tensor) -> Tensor | None:
    """Return numbers (4, t) of distributions in one pass over logits (t, V), by a Triton kernel; None without one.

    They are the entropy, whether a target of `ids` (t,) is the likeliest token, the mean logit, and log Σ p².
    """
    if not (uses_softmax_kernels(logits.dtype, logits.device.type) and logits.stride(1) == 1):
        return None
    rows, vocabulary = logits.shape
    numbers = logits.new_empty((4, rows), dtype=torch.float32)
    if rows:
        arguments = (logits, ids, numbers, rows, vocabulary, logits.stride(0))
        find_softmax_kernels().distribution_kernel[(rows,)](*arguments, COLUMNS=_COLUMNS)
    return numbers


def _distribution_value(logits: Tensor, ids: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    if name == "top1":
        return (logits.argmax(-1) == ids).to(dtype)
    if name == "mean_logits":
        return logits.mean(-1, dtype=dtype)
    log_probs = logits.to(dtype).log_softmax(-1)
    if name == "log_sum_sq_probs":
        return log_probs.mul_(2).logsumexp(-1)  # p² = exp(2 log p)
    # a token that cannot come (−inf) adds nothing
    return -(log_probs.exp() * log_probs.clamp_(min=torch.finfo(dtype).min)).sum(-1)


class Distributions:
    """The distributions of some rows while their logits (t, V) exist; a number is computed when it is first read."""

    def __init__(self, logits: Tensor, ids: Tensor) -> None:
        self._logits_and_ids: tuple[Tensor, Tensor] | None = (logits, ids)
        self._values = dict[str, Tensor]()

    def value(self, name: str) -> Tensor:
        """Return a number (t,) by its name. Raises LossError after `release_logits`, if it was not read before."""
        if name not in self._values:
            if self._logits_and_ids is None:
                raise LossError(
                    f"at.{name} is read after the loss has returned, when its logits are gone; read it in the loss and "
                    "keep the tensor"
                )
            logits, ids = self._logits_and_ids
            numbers = kernel_distributions(logits.detach(), ids)
            if numbers is not None:  # the kernel computes all of them at once
                self._values.update(zip(DISTRIBUTION_VALUES, numbers, strict=True))
            else:
                self._values[name] = distribution_values(logits, ids, (name,))[0]
        return self._values[name]

    def release_logits(self) -> None:
        self._logits_and_ids = None


@dataclass(frozen=True, eq=False)
class LossTokens:
    """Some rows of one micro-batch that predict a token, n of them, on the model's device.

    `document` (n,) is numbered as in the plan; a row at `position` (n,) predicts the token after it, whose id is in
    `target` (n,). `at["name"]` (n,) is what came with the documents under that name, of the tokens that are predicted,
    in the dtype of the log-probabilities; `at["weights"]` are 1 in documents that give none.

    `entropy`, `top1`, `mean_logits` and `log_sum_sq_probs` (n,) are of the distribution that a row predicts, as by
    `token_log_probs(…, also=)`: without a gradient, and computed when they are read.
    """

    document: Tensor
    position: Tensor
    target: Tensor
    values: Mapping[str, Tensor]
    distributions: Distributions | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.document)

    def __getitem__(self, name: str) -> Tensor:
        """Return the numbers (n,) of this name. Raises DataError where documents have none."""
        if name not in self.values:
            raise DataError(
                f"the loss asks for {name!r}, the documents of this step have {', '.join(sorted(self.values))}; give "
                f"it with each: longspan.Document(ids, {name}=…)"
            )
        return self.values[name]

    @property
    def entropy(self) -> Tensor:
        """The entropy of the model's distribution (n,), in nats."""
        return self._distribution_value("entropy")

    @property
    def top1(self) -> Tensor:
        """1 where the target is the likeliest token, and 0 elsewhere (n,)."""
        return self._distribution_value("top1")

    @property
    def mean_logits(self) -> Tensor:
        """The mean of the logits over the vocabulary (n,)."""
        return self._distribution_value("mean_logits")

    @property
    def log_sum_sq_probs(self) -> Tensor:
        """The logarithm of the sum of the squares of all tokens' probabilities (n,)."""
        return self._distribution_value("log_sum_sq_probs")

    def _distribution_value(self, name: str) -> Tensor:
        if self.distributions is None:
            raise LossError(
                f"at.{name} is not known, for these LossTokens were made without logits; pass distributions="
            )
        return self.distributions.value(name)


class BatchTargets:
    """The targets of one micro-batch on this rank, on the host and on the device."""

    def __init__(self, batch: LocalBatch, device: torch.device) -> None:
        rows = target_rows(batch)
        self.documents, positions = (values[rows] for values in documents_and_positions(batch.shard))
        self.weights = batch.values[WEIGHTS][rows] if WEIGHTS in batch.values else np.ones(len(rows))
        self.positions = positions  # among the document's own rows
        self.path_positions: Integers = positions + rows_before(batch.shard.micro_batch, self.documents)
        self.targets: Targets = Targets(to_device(rows, device), to_device(batch.labels[rows], device))
        self._values = {name: values[rows] for name, values in batch.values.items()} | {WEIGHTS: self.weights}
        self._device = device

    def weighted_rows(self, numbers: Floats, columns: Sequence[str], scores: int) -> Floats:
        """Multiply numbers of targets (k, n), of `scores` (0: a log-probability) and others, by weights of these names.

        A log-probability is there once for each name; others, and scores, have the first one's weights.
        """
        if len(self.documents) and (missing := [name for name in columns if name not in self._values]):
            raise DataError(
                f"the loss weights tokens by {missing[0]!r}, documents have {', '.join(sorted(self._values))}; give it "
                f"with each: longspan.Document(ids, {missing[0]}=…)"
            )
        weights = np.stack([self._values.get(name, self.weights) for name in columns])
        own = scores or 1
        return np.concatenate([numbers[:own] * weights, numbers[own:] * weights[:1]])

    def compute_values(self, hidden: Tensor, head: Head, also: Sequence[str], chunk_rows: int) -> Tensor:
        """Compute log-probabilities or scores of these targets, and by name numbers of their distributions: (1 + k, n)
        or (L + k, n), without a gradient.
        """

        def tabulate(logits: Tensor, ids: Tensor) -> Tensor:
            of_rows = (
                row_scores(logits, ids)[0].movedim(0, -1) if head.makes_scores else target_log_probs(logits, ids)
            )
            values = of_rows.reshape(-1, len(ids))
            return torch.cat([values, distribution_values(logits, ids, also)]) if also else values

        return chunked_values(hidden, self.targets, tabulate, head, chunk_rows)

    def loss_rows(self, part: slice, dtype: torch.dtype, distributions: Distributions | None = None) -> LossTokens:
        """Return some of these targets as the caller's function gets them, numbers in `dtype` on the device."""
        numbers = {name: to_device(x[part], self._device).to(dtype) for name, x in self._values.items()}
        return LossTokens(
            to_device(self.documents[part], self._device),
            to_device(self.path_positions[part], self._device),
            self.targets.ids[part],
            MappingProxyType(numbers),
            distributions,
        )


LossFunction = Callable[[Tensor, LossTokens], Tensor]


@dataclass(eq=False)
class TokenLoss:
    """Runs a caller's function over the targets of a step's micro-batches.

    An error of the function is kept in `error`, and the passes go on, so that this rank does not leave the others
    in a collective.
    """

    function: LossFunction
    chunk_rows: int
    error: Exception | None = None

    def __call__(self, batch: LocalBatch, hidden: Tensor, head: Head) -> Tensor:
        targets = BatchTargets(batch, hidden.device)
        return chunked_loss(
            hidden, targets.targets, partial(self._losses_and_slopes, targets), head, self.chunk_rows
        )

    def _losses_and_slopes(
        self, targets: BatchTargets, log_probs: Tensor, part: slice, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """After an error in an earlier chunk losses and slopes are 0, as for one in this chunk: the step raises at its
        end.
        """
        zeros = log_probs.new_zeros((), dtype=torch.float64), torch.zeros_like(log_probs)
        if self.error is not None:
            return zeros
        distributions = Distributions(logits, targets.targets.ids[part])
        try:
            leaf = log_probs.detach().requires_grad_(torch.is_grad_enabled())
            losses = check_losses(self.function(leaf, targets.loss_rows(part, leaf.dtype, distributions)), leaf)
            total = losses.sum(dtype=torch.float64)
            if not total.requires_grad:  # a constant, or no gradient is wanted
                return total, zeros[1]
            (slopes,) = torch.autograd.grad(total, leaf, allow_unused=True)
            return total.detach(), zeros[1] if slopes is None else slopes
        except Exception as error:  # of the caller's function
            self.error = error
            return zeros
        finally:
            distributions.release_logits()


def check_losses(losses: Any, log_probs: Tensor) -> Tensor:
    if isinstance(losses, Tensor) and losses.shape == log_probs.shape[:1] and losses.is_floating_point():
        return losses
    shape = (
        f"{losses.dtype} of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
    )
    raise LossError(
        f"the loss gave {shape} for {len(log_probs)} rows; return a floating-point loss for each, of "
        f"shape ({len(log_probs)},): they are summed over all ranks and divided by divisor= afterwards"
    )


@dataclass(frozen=True, eq=False)
class TokenLogProbs:
    """Log-probabilities of the tokens of documents of these lengths, the same on every rank; `values` end to end.

    `sums` (D,) are those of each document times the weights of its tokens, as a DocumentLoss gets them. `also` are
    other numbers of tokens by name, end to end as well. Where documents share prefixes, `bases` (D,) are the tokens
    before each document's own: all these are 0.
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
        start = self._starts[document]
        own_values = values[start : start + self.lengths[document]]
        return np.concatenate([np.zeros(self.bases[document]), own_values]) if self.bases else own_values

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.cumsum((0, *self.lengths))


class CollectedLogProbs:
    """A loss that collects numbers of this rank's rows: log-probabilities, and what `also` names; or `scores`."""

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
        """Put the numbers of all ranks' rows together, on every rank: a sum, as a rank has 0 for tokens of others."""
        values, sums = self.gather_tables(world)
        also = dict(zip(self._also, values[self._scores or 1 :], strict=True))
        return TokenLogProbs(self._lengths, values[0], sums[0], also, self._bases)

    def gather_tables(self, world: World) -> tuple[Floats, Floats]:
        """Return the numbers of rows (k, rows of all documents), 0 at others, and their sums of documents (…, D), times
        weights, in the order of `BatchTargets.weighted_rows`.
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
        flat = np.concatenate([values.ravel(), sums.ravel()])
        flat = world.control.sum_array_over_ranks(flat, "log-probabilities of tokens")
        return flat[: values.size].reshape(values.shape), flat[values.size :].reshape(sums.shape)
