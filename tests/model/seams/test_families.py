"""Families that need a seam of their own equal the stock model, document by document: loss and every gradient."""

from collections.abc import Sequence
from functools import cache, partial

import pytest

from longspan.comm import World
from longspan.doctor.stock import whole_float64
from longspan.layout import Layout
from longspan.testing import backend, run_ranks
from tests.model.seams.families import FAMILIES, LENGTHS, errors_of, here, tiny
from tests.model.stock import dense_answer, texts
from tests.mutation import mutated

IN_CI = ("opt", "nemotron", "stablelm", "gemma4", "dbrx")  # a family of each kind of block
CASES = {2: ((2, "p2p", "full"), (2, "all_gather", "selective")), 3: ((3, "p2p", "full"),)}


def _errors(rank: int, ranks: int, families: Sequence[str]) -> dict[tuple[object, ...], tuple[float, float]]:
    errors = {}
    with World(Layout(ranks=ranks), backend=backend()) as world, whole_float64():
        for family in families:
            stock = dense_answer(tiny(family), texts(LENGTHS))
            for cp, kind, recompute in CASES[ranks]:
                errors[family, cp, kind, recompute] = errors_of(
                    partial(tiny, family), world, stock, cp=cp, cp_comm_type=kind, activation_checkpointing=recompute
                )
    return errors


@cache
def _results(ranks: int, in_ci: bool) -> list[dict[tuple[object, ...], tuple[float, float]]]:
    return run_ranks(_errors, ranks, ranks, [family for family in here([*FAMILIES]) if (family in IN_CI) == in_ci])


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.whole] * (name not in IN_CI)) for name in here([*FAMILIES])]
)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.whole)])
def test_equals_the_stock_model(family: str, ranks: int) -> None:
    for errors in _results(ranks, family in IN_CI):
        of_family = {case: pair for case, pair in errors.items() if case[0] == family}
        assert of_family and max(max(pair) for pair in of_family.values()) < 1e-12, of_family


MUTANTS = {
    "a window of one more": (
        "attention_calls",
        '"causal": causal, "window": sliding_window,',
        '"causal": causal, "window": sliding_window and sliding_window + 1,',
    ),
    "no scale": ("attention_calls", "scale=scaling,", "scale=None,"),
    "hidden states of the head": (
        "row_loss",
        "_BaseOutput(self._hidden)",
        "_BaseOutput(self._hidden * 1.001)",
    ),
}


def _mutants(rank: int) -> dict[str, float]:
    errors = {}
    with World(Layout(ranks=2), backend=backend()) as world, whole_float64():
        stock = dense_answer(tiny("gemma4"), texts(LENGTHS))
        for name, (module, old, new) in MUTANTS.items():
            with mutated((f"model.seams.{module}", old, new)):
                errors[name] = errors_of(partial(tiny, "gemma4"), world, stock, cp=2)[1]
    return errors


@pytest.mark.skipif(not here(["gemma4"]), reason="this transformers has no Gemma 4")
def test_what_is_dropped_is_noticed() -> None:
    for errors in run_ranks(_mutants, 2):
        assert all(error > 1e-6 for error in errors.values()), errors
