"""This rank's part of tensors that may be DTensors: its values, and its place in the whole.

Which part of a parameter a rank holds is worked out in integers, without communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
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
