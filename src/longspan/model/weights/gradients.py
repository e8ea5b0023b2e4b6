"""The `.grad` of parameters: added to, exchanged, and set aside while another backward pass runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


def add_gradient(leaf: Tensor, gradient: Tensor | None) -> None:
    """Add to `.grad` of a parameter or another leaf, in place if there is one; None adds nothing."""
    if gradient is not None:
        leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)


def exchange_gradients(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None] | None = None
) -> list[Tensor | None]:
    """Set `.grad` of parameters, in their order (None: no gradients); return what each was, to be set again."""
    earlier = [parameter.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients or [None] * len(parameters), strict=True):
        parameter.grad = gradient
    return earlier


@contextmanager
def set_earlier_gradients_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let `.grad` hold only gradients of backward passes inside; earlier ones are added at the end, or put back."""
    earlier = exchange_gradients(parameters)
    try:
        yield
    except BaseException:
        exchange_gradients(parameters, earlier)
        raise
    for parameter, gradient in zip(parameters, earlier, strict=True):
        add_gradient(parameter, gradient)
