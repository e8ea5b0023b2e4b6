"""Losses of a caller's own of each target (`loss=` of `run_step`).

The function of a loss runs once for each chunk of logits, outside of what recomputation runs again. Its losses may
depend only on their own rows: which rows are in a chunk, and on which rank, is the plan's affair.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longspan.errors import LossError
from longspan.train.loss import Head, chunked_loss
from longspan.train.rows.read_rows import LocalBatch
from longspan.train.terms.loss_tokens import BatchTargets, Distributions, LossTokens

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
        """Return the sum of the caller's losses of a micro-batch's targets, of hidden states (T, D), with gradients."""
        targets = BatchTargets(batch, hidden.device)
        return chunked_loss(
            hidden, targets.targets, partial(self._losses_and_slopes, targets), head, self.chunk_rows
        )

    def _losses_and_slopes(
        self, targets: BatchTargets, log_probs: Tensor, part: slice, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the caller's losses of one chunk of targets, and their derivatives (t,); a LossOfRows.

        After an error in this or an earlier chunk both are 0: the step raises it at its end.
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
    """Return a caller's losses. Raises LossError for what is no floating-point tensor with one loss for each row."""
    if isinstance(losses, Tensor) and losses.shape == log_probs.shape[:1] and losses.is_floating_point():
        return losses
    shape = (
        f"{losses.dtype} of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
    )
    raise LossError(
        f"the loss gave {shape} for {len(log_probs)} rows; return a floating-point loss for each, of "
        f"shape ({len(log_probs)},): they are summed over all ranks and divided by divisor= afterwards"
    )
