"""What trials of small copies share: each runs once for a configuration, in float64, and compares by one measure."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack  # pyright: ignore[reportPrivateUsage]

_T = TypeVar("_T")


class _CastsToFloat64(TorchFunctionMode):
    """Turns casts to float32, by `.float()` or a dtype among the arguments, into casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        # A view of the same bytes as another dtype is no cast.
        if func is Tensor.view:
            return func(*args, **(kwargs or {}))
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def compute_in_float64() -> Iterator[None]:
    """Cast to float64, inside the `with` block, whatever a model casts to float32. torch leaves modes out of a backward
    pass, which may recompute layers: there the mode is entered again. Inside another such block it changes nothing.
    """
    if any(isinstance(mode, _CastsToFloat64) for mode in _get_current_function_mode_stack()):
        yield
        return
    engine: Any = torch.autograd
    run = engine._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with _CastsToFloat64():
            return run(*args, **kwargs)

    engine._engine_run_backward = run_backward
    try:
        with _CastsToFloat64():
            yield
    finally:
        engine._engine_run_backward = run


def run_trial_once(key: Hashable, trial: Callable[[], _T]) -> _T:
    """Try a small copy on the host once for each key in a process, in one thread; random numbers stay as they were.

    Models of trials are in float64: what their classes cast to float32 is cast to float64, as their weights are.
    """
    if key not in _results:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.random.fork_rng(devices=[]), compute_in_float64():
                _results[key] = trial()
        finally:
            torch.set_num_threads(threads)
    return _results[key]


_results: dict[Hashable, Any] = {}


def trial_error_text(error: Exception) -> str:
    """Write the error of a configuration, a constructor or a forward pass, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def parameter_gradients(loss: Tensor, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor | None]:
    """Compute the gradient of a loss for every parameter that requires one; None if the loss does not depend on it."""
    trained = {name: parameter for name, parameter in parameters if parameter.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return dict(zip(trained, gradients, strict=True))


def relative_error(result: Tensor, exact: Tensor, least: float = 1e-30) -> float:
    """Return the largest difference over the largest value, which is at least `least`; infinite instead of NaN."""
    error = float((result - exact).abs().max() / exact.abs().max().clamp(min=least))
    return math.inf if math.isnan(error) else error
