"""Families that need a seam of their own equal the stock model, document by document: loss and every gradient."""

from collections.abc import Sequence
from functools import cache, partial

import pytest

from longspan.comm import World
from longspan.layout import Layout
from longspan.testing import backend, run_ranks
from tests.model.seams.families import FAMILIES, LENGTHS, errors_of, here, stock_answer, tiny, whole_float64
from tests.model.stock import texts

CASES = {2: ((2, "p2p", "full"), (2, "all_gather", "selective")), 3: ((3, "p2p", "full"),)}


def _errors(rank: int, ranks: int, families: Sequence[str]) -> dict[tuple[object, ...], tuple[float, float]]:
    errors = {}
    with World(Layout(ranks=ranks), backend=backend()) as world, whole_float64():
        for family in families:
            stock = stock_answer(tiny(family), texts(LENGTHS))
            for cp, kind, recompute in CASES[ranks]:
                errors[family, cp, kind, recompute] = errors_of(
                    partial(tiny, family), world, stock, cp=cp, cp_comm_type=kind, activation_checkpointing=recompute
                )
    return errors


@cache
def _results(ranks: int) -> list[dict[tuple[object, ...], tuple[float, float]]]:
    return run_ranks(_errors, ranks, ranks, here([*FAMILIES]))


@pytest.mark.parametrize("family", here([*FAMILIES]))
@pytest.mark.parametrize("ranks", CASES)
def test_equals_the_stock_model(family: str, ranks: int) -> None:
    for errors in _results(ranks):
        for case, (loss, gradients) in errors.items():
            assert case[0] != family or (loss < 1e-12 and gradients < 1e-12), (case, loss, gradients)
