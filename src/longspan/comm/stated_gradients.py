"""Collectives in torch's autograd: what all members do with a tensor, and with the gradient of what they made of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def apply_with_gradient(
    x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `forward(x)`, whose gradient `backward` turns into that of x; no tensor is saved for it."""
    if not torch.is_grad_enabled():  # in evaluation a node of autograd, nine a layer, would only cost the host
        return forward(x)
    return _Applied.apply(x, forward, backward)  # pyright: ignore[reportReturnType]


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.run_backward = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.run_backward(gradients[0]), None, None
