"""The loss of local rows as a sum over targets: of logits, or of hidden states a few rows at a time.

In chunks the logits of all rows never exist at once: gradients are made in forward, chunk by chunk, so that no logits
are computed twice, and only of the rows that predict a token. What turns hidden states into logits is a head
(`model/seams/row_loss.py`), what a row's loss is a function of its target's log-probability. Dividing, and
summing over slots, is the step's business (`step.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longspan.comm import to_device
from longspan.data.document import NO_TARGET
from longspan.train.log_probs import (
    GradientOf,
    add_entropy_gradient,
    cut_into_chunks,
    row_scores,
    target_log_probs_and_gradient,
    uses_softmax_kernels,
)
from longspan.train.rows.read_rows import WEIGHTS, LocalBatch, target_rows

# Logits, and what is computed from them, take so many bytes at a time.
CHUNK_BYTES = {"cuda": 2 << 30}
CHUNK_BYTES_ELSEWHERE = 64 << 20

# It takes log-probabilities (t,) of some targets, the slice of all targets that these are, and their logits (t, V). It
# returns the sum of their losses (a float64 scalar), the derivative of each loss by its log-probability (t,), and where
# there is one the derivative by its entropy (t,). For a head of scores, these stand in place of log-probabilities. A
# loss of whole distributions returns its gradient at the logits (t, V) in place of derivatives.
LossOfRows = Callable[[Tensor, slice, Tensor], tuple[Tensor, ...]]


class Head(Protocol):
    """A function from hidden states (t, D) to logits (t, V): an OutputHead, say."""

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def makes_scores(self) -> bool:
        """Whether a row's columns are its scores, and no distribution of the next token."""
        ...

    def __call__(self, hidden: Tensor) -> Tensor: ...


class GivenLogits(NamedTuple):
    """The head of a model that made logits (T, V) of all rows already."""

    vocabulary: int
    parameters: tuple[nn.Parameter, ...] = ()
    makes_scores: bool = False

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden


