"""Scans and convolutions at every degree equal the recurrences row by row."""

import pytest

from longspan.testing import run_ranks
from tests.ssm.parity import LENGTHS, measure


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8])
def test_outputs_and_gradients_are_those_of_the_recurrence(slots: int) -> None:
    for worst in run_ranks(measure, slots, slots, tuple(LENGTHS)):
        assert len(worst) >= 100 and max(worst.values()) <= 1e-11, max(worst.items(), key=lambda item: item[1])
