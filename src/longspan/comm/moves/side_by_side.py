"""Several tensors with the same rows as one matrix, so that they travel as one message."""

from collections.abc import Sequence

import torch
from torch import Tensor

Shapes = Sequence[Sequence[int]]


def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors (rows, …) of one dtype as one contiguous matrix (rows, columns); a copy unless there is one alone."""
    if len(tensors) == 1:
        return tensors[0].flatten(1).contiguous()
    return torch.cat([t.flatten(1) for t in tensors], 1)


def columns(matrix: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
    """Views (rows, *shape) of the columns of `side_by_side`, one for each shape."""
    rows, (row, column), start, found = matrix.shape[0], matrix.stride(), matrix.storage_offset(), list[Tensor]()
    for shape in shapes:
        strides, width = list[int](), column
        for size in reversed(shape):
            strides.append(width)
            width *= size
        found.append(matrix.as_strided((rows, *shape), (row, *reversed(strides)), start))
        start += width
    return tuple(found)