class TemperedHead(NamedTuple):
    """A head whose logits (t, V) are divided by a temperature, in float32 at least."""

    head: Head
    temperature: float
    # Scores have no temperature.
    makes_scores: bool = False

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return self.head.parameters

    @property
    def vocabulary(self) -> int:
        return self.head.vocabulary

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits divided by the temperature, in float32 at least."""
        logits = self.head(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature


class Targets(NamedTuple):
    """The local rows (n,) that predict a token, and the token's id (n,), on the model's device."""

    rows: Tensor
    ids: Tensor

    def with_padding(self) -> "Targets":
        """Return them, or one row for a rank without targets: a head may enter collectives, which need all ranks."""
        if len(self.rows):
            return self
        return Targets(self.rows.new_zeros(1), self.ids.new_zeros(1))


@dataclass(frozen=True)
class CrossEntropy:
    """The default loss: cross entropy of targets times weights, of `chunk_rows` rows at a time (0: as many as fit)."""

    chunk_rows: int = 0

    def __call__(self, batch: LocalBatch, hidden: Tensor, head: Head) -> Tensor:
        """Return the sum of the losses of a micro-batch's rows (T, D), a float64 scalar."""
        rows = target_rows(batch)
        device = hidden.device
        targets = Targets(to_device(rows, device), to_device(batch.labels[rows], device))
        if WEIGHTS not in batch.values:
            return chunked_loss(hidden, targets, cross_entropy, head, self.chunk_rows)
        weights = to_device(batch.values[WEIGHTS][rows], device)

        def weighted_loss(log_probs: Tensor, part: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
            """Return the weighted cross entropy of some targets and its derivatives; a LossOfRows."""
            slopes = -weights[part]
            return (slopes * log_probs).sum(dtype=torch.float64), slopes

        return chunked_loss(hidden, targets, weighted_loss, head, self.chunk_rows)


def cross_entropy(log_probs: Tensor, part: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return minus the sum of log-probabilities (t,), and its derivatives, which are −1; a LossOfRows."""
    return -log_probs.sum(dtype=torch.float64), log_probs.new_full(log_probs.shape, -1.0)


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum the cross entropy over rows that have a label: logits (T, V), labels (T,) to a float64 scalar.

    The softmax is in float32 (float64 for float64 logits); rows labelled −100 add nothing and get a zero gradient.
    """
    wide_logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide_logits, labels, ignore_index=NO_TARGET, reduction="none")  # (T,)
    return losses.sum(dtype=torch.float64)


def chunked_loss(hidden: Tensor, targets: Targets, losses: LossOfRows, head: Head, rows: int) -> Tensor:
    """Sum `losses` of the log-probabilities of targets, which `head` predicts from hidden states (T, D).

    Returns a float64 scalar. Forward makes the gradients of hidden states and head as well, so that no logits are made
    twice; backward scales them. Gradients of the head are summed over chunks in float32 (float64 for float64). A chunk
    has `rows` rows; 0: as many as fit in 2 GiB on a GPU, 64 MiB elsewhere. A head may enter collectives: without
    targets it gets a padding row.
    """
    rows = rows or rows_per_chunk(head.vocabulary, hidden.dtype, hidden.device.type)
    parameters = head.parameters
    compute_numbers = row_scores if head.makes_scores else target_log_probs_and_gradient
    if not len(targets.rows):
        targets = targets.with_padding()
        losses = _no_loss
    if torch.is_grad_enabled() and (hidden.requires_grad or parameters):
        return _ChunkedLoss.apply(hidden, targets, losses, head, rows, compute_numbers, *parameters)  # pyright: ignore[reportReturnType]
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for chunk in cut_into_chunks(len(targets.rows), rows):
        logits = head(hidden.index_select(0, targets.rows[chunk]))
        total += losses(compute_numbers(logits, targets.ids[chunk])[0], chunk, logits)[0]
    return total


def _no_loss(log_probs: Tensor, part: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
    return log_probs.new_zeros((), dtype=torch.float64), torch.zeros_like(log_probs)


def rows_per_chunk(vocabulary: int, dtype: torch.dtype, device: str) -> int:
    """Return how many rows' logits are formed at a time: with what is computed from them they fit the chunk's bytes."""
    # a logit and its gradient; without kernels also a copy in float32 at least
    logit_bytes = 2 * dtype.itemsize + (0 if uses_softmax_kernels(dtype, device) else max(4, dtype.itemsize))
    row_bytes = vocabulary * logit_bytes
    return max(1, CHUNK_BYTES.get(device, CHUNK_BYTES_ELSEWHERE) // row_bytes)


def rows_of_two_heads(student_columns: int, teacher_columns: int, hidden: Tensor) -> int:
    """Return how many rows' logits of both models are formed at a time: with what is computed from them they fit half
    of a chunk's bytes, which takes hardly longer.
    """
    device = hidden.device.type
    size, wide = hidden.dtype.itemsize, max(4, hidden.dtype.itemsize)
    # Logits and two gradients of the student, and the teacher's logits; without kernels wide copies too.
    row_bytes = (3 * student_columns + teacher_columns) * size
    if not uses_softmax_kernels(hidden.dtype, device):
        row_bytes += (student_columns + teacher_columns) * wide
    return max(1, CHUNK_BYTES.get(device, CHUNK_BYTES_ELSEWHERE) // 2 // row_bytes)


class _ChunkedLoss(torch.autograd.Function):
    """The sum of `chunked_loss` for autograd: forward computes all gradients of hidden states and head, backward scales
    them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Targets,
        losses: LossOfRows,
        head: Head,
        rows: int,
        compute_numbers: Callable[[Tensor, Tensor], tuple[Tensor, GradientOf]],
        *parameters: Tensor,
    ) -> Tensor:
        """Return the sum of the losses (a float64 scalar), and save the gradients of hidden states and head, chunk by
        chunk.

        A chunk has at most `rows` rows. `compute_numbers` makes log-probabilities or scores from logits and ids, and
        the function of their gradient. `parameters` are the head's, once more, for autograd.
        """
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        hidden_gradient = torch.zeros_like(hidden) if hidden.requires_grad else None
        parameter_gradients: list[Tensor] = []  # sums over chunks
        for chunk in cut_into_chunks(len(targets.rows), rows):
            predicting = targets.rows[chunk]
            with torch.enable_grad():
                rows_in = hidden.detach().index_select(0, predicting).requires_grad_(hidden_gradient is not None)
                logits = head(rows_in)
            log_probs, gradient_of = compute_numbers(logits, targets.ids[chunk])
            with torch.enable_grad():  # a caller's loss is differentiated inside
                loss, slopes, *entropy_slopes = losses(log_probs, chunk, logits)
            total += loss.detach()
            logit_gradient = _gradient_at_logits(logits, slopes.detach(), gradient_of)
            if entropy_slopes:
                add_entropy_gradient(logit_gradient, logits.detach(), entropy_slopes[0])
            del log_probs, gradient_of, slopes  # the memory of the exponentials
            leaves = (*([rows_in] if hidden_gradient is not None else []), *parameters)
            gradients = list(torch.autograd.grad(logits, leaves, logit_gradient))
            del logits, logit_gradient
            if hidden_gradient is not None:
                hidden_gradient.index_copy_(0, predicting, gradients.pop(0))
            is_last = chunk.stop == len(targets.rows)
            parameter_gradients = _add_to_sums(parameter_gradients, gradients, last=is_last)
        ctx.save_for_backward(*([hidden_gradient] if hidden_gradient is not None else []), *parameter_gradients)
        ctx.has_hidden_gradient = hidden_gradient is not None
        ctx.dtypes = [p.dtype for p in parameters]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the saved gradients times that of the loss: of hidden states, None where they need none, and of the
        head's parameters, in their dtypes.
        """
        (loss_gradient,) = gradients
        saved = list(ctx.saved_tensors)
        hidden_gradient = saved.pop(0) * loss_gradient if ctx.has_hidden_gradient else None
        # A sum in float32 is scaled and rounded at once: its wide product never exists.
        parameter_gradients = [
            torch.mul(x, loss_gradient, out=torch.empty_like(x, dtype=dtype))
            for x, dtype in zip(saved, ctx.dtypes, strict=True)
        ]
        return hidden_gradient, None, None, None, None, None, *parameter_gradients


def _gradient_at_logits(logits: Tensor, slopes: Tensor, gradient_of: GradientOf) -> Tensor:
    """Slopes may be that gradient already."""
    return slopes.to(logits.dtype) if slopes.shape == logits.shape else gradient_of(slopes)


def _add_to_sums(sums: list[Tensor], gradients: list[Tensor], *, last: bool) -> list[Tensor]:
    """Sums are in float32 at least; the gradients of an only chunk, the first and `last`, stay in their own dtype."""
    if not sums:
        if last:
            return gradients
        return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in gradients]
    for total, gradient in zip(sums, gradients, strict=True):
        total += gradient
    return sums
