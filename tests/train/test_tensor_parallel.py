"""Runs with tensor parallelism: the same losses and weights as without, and checkpoints that either may go on from."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from longspan.testing import backend, run_ranks
from longspan.train.config import ParallelConfig, RunConfig
from longspan.train.metrics import read_rows
from tests.model.stock import worst
from tests.train.small import small_config, train_rank

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


def _run(config: RunConfig, ranks: int) -> list[float]:
    """The losses of all steps and evaluations, in order."""
    run_ranks(train_rank, ranks, config, ranks, timeout=120)
    rows = read_rows(Path(config.run.dir) / "metrics.jsonl")
    return [float(row[key]) for row in rows for key in ("loss", "eval_loss") if key in row]


def _go_on(config: RunConfig, folder: Path, parallel: ParallelConfig) -> RunConfig:
    """The run as it stood at its first checkpoint, under another home."""
    shutil.copytree(config.run.dir, folder)
    for left in ("checkpoints/step-000004", "model"):
        shutil.rmtree(folder / left)
    (folder / "summary.json").unlink()
    return replace(config, parallel=parallel, run=replace(config.run, dir=str(folder)))


def _weights(config: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(config.run.dir) / "model" / "model.safetensors")


def _far(found: list[float], wanted: list[float]) -> float:
    assert len(found) == len(wanted)
    return max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, list[float]]:
    config = small_config(tmp_path_factory.mktemp("straight"), **SETTINGS)
    return config, _run(config, 2)


@pytest.mark.parametrize(
    ("begun", "gone_on"), [(SPLIT, ParallelConfig()), (ParallelConfig(), COPIES)], ids=["split first", "split later"]
)
def test_losses_weights_and_checkpoints_do_not_depend_on_tp(
    straight: tuple[RunConfig, list[float]], tmp_path: Path, begun: ParallelConfig, gone_on: ParallelConfig
) -> None:
    wanted, losses = straight
    first = wanted
    if begun.tp > 1:
        first = replace(wanted, parallel=begun, run=replace(wanted.run, dir=str(tmp_path / "begun")))
        assert _far(_run(first, 2 * begun.tp), losses) < BOUND
        assert worst(_weights(first), _weights(wanted)) < BOUND
    second = _go_on(first, tmp_path / "gone_on", gone_on)
    assert _far(_run(second, 2 * gone_on.tp), losses) < BOUND
    assert worst(_weights(second), _weights(wanted)) < BOUND
    stock = AutoModelForCausalLM.from_pretrained(Path(second.run.dir) / "model", dtype=torch.float64)
    assert type(stock).__name__ == "Qwen3ForCausalLM"
    assert worst({n: p.detach() for n, p in stock.named_parameters()}, _weights(second)) == 0.0
