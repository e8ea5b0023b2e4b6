"""A loss of one's own of each target: a function of log-probabilities and of what came with the documents.

    def policy_loss(log_probs, at):
        ratio = (log_probs - at["old_log_probs"]).exp()
        return -torch.minimum(ratio * at["advantage"], ratio.clamp(0.8, 1.2) * at["advantage"])

    run_step(model, plan, documents, world, optimizer, loss=policy_loss, divisor=len(documents))

The function runs once for each chunk of logits, outside of what activation recomputation runs again. The gradient is
that of the sum of what it returns, so that its losses must depend only on their own rows: which rows are in a chunk,
and on which rank, is the plan's affair.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.comm import to_device
from longspan.errors import DataError, LossError
from longspan.train.loss import Head, Targets, chunked_loss
from longspan.train.reading.read_rows import WEIGHTS, LocalBatch, documents_and_positions, target_rows
from longspan.train.terms.distribution import Distributions


@dataclass(frozen=True, eq=False)
class LossRows:
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
        """Return a number (n,) of the rows' distributions. Raises LossError for LossRows that a caller made without."""
        if self.distributions is None:
            raise LossError(f"at.{name} is not known, for these LossRows were made without logits; pass distributions=")
        return self.distributions.value(name)


class BatchTargets:
    """The targets of one micro-batch on this rank, on the host and on the device."""

    def __init__(self, batch: LocalBatch, device: torch.device) -> None:
        """Take the rows of a batch that predict a token: their documents, positions and weights (n,) on the host."""
        rows = target_rows(batch)
        self.documents, positions = (values[rows] for values in documents_and_positions(batch.shard))
        self.weights = batch.values[WEIGHTS][rows] if WEIGHTS in batch.values else np.ones(len(rows))
        self.positions = positions
        self.targets: Targets = Targets(to_device(rows, device), to_device(batch.labels[rows], device))
        self._values = {name: values[rows] for name, values in batch.values.items()} | {WEIGHTS: self.weights}
        self._device = device

    def rows(self, part: slice, dtype: torch.dtype, distributions: Distributions | None = None) -> LossRows:
        """Return some of these targets as the caller's function gets them, numbers in `dtype` on the device."""
        numbers = {name: to_device(x[part], self._device).to(dtype) for name, x in self._values.items()}
        return LossRows(
            to_device(self.documents[part], self._device),
            to_device(self.positions[part], self._device),
            self.targets.ids[part],
            MappingProxyType(numbers),
            distributions,
        )


LossFunction = Callable[[Tensor, LossRows], Tensor]


class TokenLoss:
    """Runs a caller's function over the targets of a step's micro-batches.

    An error of the function is kept in `error`, and the passes go on, so that this rank does not leave the others
    in a collective.
    """

    def __init__(self, function: LossFunction, chunk_rows: int) -> None:
        """Take the function, which gets `chunk_rows` targets at a time (0: by a budget of bytes)."""
        self.error: Exception | None = None
        self._function, self._chunk_rows = function, chunk_rows

    def __call__(self, batch: LocalBatch, hidden: Tensor, head: Head) -> Tensor:
        """Return the sum of the losses of a micro-batch's rows (T, D), a float64 scalar."""
        targets = BatchTargets(batch, hidden.device)
        return chunked_loss(hidden, targets.targets, partial(self._losses_and_slopes, targets), head, self._chunk_rows)

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
            losses = check_losses(self._function(leaf, targets.rows(part, leaf.dtype, distributions)), leaf)
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
    """Return the losses that the caller's function returned. Raises LossError unless there is one for each row."""
    if isinstance(losses, Tensor) and losses.shape == log_probs.shape and losses.is_floating_point():
        return losses
    shape = f"{losses.dtype} of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
    raise LossError(
        f"the loss gave {shape} for {len(log_probs)} log-probabilities; return a floating-point loss for each, of "
        f"shape ({len(log_probs)},): they are summed over all ranks and divided by divisor= afterwards"
    )
