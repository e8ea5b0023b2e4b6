"""`attend` on real ranks against dense float64 attention: out and every gradient, for a table of layouts and calls."""

import os

import pytest
import torch

from longspan.testing import backend, run_ranks
from tests.attention.cases import LIMIT, random_cases, run_cases, table

SEED = int(os.environ.get("LONGSPAN_TEST_SEED", "0"))


def needs(ranks):
    """Skip where the backend has fewer devices than ranks."""
    if backend() == "nccl" and torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} ranks need {ranks} GPUs, this machine has {torch.cuda.device_count()}")


def check(slots, cases):
    errors = run_ranks(run_cases, slots, slots, cases)
    assert errors == [errors[0]] * slots
    wrong = [(case, error) for case, error in zip(cases, errors[0], strict=True) if not error <= LIMIT[case.dtype]]
    assert not wrong, f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(f"{e:.1e} {c}" for c, e in wrong)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_parity(slots):
    needs(slots)
    check(slots, table(slots))


@pytest.mark.parametrize("slots", [6, 8])
def test_parity_of_wide_groups(slots):
    needs(slots)
    check(slots, [case for case in table(slots, short=True) if case.layout in ("ragged", "shares without rows")])


def test_parity_of_random_calls():
    needs(4)
    check(4, random_cases(4, 60, SEED))
