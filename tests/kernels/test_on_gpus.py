"""Our Triton kernels of norms, experts and losses on a GPU, in float32 and bfloat16."""

from importlib.util import find_spec

import pytest
import torch

from tests.kernels import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or find_spec("triton") is None, reason="needs a CUDA device"),
]
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
EVERY = [
    *((cases.norm_errors, case) for case in cases.NORMS),
    *((cases.visit_errors, case) for case in cases.EXPERTS),
    *((cases.gate_errors, case) for case in cases.GATES),
    *((cases.softmax_errors, case) for case in cases.LOGITS),
    *((cases.distribution_errors, case) for case in cases.LOGITS),
]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("errors", "case"), EVERY, ids=[f"{errors.__name__} {case}" for errors, case in EVERY])
def test_results_and_gradients_are_those_of_float64(errors, case, dtype: torch.dtype) -> None:
    found = errors(case, "cuda", dtype)
    assert max(found.values()) <= BOUNDS[dtype], found


def test_many_rows_of_few_features() -> None:
    found = cases.norm_errors("of heads", "cuda", torch.float32, rows=100_003)
    assert max(found.values()) <= BOUNDS[torch.float32], found
