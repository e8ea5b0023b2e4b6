"""Rows to members that know only by asking how many come, and their gradients back."""

import numpy as np
import pytest
import torch

from longspan.comm import World
from longspan.comm.row_exchange import all_to_all_rows, exchange_counts
from longspan.errors import CommError
from longspan.layout import Layout
from longspan.testing import backend, run_ranks

TABLES = {
    "uneven": [[0, 3, 1], [2, 0, 5], [4, 1, 2]],
    "one sends nothing, one receives nothing": [[0, 0, 0], [3, 0, 1], [2, 0, 0]],
    "nothing moves": [[0, 0, 0]] * 3,
}


def _row(sender: int, member: int, i: int) -> float:
    return 100.0 * sender + 10.0 * member + i


def _travel(rank: int, table: list[list[int]]) -> tuple[list[list[int]], list[float], list[float]]:
    """Counts that this rank learns, the rows that arrive, and the gradient of those sent: 2 x the arrived place + 1."""
    with World(Layout(ranks=3), backend=backend()) as world:
        channel = world.channels.find_channel(range(3))
        counts = exchange_counts(torch.tensor(table[rank], device=world.device), channel)
        going = [_row(rank, m, i) for m, n in enumerate(table[rank]) for i in range(n)]
        x = torch.tensor(going, dtype=torch.float64, device=world.device).unsqueeze(1).expand(-1, 2).contiguous()
        x.requires_grad_()
        arrived = all_to_all_rows(x, table[rank], [row[rank] for row in table], channel)
        places = torch.arange(len(arrived), device=world.device).unsqueeze(1)
        (arrived * (2 * places + 1)).sum().backward()
        assert x.grad is not None and torch.equal(x.grad[:, 0], x.grad[:, 1])
        return counts, arrived[:, 0].tolist(), x.grad[:, 0].tolist()


@pytest.mark.parametrize("case", TABLES)
def test_rows_travel_and_their_gradients_return(case: str) -> None:
    table = TABLES[case]
    answers = run_ranks(_travel, 3, table)
    expected = [[_row(s, m, i) for s in range(3) for i in range(table[s][m])] for m in range(3)]
    places = {value: 2.0 * place + 1.0 for rows in expected for place, value in enumerate(rows)}
    for rank, (counts, arrived, gradient) in enumerate(answers):
        assert counts == table and arrived == expected[rank]
        assert gradient == [places[_row(rank, m, i)] for m in range(3) for i in range(table[rank][m])]


def _refused(rank: int) -> None:
    with World(Layout(ranks=1)) as world:
        for sends, receives in (([3], [2]), ([1, 1], [2]), ([2], [])):
            with pytest.raises(CommError, match="all_to_all_rows got 2 rows to send as"):
                all_to_all_rows(torch.zeros(2, 1), sends, receives, world.channels.find_channel((0,)))


def test_counts_that_do_not_fit_are_refused() -> None:
    run_ranks(_refused, 1)


def test_random_tables_cover_every_row() -> None:
    table = np.random.default_rng(0).integers(0, 9, (3, 3)).tolist()
    arrived = [row for _, rows, _ in run_ranks(_travel, 3, table) for row in rows]
    assert len(arrived) == len(set(arrived)) == int(np.sum(table))
