"""The matrix of evaluation: some steps under every home always, all of it in `make test-all`."""

import itertools

import pytest

from longspan.testing import run_ranks
from tests.evaluation.matrix import (
    DEGREES,
    DTYPES,
    FAMILIES,
    FEW,
    HOMES,
    PLACEMENTS,
    RANKS,
    WAYS,
    Errors,
    Run,
    few,
    fewest,
    stock_answers,
    take,
    whole,
    worst_of_ranks,
)


def check(runs: list[Run], *, twice: bool, timeout: float = 280) -> list[Errors]:
    found = worst_of_ranks(run_ranks(take, RANKS, runs, stock_answers(runs), twice, timeout=timeout))
    wrong = [(run, errors) for run, errors in zip(runs, found, strict=True) if not errors.over_limit(run.dtype) <= 1]
    assert not wrong, f"{len(wrong)} of {len(runs)}:\n" + "\n".join(f"{errors} {run}" for run, errors in wrong)
    return found


def test_a_few_runs_have_every_pair() -> None:
    steps = [step for run in few() for step in run.steps]
    for axes in itertools.combinations(range(3), 2):
        values = [(DEGREES, DEGREES, WAYS)[axis] for axis in axes]
        assert {tuple(step[axis] for axis in axes) for step in steps} == set(itertools.product(*values))
    assert all(run.refusal is None and run.steps for run in few()) and len(steps) <= 40
    for name, values in (("home", HOMES), ("family", FAMILIES), ("placement", PLACEMENTS[:-1]), ("dtype", DTYPES)):
        assert {getattr(run, name) for run in FEW} == set(values)


def test_the_whole_matrix_has_every_pair_of_degrees_in_every_way() -> None:
    assert all(run.refusal is None for run in whole())
    for family, dtype in itertools.product(FAMILIES, DTYPES):
        for home in (h for h in HOMES if h != "ep 2" or family in ("qwen3-moe", "gpt-oss")):
            runs = [run for run in whole() if (run.family, run.home, run.dtype) == (family, home, dtype)]
            degrees = HOMES[home].degrees
            assert {step for run in runs for step in run.steps} == set(itertools.product(degrees, degrees, WAYS))


def test_the_fewest_runs_have_every_pair_of_degrees() -> None:
    steps = [step for run in fewest() for step in run.steps]
    assert [step[:2] for step in sorted(steps)] == sorted(itertools.product(DEGREES, DEGREES))
    assert {step.way for step in steps} == set(WAYS) and all(run.refusal is None for run in fewest())
    assert sorted(run.family for run in fewest()) == sorted(FAMILIES)


@pytest.mark.parametrize(
    "runs", [pytest.param(runs, marks=pytest.mark.whole) for runs in (fewest(), few())], ids=["fewest", "few"]
)
def test_a_few_runs_are_exact(runs: list[Run]) -> None:
    check(runs, twice=False)


@pytest.mark.whole
@pytest.mark.timeout(14400)
def test_the_whole_matrix() -> None:
    found = check(whole(), twice=True, timeout=14000)
    print(f"{len(found)} runs, worst {worst_of_ranks([[errors] for errors in found])[0]}")
