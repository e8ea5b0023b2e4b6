"""The matrix of training: daily every entry, nightly every pair; dropped terms are noticed. A bench runs all of it.

A dynamic plan of one slot has no degree to choose, so dynamic rows have two slots or more here.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from longspan.testing import run_ranks
from tests.mutation import mutated
from tests.pairs import every_pair
from tests.train.steps import matrix
from tests.train.steps.matrix import AXES, BATCHES, Combination, Errors, worst_of_ranks


def chooses(values: tuple[Any, ...]) -> bool:
    c = Combination(*values)
    return c.fits and (c.planner == "fixed" or c.slots > 1)


# Beside every pair: tensor parallelism under dynamic plans without a pipeline, of two slots and of four.
BESIDE_TP: list[tuple[Any, ...]] = [
    ("qwen3-moe", "dynamic", (2, False), (1, 1), 2, 3, "float64", 4),
    ("gpt-oss", "dynamic", (2, True), (1, 1), 1, 1, "float64", 4),
    ("gpt-oss", "dynamic", (2, False), (1, 1), 2, 2, "float64", 8),
    ("qwen3", "dynamic", (2, True), (1, 1), 1, 3, "float32", 8),
]
PAIRS = [Combination(*values) for values in (*BESIDE_TP, *every_pair(AXES, 0, chooses))]


OF_FOUR = [c for c in PAIRS if c.ranks == 4]
ENTRIES = [OF_FOUR[i] for i in (2, 3, 4, 7)]


def test_the_daily_rows_have_every_entry() -> None:
    daily = [{getattr(c, axis.name) for c in ENTRIES} for axis in fields(Combination)]
    missing = [value for values, of_axis in zip(AXES, daily, strict=True) for value in values if value not in of_axis]
    assert missing == [8]


@pytest.mark.parametrize(
    "combinations",
    [
        pytest.param(ENTRIES, id="4"),
        pytest.param([c for c in OF_FOUR if c not in ENTRIES], id="more of 4", marks=pytest.mark.whole),
        pytest.param([c for c in PAIRS if c.ranks == 8], id="8", marks=pytest.mark.whole),
    ],
)
def test_every_pair_of_the_matrix(combinations: list[Combination]) -> None:
    wanted, steps = matrix.wanted_of(combinations), [1 if i % 6 else len(BATCHES) for i in range(len(combinations))]
    found = worst_of_ranks(run_ranks(matrix.run, combinations[0].ranks, combinations, wanted, steps, timeout=280))
    over = [e.over_limit(c.dtype, wanted[c.key].own_error) for c, e in zip(combinations, found, strict=True)]
    wrong = [(c, e) for c, e, most in zip(combinations, found, over, strict=True) if not most <= 1]
    assert not wrong, f"{len(wrong)} of {len(combinations)}:\n" + "\n".join(f"{error} {c}" for c, error in wrong)


# What is dropped, and what must notice it: the combinations of four ranks that every run of the suite has.
Dropped = tuple[str, str, str]
MUTATIONS: list[tuple[Dropped, Callable[[Combination], bool]]] = [
    (("comm.tp_collectives", '_all_reduce(gradient, world_key, "sum of gradients over tp")', "gradient"),
     lambda c: c.tp == (2, False)),
    (("model.tensor_parallel.sequence_parallel", "sum_partial_gradients(norm, key)", "pass"),
     lambda c: c.tp[1]),
    (("model.experts.visits", "by_row * weights.unsqueeze(2)).sum(1)", "by_row)[:, 0]"),
     lambda c: c.ep == 2 and c.family == "gpt-oss"),  # prepare() refuses the other family
    (("model.experts.moe", "send_routed_rows(x, sends,", "send_routed_rows(x.detach(), sends,"), lambda c: c.ep == 2),
    (("model.pipeline.stages", "local_slice.copy_(sum_parts([*parts.values()]))", "pass"),
     lambda c: c.family == "qwen3" and c.stages[0] == 2),
    (("model.sharding", "set_gradient_divide_factor(1.0)", "set_gradient_divide_factor(2.0)"),
     lambda c: c.ep == 1),
]  # fmt: skip
NOTICED = [next(c for c in PAIRS if c.ranks == 4 and notices(c)) for _, notices in MUTATIONS]


def _mutated(
    rank: int, dropped: list[Dropped], combinations: list[Combination], wanted: matrix.Answers
) -> list[Errors]:
    found = []
    for change, combination in zip(dropped, combinations, strict=True):
        with mutated(change):
            found += matrix.run(rank, [combination], wanted, [1])
    return found


@pytest.mark.whole
@pytest.mark.parametrize("chosen", [[0, 3], [1, 2, 4, 5]])  # of the mutations, by their numbers
def test_every_dropped_term_is_noticed(chosen: list[int]) -> None:
    dropped, noticed = [MUTATIONS[i][0] for i in chosen], [NOTICED[i] for i in chosen]
    wanted = matrix.wanted_of(noticed)
    found = worst_of_ranks(run_ranks(_mutated, 4, dropped, noticed, wanted))
    for change, c, errors in zip(dropped, noticed, found, strict=True):
        assert errors.over_limit(c.dtype, wanted[c.key].own_error) > 10, (change, c, errors)
