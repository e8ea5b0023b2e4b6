"""What encoding an item takes, by hand, and that waves are balanced by it."""

import pytest

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import plan_dynamic
from longspan.plan.items import encoder_cost


def test_by_hand() -> None:
    cost = encoder_cost(100, 8, 2, window_layers=3, window=16, patches_per_row=4, flops_per_second=1.0)
    assert cost.linear_seconds == 4 * (6 * 100 + 3 * 14 * 8 * 16)
    assert cost.attention_seconds == 2 * 14 * 8 * 16  # all patches of a row with all of another: 4 x 4


def test_items_are_dealt_by_their_cost() -> None:
    counts, home = (40, 10, 10, 10, 10, 10, 10, 10, 10), Layout(2)
    by_attention = plan_dynamic(counts, home, max_cp=1, cost=encoder_cost(1, 64, 1))
    by_rows = plan_dynamic(counts, home, max_cp=1, cost=encoder_cost(10**6, 1, 0))
    rows = [
        [sum(g.tokens for g in p.micro_batches[0].groups if s in g.slots) for s in (0, 1)]
        for p in (by_attention, by_rows)
    ]
    assert sorted(rows[0]) == [40, 80] and sorted(rows[1]) == [60, 60]


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"full_layers": -1}, "full_layers is -1"),
        ({"window_layers": 2}, "window is 0"),
        ({"patches_per_row": 0}, "is 0"),
    ],
)
def test_wrong_numbers_are_refused(keywords: dict[str, int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        encoder_cost(**{"weights": 1, "width": 1, "full_layers": 1, **keywords})
