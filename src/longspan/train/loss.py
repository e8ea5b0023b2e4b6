"""The loss of local rows as a sum over targets: of logits, or of hidden states a few rows at a time.

In chunks the logits of all rows never exist at once: gradients are made in forward, chunk by chunk, so that no logits
are computed twice. What turns hidden states into logits is a head (`longspan.model.seams.row_loss`). Dividing by the
plan's number of targets, and summing over slots, is the step's business (`step.py`).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longspan.model.seams.row_loss import OutputHead
from longspan.train.document import NO_TARGET

CHUNK_BYTES = {"cuda": 2 << 30}  # of logits and what is computed from them, at a time
CHUNK_BYTES_ELSEWHERE = 64 << 20


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the cross entropy over the rows that have a label: logits (T, V), labels (T,) to a float64 scalar.

    The softmax is in float32 (float64 for float64 logits); rows labelled −100 add nothing and get a zero gradient.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(wide, labels, ignore_index=NO_TARGET, reduction="none")  # (T,)
    return losses.sum(dtype=torch.float64)


def cross_entropy_rows(logits: Tensor, labels: Tensor, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    """The sum of the cross entropy (a float64 scalar) over rows with a label, and its gradient by the logits (t, V).

    The softmax is in float32 (float64 for float64 logits); rows labelled −100 add nothing and get a zero gradient. One
    copy of the logits is made, in the softmax's type.
    """
    real = labels != NO_TARGET
    at = labels.masked_fill(~real, 0).unsqueeze(1)  # (t, 1)
    losses, wide, total = _losses_and_exponentials(logits, at)
    loss = losses.masked_fill(~real, 0).sum(dtype=torch.float64)
    if not differentiate:
        return loss, None
    wide *= (real / total).unsqueeze(1)
    wide.scatter_add_(1, at, -real.to(wide.dtype).unsqueeze(1))
    return loss, wide.to(logits.dtype)


def cross_entropy_of_rows(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of each row (t,), in float64, of logits (t, V) and token ids (t,).

    Their sum is that of `cross_entropy_rows`: the softmax is in float32, in float64 for float64 logits.
    """
    return _losses_and_exponentials(logits, targets.unsqueeze(1))[0].to(torch.float64)


def _losses_and_exponentials(logits: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (t,) of the columns `at` (t, 1); and exp(logits - their largest) (t, V) with its sums (t,)."""
    wide = logits.detach().to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)
    wide -= wide.amax(-1, keepdim=True)
    target_logits = wide.gather(1, at).squeeze(1)  # (t,)
    total = wide.exp_().sum(-1)  # (t,)
    return total.log() - target_logits, wide, total


def chunked_cross_entropy(hidden: Tensor, labels: Tensor, head: OutputHead, rows: int = 0) -> Tensor:
    """The sum of the cross entropy of hidden states (T, D) under a head, `rows` rows at a time: a float64 scalar.

    >>> loss = model(**inputs, row_loss=lambda hidden, head: chunked_cross_entropy(hidden, labels, head))

    Forward makes the gradients of hidden states and head as well, so that no logits are made twice; backward scales
    them. Gradients of the head are summed over chunks in float32 (float64 for float64). `rows` 0 takes what keeps a
    chunk within 2 GiB on a GPU, 64 MiB elsewhere.
    """
    rows = rows or rows_of_chunk(head.vocabulary, hidden.dtype, hidden.device.type)
    parameters = head.parameters
    if torch.is_grad_enabled() and (hidden.requires_grad or parameters):
        return _ChunkedLoss.apply(hidden, labels, head, rows, *parameters)  # pyright: ignore[reportReturnType]
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for part in chunks_of_rows(len(hidden), rows):
        total += cross_entropy_rows(head(hidden[part]), labels[part], False)[0]
    return total


def rows_of_chunk(vocabulary: int, dtype: torch.dtype, device: str) -> int:
    """How many rows' logits are formed at a time: logits, their softmax and their gradient fit the chunk's bytes."""
    row_bytes = vocabulary * (2 * dtype.itemsize + max(4, dtype.itemsize))
    return max(1, CHUNK_BYTES.get(device, CHUNK_BYTES_ELSEWHERE) // row_bytes)


def chunks_of_rows(total: int, rows: int) -> Iterator[slice]:
    """Runs of at most `rows` rows, as even as can be."""
    count = max(1, -(-total // rows))
    for i in range(count):
        yield slice(total * i // count, total * (i + 1) // count)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, labels: Tensor, head: OutputHead, rows: int, *parameters: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        gradient = torch.empty_like(hidden) if hidden.requires_grad else None
        sums: list[Tensor] = []
        for part in chunks_of_rows(len(hidden), rows):
            with torch.enable_grad():
                rows_in = hidden[part].detach().requires_grad_(gradient is not None)
                logits = head(rows_in)
            loss, by_logits = cross_entropy_rows(logits, labels[part], True)
            total += loss
            leaves = (*([rows_in] if gradient is not None else []), *parameters)
            gradients = list(torch.autograd.grad(logits, leaves, by_logits))
            del logits, by_logits
            if gradient is not None:
                gradient[part] = gradients.pop(0)
            sums = _added(sums, gradients, last=part.stop == len(hidden))
        ctx.save_for_backward(*([gradient] if gradient is not None else []), *sums)
        ctx.through, ctx.dtypes = gradient is not None, [p.dtype for p in parameters]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = list(ctx.saved_tensors)
        by_hidden = saved.pop(0) * gradients[0] if ctx.through else None
        by_parameters = [(x * gradients[0]).to(dtype) for x, dtype in zip(saved, ctx.dtypes, strict=True)]
        return by_hidden, None, None, None, *by_parameters


def _added(sums: list[Tensor], gradients: list[Tensor], *, last: bool) -> list[Tensor]:
    """Sums of gradients over chunks; a single chunk's stay as they are, others are summed in float32 at least."""
    if not sums:
        return gradients if last else [x.to(torch.promote_types(x.dtype, torch.float32)) for x in gradients]
    for total, more in zip(sums, gradients, strict=True):
        total += more
    return sums
