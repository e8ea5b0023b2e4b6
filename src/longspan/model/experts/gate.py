"""The gate between an expert's two products: SiLU(first half) · second half of each row, in one pass over memory.

Where a model's gate is this one, as transformers has it by default, and Triton is there; any other is the model's own
code, as everything is on CPUs.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu
from transformers.integrations import moe

from longspan.model.experts.triton_kernels import kernels_for

_COLUMNS = 1024  # of a row, that a program has


def gated(experts: nn.Module, x: Tensor) -> Tensor:
    """Rows (S, 2 I) of gates and values to (S, I), by the model's gate."""
    module: Any = experts
    return one_pass(x) if _is_plain(module) and kernels_for(x) is not None else module._apply_gate(x)


def one_pass(x: Tensor) -> Tensor:
    """SiLU(first half) · second half of rows (S, 2 I), by the kernel: (S, I)."""
    return _Gated.apply(x)  # pyright: ignore[reportReturnType]


def _is_plain(experts: Any) -> bool:
    by_default = getattr(moe, "_default_apply_gate", None)
    own = getattr(type(experts), "_apply_gate", None)
    return own is not None and own is by_default and _is_silu(experts.act_fn)


@cache
@torch.no_grad()
def _is_silu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Tried by numbers, as transformers has several classes for it, and LFM2-MoE torch's function."""
    if isinstance(activation, nn.Module) and next(activation.parameters(), None) is not None:
        return False
    x = torch.linspace(-20.0, 20.0, 81)
    return torch.allclose(activation(x), silu(x), rtol=1e-6)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = x.new_empty(len(x), x.shape[1] // 2)
        _launch("gated", x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        _launch("gated_backward", x, gradients[0].contiguous(), dx)
        return dx


def _launch(name: str, x: Tensor, *others: Tensor) -> None:
    rows, width = len(x), x.shape[1] // 2
    if rows and width:
        blocks = rows, -(-width // _COLUMNS)
        getattr(kernels_for(x), name)[blocks](x, *others, x.stride(0), width, COLUMNS=_COLUMNS)
