"""The log-probabilities of targets, and gradients by logits, without a copy of the logits where Triton is there.

On GPUs a kernel reads the logits once for the log-probabilities and once for the gradient, in float32; elsewhere
torch's operations go over a copy in the softmax's type.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_COLUMNS = 4096  # that a program has at a time

# From the derivatives (t,) of a loss by log-probabilities to its gradient (t, V) by logits, in their dtype. Once.
GradientOf = Callable[[Tensor], Tensor]


@torch.no_grad()
def row_softmax(logits: Tensor, ids: Tensor) -> tuple[Tensor, GradientOf]:
    """Log-probabilities (t,) of token `ids` (t,) under logits (t, V), and what makes gradients of derivatives by them.

    The softmax is in float32, in float64 for float64 logits, and so are the log-probabilities. The derivative of a
    row's log-probability by its logits is onehot − softmax.
    """
    logits = logits.detach()
    if in_kernels(logits.dtype, logits.device.type) and logits.stride(1) == 1:
        return _by_kernels(logits, ids)
    at = ids.unsqueeze(1)
    wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)
    wide -= wide.amax(-1, keepdim=True)
    target_logits = wide.gather(1, at).squeeze(1)  # (t,)
    total = wide.exp_().sum(-1)  # (t,)

    def gradient_of(slopes: Tensor) -> Tensor:
        slopes = slopes.to(wide.dtype)
        wide.mul_((-slopes / total).unsqueeze(1)).scatter_add_(1, at, slopes.unsqueeze(1))
        return wide.to(logits.dtype)

    return target_logits - total.log(), gradient_of


def bytes_of_logit(dtype: torch.dtype, device: str) -> int:
    """What a logit takes with its gradient, and with its copy where there is one."""
    return 2 * dtype.itemsize + (0 if in_kernels(dtype, device) else max(4, dtype.itemsize))


def in_kernels(dtype: torch.dtype, device: str) -> bool:
    """Whether kernels work on logits of a dtype on a kind of device."""
    return device == "cuda" and dtype in _KERNEL_DTYPES and _kernels() is not None


def _by_kernels(logits: Tensor, ids: Tensor) -> tuple[Tensor, GradientOf]:
    rows, vocabulary = logits.shape
    log_probs, log_total = logits.new_empty((2, rows), dtype=torch.float32).unbind()
    if rows:
        arguments = (logits, ids, log_probs, log_total, vocabulary, logits.stride(0))
        _kernels().log_probs_of[(rows,)](*arguments, COLUMNS=_COLUMNS)

    def gradient_of(slopes: Tensor) -> Tensor:
        gradient = logits.new_empty((rows, vocabulary))
        if rows:
            slopes = slopes.to(torch.float32).contiguous()
            arguments = (logits, ids, slopes, log_total, gradient, vocabulary, logits.stride(0))
            _kernels().gradient_of[rows, -(-vocabulary // _COLUMNS)](*arguments, COLUMNS=_COLUMNS)
        return gradient

    return log_probs, gradient_of


@cache
def _kernels() -> Any:
    return None if find_spec("triton") is None else import_module("longspan.train.row_softmax.kernels")
