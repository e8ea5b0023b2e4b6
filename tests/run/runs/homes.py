"""Runs of four steps, saved after two and four, which go on under another home."""

import shutil
from dataclasses import replace
from pathlib import Path

from longspan.config.sections import ParallelConfig, RunConfig
from longspan.run.loggers import read_metrics
from longspan.testing import run_ranks
from tests.train.small import train_rank


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


def farthest(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference."""
    assert len(found) == len(wanted)
    return max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True))
