"""Keys of pipelines that do not fit each other; tests/checkpoint/test_checkpoint_homes.py runs them."""

from pathlib import Path

import pytest

from longspan.errors import ConfigError
from longspan.run.checks import check_config
from tests.train.small import small_config

CONFLICTS = [
    ({"parallel__vpp": 2}, r"parallel.vpp is 2 and parallel.pp is 1: virtual stages need a pipeline; use pp = 2"),
    (
        {"parallel__pp": 2, "parallel__pipeline_schedule": "zbv"},
        r'"zbv", which folds .* parallel.vpp is 1; use vpp = 2',
    ),
    (
        {"parallel__pp": 4, "context__eval_context_parallel_size": 2},
        r"2 does not divide 1 slot \(4 ranks / tp 1 / pp 4",
    ),
]


@pytest.mark.parametrize(("changes", "says"), CONFLICTS)
def test_conflicts_are_errors_with_numbers(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_config(small_config(tmp_path, **{"context__context_parallel_size": 1, **changes}), 4)
