"""Runs whose documents begin alike, with losses of routers and depths of multi-token prediction: as separate ones."""

from pathlib import Path
from typing import Any

import pytest

from longspan.testing import run_ranks
from tests.run.runs.test_families_run import config_of, farthest, plans_of, questions, run_in_float64

TERMS: dict[str, dict[str, Any]] = {
    "depths": {"mtp__num_layers": 1},
    "routers": {
        "model__preset": "qwen3-moe-tiny", "train__router_aux_loss_coef": 0.1, "train__router_z_loss_coef": 0.1
    },
}  # fmt: skip


@pytest.mark.whole  # daily: the terms of a step, tests/train/own_loss/test_family_terms.py
@pytest.mark.parametrize("name", ["depths", "routers"])
def test_terms_of_a_run_count_shared_rows_as_separate_documents_do(name: str, tmp_path: Path) -> None:
    path = questions(tmp_path)
    shared = config_of(tmp_path, path, "shared", **TERMS[name])
    separate = config_of(tmp_path, path, "separate", data__share_prefixes="none", **TERMS[name])
    run_ranks(run_in_float64, 1, [shared, separate], 1, timeout=120)
    assert plans_of(shared)[0].parents is not None and plans_of(separate)[0].parents is None
    assert farthest(shared, separate) <= 1e-12
