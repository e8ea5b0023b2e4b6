"""A loss of one's own of each target: a function of log-probabilities and of what came with the documents.

    def policy_loss(log_probs, at):
        ratio = (log_probs - at["old_log_probs"]).exp()
        return -torch.minimum(ratio * at["advantage"], ratio.clamp(0.8, 1.2) * at["advantage"])

    run_step(model, plan, documents, world, optimizer, loss=policy_loss, divisor=len(documents))

The function runs once for each chunk of logits, outside of what activation recomputation runs again. The gradient is
that of the sum of what it returns, so that its losses must depend on their own rows alone: which rows are in a chunk,
and on which rank, is the plan's affair.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longspan.errors import LossError
from longspan.train.loss import Head, chunked_loss
from longspan.train.own_loss.loss_rows import BatchTargets, LossRows
from longspan.train.reading.read_rows import LocalBatch

LossFunction = Callable[[Tensor, LossRows], Tensor]


class TokenLoss:
    """Runs a caller's function over the targets of a step's micro-batches.

    An error of the function is kept in `error`, and the passes go on, so that this rank does not leave the others
    alone in a collective.
    """

    def __init__(self, function: LossFunction, chunk_rows: int) -> None:
        self.error: Exception | None = None
        self._function, self._chunk_rows = function, chunk_rows

    def __call__(self, batch: LocalBatch, hidden: Tensor, head: Head) -> Tensor:
        """The sum of the losses of a micro-batch's rows (T, D), a float64 scalar."""
        targets = BatchTargets(batch, hidden.device)
        return chunked_loss(hidden, targets.targets, partial(self._losses, targets), head, self._chunk_rows)

    def _losses(self, targets: BatchTargets, log_probs: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """The sum of the losses of some targets, and the derivative of each by its log-probability."""
        nothing = log_probs.new_zeros((), dtype=torch.float64), torch.zeros_like(log_probs)
        if self.error is not None:
            return nothing
        try:
            leaf = log_probs.detach().requires_grad_(torch.is_grad_enabled())
            losses = checked(self._function(leaf, targets.rows(part, leaf.dtype)), leaf)
            total = losses.sum(dtype=torch.float64)
            if not total.requires_grad:  # a constant, or no gradient is wanted
                return total, nothing[1]
            (slopes,) = torch.autograd.grad(total, leaf, allow_unused=True)
            return total.detach(), nothing[1] if slopes is None else slopes
        except Exception as error:  # of the caller's function
            self.error = error
            return nothing


def checked(losses: Any, log_probs: Tensor) -> Tensor:
    """What a loss of one's own returned. Raises LossError unless it is a loss for each row."""
    if isinstance(losses, Tensor) and losses.shape == log_probs.shape and losses.is_floating_point():
        return losses
    shape = f"{losses.dtype} of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
    raise LossError(
        f"the loss gave {shape} for {len(log_probs)} log-probabilities; return a floating-point loss for each, of "
        f"shape ({len(log_probs)},): they are summed over all ranks and divided by divisor= afterwards"
    )
