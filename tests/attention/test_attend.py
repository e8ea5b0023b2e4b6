"""`attend` on real ranks against dense float64 attention: out and every gradient, for a table of layouts and calls."""

import os

import pytest
import torch

from longspan.testing import backend, run_ranks
from tests.attention.cases import LIMIT, head_shapes, random_cases, run_cases, table, wide_table

SEED = int(os.environ.get("LONGSPAN_TEST_SEED", "0"))


def needs(ranks):
    """Skip where the backend has fewer devices than ranks."""
    if backend() == "nccl" and torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} ranks need {ranks} GPUs, this machine has {torch.cuda.device_count()}")


def check(slots, cases):
    errors = run_ranks(run_cases, slots, slots, cases)
    assert errors == [errors[0]] * slots
    wrong = [(case, e) for case, e in zip(cases, errors[0], strict=True) if not e <= LIMIT[case[0].dtype]]
    assert not wrong, f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(f"{e:.1e} {q}\n  {w}" for (q, w), e in wrong)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_parity(slots):
    needs(slots)
    check(slots, table(slots) + (head_shapes() if slots == 4 else []))


@pytest.mark.parametrize("slots", [6, 8])
def test_parity_of_wide_groups(slots):
    needs(slots)
    check(slots, wide_table(slots))


def test_parity_of_random_calls():
    needs(4)
    check(4, random_cases(4, 80, SEED))
