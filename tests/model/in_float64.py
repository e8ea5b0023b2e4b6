"""Models that compute in float32 here and there, as routers and norms of transformers do, wholly in float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Float64(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if options.get("dtype") is torch.float32:
                options["dtype"] = torch.float64
        return func(*args, **options)


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside, tensors of float64 are not turned into float32, so that 1e-12 can be asked of such a model.

    Rounding to float32 would differ by 1e-7 between one matrix product and another of the same rows. torch leaves modes
    out of a backward pass, which may recompute layers: there it is entered again.
    """
    run = torch.autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with _Float64():
            return run(*args, **kwargs)

    with _Float64(), patch("torch.autograd._engine_run_backward", run_backward):
        yield
