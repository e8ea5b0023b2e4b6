"""Which indices of planned moves go to a device; that the rows are right is shown in test_row_exchange.py."""

import pytest
import torch

from longspan.comm.row_exchange import moves_on_device
from longspan.layout import Partition
from longspan.layout.exchange import cut_into_blocks, plan_moves

Lists = list[list[int]]


@pytest.mark.parametrize(
    ("have", "need", "used"),
    [
        ([[0, 1], [2]], [[0, 2, 1], []], {"local", "arrived"}),  # straight to their places in the result
        ([[0, 1], [2]], [[2, 0, 7], []], {"local", "arrived", "absent"}),
        ([[0], [2, 4]], [[4, 7, 2], []], {"arrived", "absent"}),
        ([[0, 1], [2]], [[2, 2, 0], []], {"stays", "places"}),  # one row in two places: through the pool
        ([[0, 4, 2], [1]], [[1, 2, 4, 0], []], {"stays"}),  # the pool is the result
        ([[0, 1, 2], []], [[2, 0, 1], []], {"places"}),  # nothing arrives
        ([[0, 1, 2], []], [[], [0, 2]], {"leaves"}),
    ],
)
def test_indices_that_are_not_used_stay_on_the_host(have: Lists, need: Lists, used: set[str]) -> None:
    moves = plan_moves(*cut_into_blocks(Partition.from_rows(have), Partition.from_rows(need)), 0)
    there = vars(moves_on_device(moves, torch.device("cpu")))
    assert {name for name, value in there.items() if isinstance(value, torch.Tensor) and len(value)} == used
