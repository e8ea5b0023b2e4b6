"""Which part of a whole parameter this rank holds, in integers, worked out without communication."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True)
class HeldPart:
    """A block of a parameter (a slice with start and stop for each dim), and the parameter's dtype."""

    block: tuple[slice, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, parameter: Tensor) -> "HeldPart":
        """This rank's part.

        Tensor and expert parallelism cut a parameter first and FSDP2 cuts what they leave, both as `torch.chunk` does:
        what a rank holds is one block, whether or not the ranks divide the dim. The mesh names the last cut first.
        """
        if not isinstance(parameter, DTensor):
            return cls(tuple(slice(0, size) for size in parameter.shape), parameter.dtype)
        block = block_here(parameter.shape, parameter.device_mesh, parameter.placements)
        sizes, here = tuple(part.stop - part.start for part in block), tuple(parameter._local_tensor.shape)
        assert sizes == here, f"{block} of {parameter.placements} is not {here}"
        return cls(block, parameter.dtype)


def block_here(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[slice, ...]:
    """This rank's block of a tensor of this shape, a slice with start and stop for each dim."""
    block = [slice(0, size) for size in shape]
    for axis in reversed(range(mesh.ndim)):
        dim = getattr(placements[axis], "dim", None)
        if dim is not None:
            block[dim] = _chunk(block[dim], mesh.size(axis), mesh.get_local_rank(axis))
    return tuple(block)


def _chunk(part: slice, count: int, index: int) -> slice:
    """The piece that `torch.chunk` makes; empty past the last."""
    size = part.stop - part.start
    step = -(-size // count)
    start = min(size, index * step)
    return slice(part.start + start, part.start + min(size, start + step))
