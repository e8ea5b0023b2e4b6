"""Encoders and a language model in homes of their own: every gradient is that of one process without parallelism."""

import pytest

from longspan.testing import run_ranks
from tests.pairs import every_pair
from tests.train.multimodal.cases import AXES, ON_4, Case, fits
from tests.train.multimodal.oracle import LIMITS, Errors, answers_of, run, worst_of_ranks

FEW = [Case(*values) for values in every_pair((ON_4, *AXES), 0, fits)]


def check(cases: list[Case], *, timeout: float = 280) -> list[Errors]:
    """The largest errors of each case, none of which is over its limit."""
    ranks = len(cases[0].home.ranks)
    errors = worst_of_ranks(run_ranks(run, ranks, cases, answers_of(cases), timeout=timeout))
    wrong = [(case, error) for case, error in zip(cases, errors, strict=True) if not max(error) <= LIMITS[case.dtype]]
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(f"{error} {case}" for case, error in wrong)
    return errors


@pytest.mark.parametrize("part", range(2))
def test_every_pair_on_four_ranks(part: int) -> None:
    check(FEW[part::2])
