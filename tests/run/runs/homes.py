"""Runs of four steps, saved after two and four, under one home and under another; each has two slots."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from longspan.config.sections import ParallelConfig, RunConfig
from longspan.run.loggers.metrics_log import read_metrics
from longspan.testing import backend, run_ranks
from tests.model.stock import worst
from tests.train.small import train_rank

# Weights and moments in float64; transformers' norms are float32, whose rounding differs with a GPU's kernels.
BOUND = 1e-12 if backend() == "gloo" else 1e-5


def losses_of_run(config: RunConfig, ranks: int) -> list[float]:
    """The losses of all steps and evaluations, in order."""
    run_ranks(train_rank, ranks, config, ranks, timeout=120)
    rows = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    return [float(row[key]) for row in rows for key in ("loss", "eval_loss") if key in row]


def gone_on_from_the_first_checkpoint(config: RunConfig, folder: Path, parallel: ParallelConfig) -> RunConfig:
    """The run as it stood at its first checkpoint, under another home."""
    shutil.copytree(config.run.dir, folder)
    for left in ("checkpoints/step-000004", "model"):
        shutil.rmtree(folder / left)
    (folder / "summary.json").unlink()
    return replace(config, parallel=parallel, run=replace(config.run, dir=str(folder)))


def losses_at_home(config: RunConfig) -> list[float]:
    """The same on the ranks of two slots."""
    return losses_of_run(config, 2 * config.parallel.tp * config.parallel.pp)


def into_and_out_of(first: ParallelConfig, later: ParallelConfig) -> list[Any]:
    """Cases (begun, gone_on): a run that leaves the home `first`, and one that goes on in the home `later`.

    Both are whole: test_checkpoint_homes.py shows them too.
    """
    cases = {"first": (first, ParallelConfig()), "later": (ParallelConfig(), later)}
    return [pytest.param(*case, id=name, marks=pytest.mark.whole) for name, case in cases.items()]


def check_homes_are_equal(
    straight: tuple[RunConfig, list[float]], folder: Path, begun: ParallelConfig, gone_on: ParallelConfig
) -> tuple[RunConfig, PreTrainedModel]:
    """A run begun in one home, and gone on with in another, has the losses and weights of the one that never moved.

    Returns the run that went on, and the stock model that it saved.
    """
    wanted, losses = straight
    first = wanted
    if begun != wanted.parallel:
        first = replace(wanted, parallel=begun, run=replace(wanted.run, dir=str(folder / "begun")))
        assert farthest(losses_at_home(first), losses) < BOUND
        assert worst(saved_weights(first), saved_weights(wanted)) < BOUND
    second = gone_on_from_the_first_checkpoint(first, folder / "gone_on", gone_on)
    assert farthest(losses_at_home(second), losses) < BOUND
    assert worst(saved_weights(second), saved_weights(wanted)) < BOUND
    stock = AutoModelForCausalLM.from_pretrained(Path(second.run.dir) / "model", dtype=torch.float64)
    assert worst({n: p.detach() for n, p in stock.named_parameters()}, saved_weights(second)) == 0.0
    return second, stock


def saved_weights(config: RunConfig) -> dict[str, Tensor]:
    return load_file(Path(config.run.dir) / "model" / "model.safetensors")


def farthest(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference."""
    assert len(found) == len(wanted)
    return max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True))
