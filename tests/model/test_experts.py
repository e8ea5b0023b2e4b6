"""Experts over the slots of a home equal the stock model: losses, every gradient, weights after steps."""

from functools import cache

import pytest
import torch

from longspan.layout import Layout
from longspan.testing import run_ranks
from tests.model.test_moe import PLANS, TOLERANCE, Errors, _compare

FAMILIES = ("qwen3-moe", "gpt-oss")
MODELS = [(family, dtype) for family in FAMILIES for dtype in (torch.float64, torch.float32)]
HOMES = [Layout(ranks=2, ep=2), Layout(ranks=4, ep=2), Layout(ranks=4, ep=4)]


@cache
def _results(home: Layout) -> list[dict[tuple[object, ...], Errors]]:
    return run_ranks(_compare, len(home.ranks), home, MODELS)


@pytest.mark.parametrize("home", HOMES, ids=str)
@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_equals_the_stock_model_with_experts_dealt_out(home: Layout, family: str, dtype: torch.dtype) -> None:
    for answer in _results(home):
        cases = {key: errors for key, errors in answer.items() if key[:2] == (family, dtype)}
        assert len(cases) == 2 * len(PLANS)
        for key, (losses, gradients) in cases.items():
            assert gradients < TOLERANCE[dtype] and losses < min(TOLERANCE[dtype], 1e-6), (key, cases[key])
