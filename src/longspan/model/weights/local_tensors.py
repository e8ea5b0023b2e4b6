"""This rank's part of tensors that may be DTensors: its values, its place in the whole, and sums of its gradients.

Which part of a parameter a rank holds is worked out in integers, without communication.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True)
class LocalPart:
    """The block of a parameter that a rank holds (a slice with start and stop for each dim), and its dtype."""

    block: tuple[slice, ...]
    dtype: torch.dtype

    @classmethod
    def from_parameter(cls, parameter: Tensor) -> "LocalPart":
        """Return which block of a parameter this rank holds.

        Tensor and expert parallelism cut first, FSDP2 what they leave, both as `torch.chunk` does.
        """
        if not isinstance(parameter, DTensor):
            return cls(tuple(slice(0, size) for size in parameter.shape), parameter.dtype)
        block = local_block(parameter.shape, parameter.device_mesh, parameter.placements)
        sizes = tuple(part.stop - part.start for part in block)
        local_shape = tuple(parameter._local_tensor.shape)
        assert sizes == local_shape, f"{block} of {parameter.placements} is not {local_shape}"
        return cls(block, parameter.dtype)


def local_block(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[slice, ...]:
    """Return this rank's block of a tensor of this shape.

    The mesh's last axis cuts first; an axis whose placement has no `dim` cuts nothing.
    """
    block = [slice(0, size) for size in shape]
    for axis in reversed(range(mesh.ndim)):
        dim = getattr(placements[axis], "dim", None)
        if dim is not None:
            start = block[dim].start
            stop = block[dim].stop
            step = -(-(stop - start) // mesh.size(axis))
            first = min(stop, start + mesh.get_local_rank(axis) * step)
            block[dim] = slice(first, min(stop, first + step))
    return tuple(block)


def local_tensor(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, differentiably; any other tensor is returned as it is."""
    if not isinstance(x, DTensor):
        return x
    # a view costs the host time, and is not needed
    return x.to_local() if torch.is_grad_enabled() else x._local_tensor


def add_gradient(leaf: Tensor, gradient: Tensor | None) -> None:
    """Add to `.grad` of a parameter or another leaf, in place if there is one; None adds nothing."""
    if gradient is not None:
        leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)


def exchange_gradients(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None] | None = None
) -> list[Tensor | None]:
    """Set `.grad` of parameters (None: no gradients); return what it was."""
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


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tied parameter to the parameter's first name.

    >>> tied_names(load_model(preset="qwen3-tiny", vocab_size=64))
    {'lm_head.weight': 'model.embed_tokens.weight'}
    """
    first = dict[int, str]()
    names = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    return {name: first_name for name, first_name in names.items() if name != first_name}
