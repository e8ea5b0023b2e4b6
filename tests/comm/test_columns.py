"""Tensors side by side in one matrix, and apart again."""

import pytest
import torch

from longspan.comm.moves.side_by_side import columns, side_by_side


@pytest.mark.parametrize("sizes", [[(3,)], [(3,), (2, 2)], [(1,), (2,), (2, 1)]])
def test_there_and_back_is_the_identity(sizes: list[tuple[int, ...]]) -> None:
    tensors = [torch.randn(5, *size) for size in sizes]
    matrix = side_by_side(tensors)
    assert matrix.shape == (5, sum(t[0].numel() for t in tensors)) and matrix.is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(columns(matrix, sizes), tensors, strict=True))
