"""Configurations at the size of models, on GPUs: pytest --backend nccl tests/attention/test_full_size.py."""

import pytest
import torch

from longspan.testing import backend, run_ranks
from tests.attention.full_size import CONFIGURATIONS, measure

RANKS = [2, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_errors_are_at_most_twice_those_of_one_rank(name: str, ranks: int) -> None:
    if backend() != "nccl" or torch.cuda.device_count() < ranks:
        pytest.skip(f"needs --backend nccl and {ranks} GPUs")
    measured = run_ranks(measure, ranks, ranks, (name,), timeout=280)[0]
    assert measured and all(m.good for m in measured), [m for m in measured if not m.good]


SMALL = ("flash 1_2", "flash 2_1", "flash 3_0", "fused 4_1", "fused 4_3")


def test_the_comparison_itself_on_small_documents() -> None:
    """In float32 there is nothing to round: what is compared is that dense attention, slices and sums are right."""
    if backend() == "nccl":
        pytest.skip("on the CPU")
    measured = run_ranks(measure, 2, 2, SMALL, "float32", 24, ("cpu_flash",))[0]
    assert len(measured) == len(SMALL) * 2 * 4
    assert max(error for m in measured for error in (*m.errors, *m.alone)) <= 1e-5
