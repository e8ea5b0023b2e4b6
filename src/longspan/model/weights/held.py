"""Which part of a whole parameter this rank holds, in integers, worked out without communication."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


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
        block = [slice(0, size) for size in parameter.shape]
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for axis in reversed(range(mesh.ndim)):
                dim = getattr(parameter.placements[axis], "dim", None)
                if dim is not None:
                    block[dim] = _chunk(block[dim], mesh.size(axis), mesh.get_local_rank(axis))
            sizes = tuple(part.stop - part.start for part in block)
            here = tuple(parameter._local_tensor.shape)
            assert sizes == here, f"{block} of {parameter.placements} is not {here}"
        return cls(tuple(block), parameter.dtype)


def _chunk(part: slice, count: int, index: int) -> slice:
    """The piece that `torch.chunk` makes; empty past the last."""
    size = part.stop - part.start
    step = -(-size // count)
    start = min(size, index * step)
    return slice(part.start + start, part.start + min(size, start + step))
