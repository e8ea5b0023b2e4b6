"""Runs with tensor parallelism: the same losses and weights as without, and checkpoints that either may go on from."""

from pathlib import Path

import pytest

from longspan.config.sections import ParallelConfig, RunConfig
from tests.run.runs.homes import check_homes_are_equal, into_and_out_of, losses_at_home
from tests.train.small import small_config

SETTINGS = {
    "model__dtype": "float64",
    "train__steps": 4,
    "train__save_every": 2,
    "train__eval_every": 0,
    "train__activation_checkpointing": "full",
}
SPLIT = ParallelConfig(tp=2, sequence_parallel=True)
COPIES = ParallelConfig(tp=2, dp_replicate=2)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, list[float]]:
    config = small_config(tmp_path_factory.mktemp("straight"), **SETTINGS)
    return config, losses_at_home(config)


@pytest.mark.parametrize(("begun", "gone_on"), into_and_out_of(SPLIT, COPIES))
def test_losses_weights_and_checkpoints_do_not_depend_on_tp(
    straight: tuple[RunConfig, list[float]], tmp_path: Path, begun: ParallelConfig, gone_on: ParallelConfig
) -> None:
    _, stock = check_homes_are_equal(straight, tmp_path, begun, gone_on)
    assert type(stock).__name__ == "Qwen3ForCausalLM"
