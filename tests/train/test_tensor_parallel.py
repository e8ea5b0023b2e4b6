"""Runs with tensor parallelism: the same losses and weights as without, and checkpoints that either may go on from."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from longspan.testing import backend
from longspan.train.config.sections import ParallelConfig, RunConfig
from tests.model.stock import worst
from tests.train.homes import farthest, gone_on_from_the_first_checkpoint, losses_of_run, saved_weights
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
# Weights and moments in float64; transformers' norms are float32, whose rounding differs with a GPU's kernels.
BOUND = 1e-12 if backend() == "gloo" else 1e-5


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, list[float]]:
    config = small_config(tmp_path_factory.mktemp("straight"), **SETTINGS)
    return config, losses_of_run(config, 2)


HOMES = [
    pytest.param(SPLIT, ParallelConfig(), id="split first", marks=pytest.mark.whole),  # so is test_checkpoint_homes.py
    pytest.param(ParallelConfig(), COPIES, id="split later"),
]


@pytest.mark.parametrize(("begun", "gone_on"), HOMES)
def test_losses_weights_and_checkpoints_do_not_depend_on_tp(
    straight: tuple[RunConfig, list[float]], tmp_path: Path, begun: ParallelConfig, gone_on: ParallelConfig
) -> None:
    wanted, losses = straight
    first = wanted
    if begun.tp > 1:
        first = replace(wanted, parallel=begun, run=replace(wanted.run, dir=str(tmp_path / "begun")))
        assert farthest(losses_of_run(first, 2 * begun.tp), losses) < BOUND
        assert worst(saved_weights(first), saved_weights(wanted)) < BOUND
    second = gone_on_from_the_first_checkpoint(first, tmp_path / "gone_on", gone_on)
    assert farthest(losses_of_run(second, 2 * gone_on.tp), losses) < BOUND
    assert worst(saved_weights(second), saved_weights(wanted)) < BOUND
    stock = AutoModelForCausalLM.from_pretrained(Path(second.run.dir) / "model", dtype=torch.float64)
    assert type(stock).__name__ == "Qwen3ForCausalLM"
    assert worst({n: p.detach() for n, p in stock.named_parameters()}, saved_weights(second)) == 0.0
