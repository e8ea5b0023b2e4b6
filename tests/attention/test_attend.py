"""`attend` on real ranks against dense float64 attention: out and every gradient, for tables of layouts and calls."""

import os
from functools import cache

import pytest
import torch

from longspan.testing import backend, run_ranks
from tests.attention.cases import DEGREES, Case, pairs, run_cases
from tests.launch.rank_pool import most_ranks

SEED = int(os.environ.get("LONGSPAN_TEST_SEED", "0"))
TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


def needs(ranks):
    if backend() == "nccl" and most_ranks() < ranks:
        pytest.skip(f"{ranks} ranks need {ranks} GPUs, this machine has {torch.cuda.device_count()}")


@cache
def pairs_of(seed: int) -> dict[int, list[Case]]:
    return pairs(seed, every_layout=seed != SEED)


@pytest.mark.parametrize("seed", [SEED, pytest.param(SEED + 1, marks=pytest.mark.whole)])
@pytest.mark.parametrize("slots", DEGREES)
def test_every_pair_of_the_table(slots, seed):
    needs(slots)
    cases = pairs_of(seed)[slots]
    errors = run_ranks(run_cases, slots, slots, cases)
    # limits of bfloat16 are those of a rank: gradients differ in their last bits between GPUs
    assert backend() == "nccl" or errors == [errors[0]] * slots
    wrong = [
        (case, *of_ranks) for case, *of_ranks in zip(cases, *errors, strict=True) if not all(e <= 1 for e in of_ranks)
    ]
    assert not wrong, f"{len(wrong)} of {len(cases)}, error over its limit:\n" + "\n".join(
        f"{max(of_ranks):.2g} {case}" for case, *of_ranks in wrong
    )
