"""A rank's rows of parameters that make several things for all heads or features, one after another.

A parameter is sharded as it lies in checkpoints, in equal slices of its rows. Where a rank works with other rows, the
slices are gathered when the module runs and the rank takes its rows; gradients go back the same way, summed where
several ranks have a row.
"""

import torch
from torch import Tensor, nn

from longspan.comm import World
from longspan.comm.moves.tp_collectives import tp_copy_parameter, tp_gather_parameter
from longspan.model.local_tensors import local_tensor
from longspan.model.tensor_parallel.mixer_parts import Even, Fused, packed
from longspan.model.tensor_parallel.styles import View, slice_parameter, wrap_forward


def columnwise_packed(linear: nn.Linear, world: World) -> None:
    """Each rank makes its slices of two things of equal width from the whole input."""
    rows = packed(linear.out_features, 2)
    names = ["weight"] if linear.bias is None else ["weight", "bias"]
    wrap_forward(linear, views={name: rows_here(linear, name, rows, world) for name in names})


def rows_here(owner: nn.Module, name: str, rows: Even | Fused, world: World) -> View:
    """How a parameter or buffer, which may be sharded from here on, becomes this rank's rows."""
    tensor, tp, key = getattr(owner, name), world.home.tp, world.key
    dim = tuple(tensor.shape).index(rows.size)
    if isinstance(rows, Even) and isinstance(tensor, nn.Parameter):
        slice_parameter(owner, name, dim, world)
        return local_tensor
    sizes, order = (Fused((rows,)) if isinstance(rows, Even) else rows).pieces(tp, world.coordinates.tp)
    if not isinstance(tensor, nn.Parameter):
        return lambda x: _take(x, dim, sizes, order)
    assert dim == 0, (name, tensor.shape)
    if rows.size % tp:
        return lambda x: _take(tp_copy_parameter(x, key), 0, sizes, order)
    slice_parameter(owner, name, 0, world)
    return lambda x: _take(tp_gather_parameter(local_tensor(x), key), 0, sizes, order)


def _take(x: Tensor, dim: int, sizes: list[int], order: list[int]) -> Tensor:
    pieces = x.split(sizes, dim)
    return torch.cat([pieces[i] for i in order], dim)
