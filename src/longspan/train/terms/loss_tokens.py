"""The targets of one micro-batch on this rank, and a caller's own loss of each target (`loss=` of `run_step`).

The function of a loss runs once for each chunk of logits, outside of what recomputation runs again. Its losses may
depend only on their own rows: which rows are in a chunk, and on which rank, is the plan's affair.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.comm import to_device
from longspan.errors import DataError, LossError
from longspan.layout import Floats, Integers
from longspan.train.log_probs import (
    DISTRIBUTION_VALUES,
    cut_into_chunks,
    distribution_values,
    distribution_values_by_kernel,
    row_scores,
    target_log_probs_and_gradient,
)
from longspan.train.loss import Head, Targets, chunked_loss, rows_per_chunk
from longspan.train.rows.read_rows import WEIGHTS, LocalBatch, documents_and_positions, target_rows

LossFunction = Callable[[Tensor, "LossTokens"], Tensor]


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
            numbers = distribution_values_by_kernel(logits.detach(), ids)
            if numbers is not None:  # the kernel computes all of them at once
                self._values.update(zip(DISTRIBUTION_VALUES, numbers, strict=True))
            else:
                self._values[name] = distribution_values(logits, ids, (name,))[0]
        return self._values[name]

    def release_logits(self) -> None:
        """Forget the logits, whose memory is needed; numbers that were read before stay."""
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
    """The targets of one micro-batch on this rank, n of them: on the host, and on the device.

    `documents` and `positions` (n,) are numbered as in the plan and among the document's own rows; `path_positions`
    (n,) count the prefixes before these too. `weights` (n,) are 1 in documents that bring none. `targets` has their
    local rows and ids on the device.
    """

    def __init__(self, batch: LocalBatch, device: torch.device) -> None:
        """Find the batch's rows with a label, and copy their places and ids to the device."""
        rows = target_rows(batch)
        documents, positions = (values[rows] for values in documents_and_positions(batch.shard))
        self.documents: Integers = documents
        self.weights: Floats = batch.values[WEIGHTS][rows] if WEIGHTS in batch.values else np.ones(len(rows))
        # The positions count among the document's own rows.
        self.positions = positions
        self.path_positions: Integers = positions
        groups = batch.shard.micro_batch.groups
        if any(group.parents is not None for group in groups):
            bases = {d: base for group in groups for d, base in zip(group.documents, group.bases, strict=True)}
            shared_rows = np.array([bases[document] for document in self.documents.tolist()], dtype=np.int64)
            self.path_positions = positions + shared_rows
        self.targets: Targets = Targets(to_device(rows, device), to_device(batch.labels[rows], device))
        self._values = {name: values[rows] for name, values in batch.values.items()} | {WEIGHTS: self.weights}
        self._device = device

    def weighted_rows(self, numbers: Floats, columns: Sequence[str], scores: int) -> Floats:
        """Multiply numbers of targets (k, n) by the weights that `columns` names; return (k', n), to be summed by
        document.

        The first numbers are those that a loss reads: one log-probability where `scores` is 0, which is returned once
        with each of the weights, or `scores` numbers, with one weight for all or each with its own. The numbers behind
        them have the first weights. Raises DataError for a name that documents do not bring.
        """
        if len(self.documents) and (missing := [name for name in columns if name not in self._values]):
            raise DataError(
                f"the loss weights tokens by {missing[0]!r}, documents have {', '.join(sorted(self._values))}; give it "
                f"with each: longspan.Document(ids, {missing[0]}=…)"
            )
        # A rank without targets may lack a name: the weights, which are empty there, stand in for it.
        weights = np.stack([self._values.get(name, self.weights) for name in columns])
        read_by_loss = scores or 1
        return np.concatenate([numbers[:read_by_loss] * weights, numbers[read_by_loss:] * weights[:1]])

    def compute_values(self, hidden: Tensor, head: Head, also: Sequence[str], chunk_rows: int) -> Tensor:
        """Compute log-probabilities or scores of these targets, and the distributions' k numbers that `also` names.

        Returns (1 + k, n), or with L scores (L + k, n), on the device without a gradient. The head runs `chunk_rows`
        rows at a time (0: as many as fit), and one row of padding where there are no targets.
        """
        compute_numbers = row_scores if head.makes_scores else target_log_probs_and_gradient
        rows, ids = self.targets.with_padding()
        chunk_rows = chunk_rows or rows_per_chunk(head.vocabulary, hidden.dtype, hidden.device.type)
        values = list[Tensor]()  # (k, t) of each chunk
        with torch.no_grad():
            for chunk in cut_into_chunks(len(rows), chunk_rows):
                logits = head(hidden.index_select(0, rows[chunk]))
                chunk_values = compute_numbers(logits, ids[chunk])[0].movedim(0, -1).reshape(-1, len(rows[chunk]))
                if also:
                    chunk_values = torch.cat([chunk_values, distribution_values(logits, ids[chunk], also)])
                # The logits are freed before those of the next chunk are made.
                del logits
                values.append(chunk_values)
        # The result is without a padding target.
        return torch.cat(values, -1)[:, : len(self.targets.rows)]

    def loss_tokens(
        self, part: slice, dtype: torch.dtype, distributions: Distributions | None = None
    ) -> LossTokens:
        """Return some of these targets as the caller's function gets them, numbers in `dtype` on the device."""
        numbers = {name: to_device(x[part], self._device).to(dtype) for name, x in self._values.items()}
        return LossTokens(
            to_device(self.documents[part], self._device),
            to_device(self.path_positions[part], self._device),
            self.targets.ids[part],
            MappingProxyType(numbers),
            distributions,
        )


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
        """Return the sum of the caller's losses of a micro-batch's targets, of hidden states (T, D), with gradients."""
        targets = BatchTargets(batch, hidden.device)
        return chunked_loss(
            hidden, targets.targets, partial(self._losses_and_slopes, targets), head, self.chunk_rows
        )

    def _losses_and_slopes(
        self, targets: BatchTargets, log_probs: Tensor, part: slice, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """After an error in this or an earlier chunk loss and derivatives (t,) are 0: the step raises it at its end."""
        zeros = log_probs.new_zeros((), dtype=torch.float64), torch.zeros_like(log_probs)
        if self.error is not None:
            return zeros
        distributions = Distributions(logits, targets.targets.ids[part])
        try:
            leaf = log_probs.detach().requires_grad_(torch.is_grad_enabled())
            losses: Any = self.function(leaf, targets.loss_tokens(part, leaf.dtype, distributions))
            is_tensor = isinstance(losses, Tensor)
            if not is_tensor or losses.shape != leaf.shape[:1] or not losses.is_floating_point():
                given = f"{losses.dtype} of shape {tuple(losses.shape)}" if is_tensor else type(losses).__name__
                raise LossError(
                    f"the loss gave {given} for {len(leaf)} rows; return a floating-point loss for each, of shape "
                    f"({len(leaf)},): they are summed over all ranks and divided by divisor= afterwards"
                )
            total = losses.sum(dtype=torch.float64)
            if not total.requires_grad:  # a constant, or no gradient is wanted
                return total, zeros[1]
            (slopes,) = torch.autograd.grad(total, leaf, allow_unused=True)
            return total.detach(), zeros[1] if slopes is None else slopes
        except Exception as error:
            # The caller's function may raise anything.
            self.error = error
            return zeros
        finally:
            distributions.release_logits()
