"""This rank's part of tensors that may be DTensors, and gradients that backward passes add to those of earlier ones."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_tensor(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, differentiably; another tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def add_gradient(leaf: Tensor, gradient: Tensor | None) -> None:
    """Add to the gradient of a parameter or another leaf; None adds nothing."""
    if gradient is not None:
        leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)


@contextmanager
def without_earlier_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, `.grad` holds what backward passes inside give; the gradients of earlier ones are added at the end.

    After an error inside, `.grad` is what it was before.
    """
    earlier = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    except BaseException:
        for parameter, gradient in zip(parameters, earlier, strict=True):
            parameter.grad = gradient
        raise
    for parameter, gradient in zip(parameters, earlier, strict=True):
        add_gradient(parameter, gradient)
