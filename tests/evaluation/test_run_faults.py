"""A run whose evaluation goes wrong on one rank goes on from its folder bit by bit as if nothing had happened."""

import os
import re
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from longspan.config.sections import RunConfig
from longspan.errors import LongspanError, RankLostError, RunFolderError
from longspan.run.facts import TrainResult
from longspan.run.metrics import MetricsLog, read_metrics
from longspan.testing import run_ranks
from tests.evaluation.state import differences
from tests.train.small import small_config, train_rank, without_times

FAULTS: dict[str, tuple[int, BaseException | int, type[BaseException], str]] = {  # rank, error or signal, what is told
    "error in a forward pass": (1, ValueError("boom"), ValueError, "rank 0: .*rank 1 left with ValueError: boom"),
    "Ctrl-C in a forward pass": (0, KeyboardInterrupt("boom"), KeyboardInterrupt, "rank 1: .*rank 0 left with Key"),
    "kill in a forward pass": (1, signal.SIGKILL, RankLostError, ""),
    "full disk in writing records": (0, OSError(28, "No space left on device"), RunFolderError, ""),
}


def train_with(rank: int, config: RunConfig, name: str) -> TrainResult:
    where, fault, *_ = FAULTS[name]
    forward, write, met = Qwen3MLP.forward, MetricsLog.write, list[bool]()

    def happen() -> None:
        if isinstance(fault, BaseException):
            raise fault
        os.kill(os.getpid(), fault)

    def faulty_forward(module: Any, x: Tensor) -> Tensor:
        if not (module.training or x.device.type == "meta" or met):
            met.append(True)
            happen()
        return forward(module, x)

    def faulty_write(log: MetricsLog, row: dict[str, Any]) -> None:
        if "eval_loss" in row:
            happen()
        write(log, row)

    if rank != where:
        return train_rank(rank, config, 2)
    in_forward = name.endswith("forward pass")
    owner, patched = (Qwen3MLP, faulty_forward) if in_forward else (MetricsLog, faulty_write)
    with mock.patch.object(owner, "forward" if in_forward else "write", patched):
        return train_rank(rank, config, 2)


def left_by(config: RunConfig) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    folder = Path(config.run.dir)
    rows = [without_times(row) for row in read_metrics(folder / "metrics.jsonl")]
    return rows, load_file(folder / "model" / "model.safetensors")


def train_in_turn(rank: int, configs: list[RunConfig]) -> None:
    for config in configs:
        train_rank(rank, config, 2)


def short_run(folder: Path) -> RunConfig:
    return small_config(folder, train__steps=3, checkpoint__every=1, evaluation__context_parallel_size=1)


LEAVES_AT_ONCE = ("Ctrl-C in a forward pass", "kill in a forward pass")
IN_CI = ("error in a forward pass",)


@pytest.mark.parametrize("name", [n if n in IN_CI else pytest.param(n, marks=pytest.mark.whole) for n in FAULTS])
def test_a_run_goes_on_after(name: str, tmp_path: Path) -> None:
    config, straight = (short_run(tmp_path / folder) for folder in ("hurt", "straight"))
    _, _, error, said = FAULTS[name]
    with pytest.raises(error) as raised:
        run_ranks(train_with, 2, config, name)
    if not issubclass(error, LongspanError):
        assert any(re.search(said, note) for note in raised.value.__notes__), raised.value.__notes__
    folder = Path(config.run.dir)
    assert not (folder / "model").exists()
    saved = {path.name for path in (folder / "checkpoints").iterdir()}
    if name in LEAVES_AT_ONCE:  # nothing waits for the save in the background
        saved = {path for path in saved if not path.endswith(".partial")} | {"step-000002"}
    assert saved == {"step-000001", "step-000002"}, "a step is saved before its evaluation"
    run_ranks(train_in_turn, 2, [config, straight])
    (rows, weights), (rows_without, weights_without) = left_by(config), left_by(straight)
    assert rows == rows_without and not differences(weights_without, weights)
