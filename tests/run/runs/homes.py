"""How tests start runs: in this process, over several configurations in one start, and again under another home."""

import io
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longspan import World
from longspan.config.sections import ParallelConfig, RunConfig
from longspan.errors import LongspanError
from longspan.run.checks import check_config
from longspan.run.loop import train
from longspan.run.metrics import read_metrics
from longspan.run.progress import ProgressDisplay
from longspan.testing import backend, run_ranks
from tests.model.stock import without_trials
from tests.train.small import train_rank

ALONE: dict[str, Any] = {  # on one slot, that holds a step or an evaluation in one micro-batch
    "context__context_parallel_size": 1,
    "evaluation__context_parallel_size": 1,
    "context__max_tokens_per_slot": 256,
    "evaluation__max_tokens_per_slot": 256,
}


def lines_of(rank: int, config: RunConfig, ranks: int) -> str:
    out, home = io.StringIO(), check_config(config, ranks)
    device = "cpu" if ranks == 1 else None
    stream = out if rank == 0 else None
    with (
        without_trials(),
        World(home, backend="gloo" if device else backend(), timeout=60, device=device) as world,
        ProgressDisplay(config.train.steps, stream) as display,
    ):
        train(config, world, display)
    return out.getvalue()


def train_rows(config: RunConfig, ranks: int = 0) -> list[dict[str, Any]]:
    if ranks == 1:
        lines_of(0, config, 1)
    elif ranks:
        run_ranks(train_rank, ranks, config, ranks, timeout=120)
    return [row for row in read_metrics(Path(config.run.dir) / "metrics.jsonl") if "loss" in row]


def _refusals(rank: int, configs: Sequence[RunConfig], ranks: int) -> list[LongspanError | None]:
    errors = list[LongspanError | None]()
    for config in configs:
        try:
            train_rank(rank, config, ranks)
            errors.append(None)
        except LongspanError as error:
            errors.append(error)
    return errors


def refusals(configs: Sequence[RunConfig], ranks: int = 2) -> list[LongspanError | None]:
    """The error of each run on the first rank, after they are seen to be the same on all; None where there is none."""
    first, *others = run_ranks(_refusals, ranks, configs, ranks)
    for other in others:
        assert [(type(error), str(error)) for error in other] == [(type(error), str(error)) for error in first]
    return first


def losses_of_run(config: RunConfig, ranks: int) -> list[float]:
    train_rows(config, ranks)
    rows = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    return [float(row[key]) for row in rows for key in ("loss", "eval_loss") if key in row]


def gone_on_from_the_first_checkpoint(
    config: RunConfig, folder: Path, parallel: ParallelConfig | None = None
) -> RunConfig:
    """The run as it stood when it was killed after its first checkpoint, perhaps under another home."""
    shutil.copytree(config.run.dir, folder)
    for later in [*sorted((folder / "checkpoints").iterdir())[1:], folder / "model"]:
        shutil.rmtree(later)
    (folder / "summary.json").unlink()
    return replace(config, parallel=parallel or config.parallel, run=replace(config.run, dir=str(folder)))


def farthest(found: list[float], wanted: list[float]) -> float:
    assert len(found) == len(wanted)
    return max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True))
