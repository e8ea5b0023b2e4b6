"""Segments of layers, by themselves and with MLPs in tiles: loss and gradients of the plain step, in float64."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from longspan.comm import World
from longspan.doctor.stock import whole_float64
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import prepare
from longspan.testing import backend, run_ranks
from tests.model.activations.test_tiles import EXACT, MODELS, make_plan, take_step
from tests.model.stock import prepare_untried, tiny, worst

Case = tuple[str, Any, int, int]


def _errors(rank: int, home: Layout, cases: Sequence[Case], options: dict[str, Any]) -> dict[str, float]:
    """The largest relative error of a model whose layers keep something, in segments, over tiles of so many rows."""
    errors, plan, plain = dict[str, float](), make_plan(home), dict[str, Any]()
    with World(home, backend=backend()) as world, whole_float64():
        for name, words, size, rows in cases:
            if name not in plain:
                plain[name] = take_step(prepare_untried(MODELS[name](), world, **options), plan, world)
            loss, gradients = plain[name]
            how: dict[str, Any] = {"measures": words, "segment_layers": size, "mlp_tile_rows": rows} | options
            here, of_rank = take_step(prepare(MODELS[name](), world, **how), plan, world)
            errors[f"{name}, {words}, {size}, {rows}"] = max(abs(here / loss - 1), worst(of_rank, gradients))
    return errors


OTHERS = [
    (name, words, size, rows)
    for name in MODELS
    for words, size, rows in (("full", 2, 0), ("selective", 3, 5), ("selective+host", 8, 0))
]
SPLIT = {"pipeline_schedule": "zbv", "virtual_stages": 2}


@pytest.mark.parametrize(
    ("home", "cases", "options"),
    [
        (Layout(ranks=2), [("experts", "selective", 3, 5), ("tied embeddings", "full+host", 4, 0)], {}),
        pytest.param(Layout(ranks=2), OTHERS, {}, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=2, ep=2), OTHERS[6:9], {}, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=2, tp=2), OTHERS[:9], {}, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=2, pp=2), [*OTHERS[:2], *OTHERS[6:8]], SPLIT, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=2, pp=2), OTHERS[:3], {}, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=4), OTHERS[:3], {}, marks=pytest.mark.whole),
        pytest.param(
            Layout(ranks=2),
            [("tied embeddings", ("full", "none", "selective", "full+host"), 4, 3)],
            {"reshard_after_forward": False},
            marks=pytest.mark.whole,
        ),
    ],
    ids=["2 slots", "2 slots, all", "2 parts of experts", "tp 2", "folded stages", "2 stages", "4 slots", "mixed"],
)
def test_segments_are_the_plain_step(home: Layout, cases: list[Case], options: dict[str, Any]) -> None:
    for errors in run_ranks(_errors, len(home.ranks), home, cases, options):
        assert errors and max(errors.values()) < EXACT, {case: e for case, e in errors.items() if e >= EXACT}


def test_segments_without_recomputation_are_refused() -> None:
    with World(Layout(ranks=1), backend="gloo") as world:
        with pytest.raises(ModelError, match="segment_layers is -2; use 0"):
            prepare(tiny("qwen3"), world, segment_layers=-2)
        with pytest.raises(ModelError, match=r"segment_layers is 4: .* no layer recomputes"):
            prepare(tiny("qwen3", torch.float64), world, segment_layers=4)
