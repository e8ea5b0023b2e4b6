"""Norms of more elements than torch's kernels count, some rows at a time.

torch's kernels of `rms_norm` and `layer_norm` for GPUs multiply a row's number by its width in 32 bits (seen with torch
2.11 on an H200): beyond, rows are silently read from and written to others' places. Kernels of our own, and torch's
operations element by element, count in 64 bits; all of them are tried in `tests/kernels/long_rows.py`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

MOST = 2**31 - 1  # elements of a call


def in_pieces(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """norm(x) of rows x (…, n), by calls of at most MOST elements each.

    >>> y = in_pieces(lambda rows: rms_norm(rows, (4096,), weight, 1e-6), x)
    """
    if x.numel() <= MOST:
        return norm(x)
    longest = max(range(x.ndim - 1), key=lambda dim: x.shape[dim])
    at_once = max(1, MOST * x.shape[longest] // x.numel())
    return torch.cat([norm(rows) for rows in x.split(at_once, longest)], longest)


def split_long_norms(model: nn.Module) -> None:
    """Let the layer norms and RMS norms of a model take any number of rows; those that run by a kernel stay theirs."""
    for norm in model.modules():
        if type(norm).__name__.endswith(("LayerNorm", "RMSNorm")) and "forward" not in vars(norm):
            norm.forward = partial(_forward, norm.forward)


def _forward(norm: Callable[..., Tensor], x: Tensor, *others: object, **named: object) -> Tensor:
    """A norm of rows alone in pieces; what takes more than rows is left to its class."""
    if others or named:
        return norm(x, *others, **named)
    return in_pieces(norm, x)
