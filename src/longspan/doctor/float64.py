"""Models of transformers wholly in float64, whose softmax, norms, routers and rotary angles are float32 otherwise.

Rounding to float32, which differs with the number of rows, would hide errors below 1e-7.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Float64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def whole_float64() -> Iterator[None]:
    """Inside, whatever a model would cast to float32 is float64.

    torch leaves modes out of a backward pass, which may recompute layers: there the mode is entered again.
    """
    engine: Any = torch.autograd
    run = engine._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with _Float64():
            return run(*args, **kwargs)

    engine._engine_run_backward = run_backward
    try:
        with _Float64():
            yield
    finally:
        engine._engine_run_backward = run
