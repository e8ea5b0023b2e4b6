"""Collectives as torch's autograd and compiler take them: with a stated gradient, and outside compiled graphs."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor


def apply_with_gradient(
    x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `forward(x)`, whose gradient `backward` turns into that of x; no tensor is saved for it."""
    # In evaluation a node of autograd, nine a layer, would only cost the host.
    if not torch.is_grad_enabled():
        return forward(x)
    return _StatedGradient.apply(x, forward, backward)  # pyright: ignore[reportReturnType]


class _StatedGradient(torch.autograd.Function):
    """Autograd's node of `apply_with_gradient`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.run_backward = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.run_backward(gradients[0]), None, None


Function = TypeVar("Function", bound=Callable[..., Any])


def break_graphs_around(fn: Function) -> Function:
    """Make torch.compile end its graph before a call of this function and begin another after it.

    Where no compiled code runs, the function is called directly: torch's switch costs the host ten more calls.
    """
    disabled = torch.compiler.disable(fn)
    from torch._C._dynamo.eval_frame import get_eval_frame_callback  # None where nothing that is compiled runs
    from torch._dynamo.eval_frame import skip_code

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if get_eval_frame_callback() is None:
            return fn(*args, **kwargs)
        return disabled(*args, **kwargs)

    skip_code(cast(Any, run).__code__)  # so that dynamo compiles no frame of `run` itself
    # Dynamo knows the function that `disable` returns by its attributes, and takes copies of them on another function
    # for real only where this one is the other's own id.
    vars(run).update(vars(disabled) | {"_torchdynamo_wrapper_id": id(run)})
    return cast(Function, run)
