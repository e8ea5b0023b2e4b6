"""What trials of small copies share: each runs once for a configuration, and compares by one measure."""

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_T = TypeVar("_T")


def run_trial_once(key: Hashable, trial: Callable[[], _T]) -> _T:
    """Try a small copy on the host once for each key in a process, in one thread; random numbers stay as they were."""
    if key not in _results:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.random.fork_rng(devices=[]):
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
