"""Runs whose keys are of precision, optimizer and schedule: what checkpoints hold, and how such runs go on."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.checkpoint.storage import read_metadata
from longspan.comm import World
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError
from longspan.evaluation.evaluate_saved import evaluate_saved
from longspan.evaluation.request import EvalRequest, Subject, saved_weights
from longspan.run.checks import check_config
from longspan.run.loggers import read_metrics
from longspan.run.loop import train
from longspan.run.progress import ProgressDisplay
from longspan.testing import backend, run_ranks
from tests.train.small import small_config, train_rank, without_times


class _Noted(ProgressDisplay):
    def __init__(self) -> None:
        super().__init__(0, None)
        self.lines = list[str]()

    def log(self, text: str) -> None:
        self.lines.append(text)


def _said(rank: int, config: RunConfig, ranks: int) -> tuple[list[str], int]:
    """The lines of a run, and its number of steps."""
    with World(check_config(config, ranks), backend=backend(), timeout=60) as world:
        display = _Noted()
        return display.lines, train(config, world, display).steps


def _evaluated(rank: int, config: RunConfig, ranks: int) -> float:
    with World(check_config(config, ranks), backend=backend(), timeout=60) as world:
        request = EvalRequest(subjects=(Subject(saved_weights(config.run.dir), config),))
        (result,) = evaluate_saved(request, world, print, lambda *_: None)
        return result.sets[0].evaluation.loss


def _losses(config: RunConfig) -> list[Any]:
    return [without_times(row) for row in read_metrics(Path(config.run.dir) / "metrics.jsonl")]


def _cut(config: RunConfig, folder: Path, **train: Any) -> RunConfig:
    """The run as it would stand if it had been killed soon after its first checkpoint, with other keys of [train]."""
    shutil.copytree(config.run.dir, folder)
    for path in sorted((folder / "checkpoints").iterdir())[1:]:
        shutil.rmtree(path)
    return replace(config, run=replace(config.run, dir=str(folder)), train=replace(config.train, **train))


def _dtypes(config: RunConfig) -> set[torch.dtype]:
    """What weights and moments of the newest checkpoint are held in."""
    newest = sorted((Path(config.run.dir) / "checkpoints").iterdir())[-1]
    stored = read_metadata(newest).state_dict_metadata
    return {
        value.properties.dtype
        for name, value in stored.items()
        if hasattr(value, "properties") and not name.endswith(".step")
    }


@pytest.mark.whole
def test_mixed_precision_with_epochs_wsd_and_an_optimizer_by_its_class(tmp_path: Path) -> None:
    keys = {"optimizer": "torch.optim.NAdam", "optimizer_arguments": ("betas=[0.9, 0.95]",)}
    keys |= {"schedule": "wsd", "decay_steps": 2, "epochs": 1.5, "save_every": 3, "lr": 1e-2, "warmup_steps": 1}
    config = small_config(
        tmp_path, model__compute_dtype="bfloat16", **{f"train__{key}": value for key, value in keys.items()}
    )
    lines, steps = run_ranks(_said, 2, config, 2, timeout=120)[0]
    rows = _losses(config)
    trained = [row for row in rows if "loss" in row]
    assert len(trained) == steps != 6 and sum(f"train.epochs 1.5: {steps} steps" in line for line in lines) == 1
    assert [row["lr"] for row in trained[-3:]] == pytest.approx([1e-2, 0.55e-2, 1e-3])
    assert _dtypes(config) == {torch.float32}
    assert not any("rounded away" in line for line in lines)

    again = _cut(config, tmp_path / "again")
    run_ranks(train_rank, 2, again, 2, timeout=120)
    assert _losses(again) == rows

    wide = _cut(config, tmp_path / "wide")
    wide = replace(wide, model=replace(wide.model, compute_dtype="float32"))
    run_ranks(train_rank, 2, wide, 2, timeout=120)
    for old, new in zip(rows, _losses(wide), strict=True):
        key = "loss" if "loss" in old else "eval_loss"
        assert new[key] == pytest.approx(old[key], rel=2e-2)
    evaluated = [run_ranks(_evaluated, 2, run, 2, timeout=60)[0] for run in (again, replace(again, model=wide.model))]
    assert evaluated[0] != evaluated[1] and evaluated[0] == pytest.approx(evaluated[1], rel=1e-2)
    with pytest.raises(ConfigError, match=r"train.optimizer_arguments was"):
        run_ranks(train_rank, 2, _cut(config, tmp_path / "other", optimizer_arguments=()), 2, timeout=60)
    with pytest.raises(ConfigError, match=r"is at step 3, beyond train.steps \d; raise train.epochs"):
        run_ranks(train_rank, 2, _cut(config, tmp_path / "short", epochs=0.2, decay_steps=0), 2, timeout=60)


def test_pure_bfloat16_says_what_it_loses_and_rounds_by_chance_on_request(tmp_path: Path) -> None:
    config = small_config(tmp_path, model__dtype="bfloat16", train__save_every=3, train__steps=4)
    lines, _ = run_ranks(_said, 1, _on_one(config), 1, timeout=60)[0]
    assert sum("updates below 1/512 of a weight are rounded away" in line for line in lines) == 1
    by_chance = replace(config, run=replace(config.run, dir=str(tmp_path / "by chance")))
    by_chance = _on_one(replace(by_chance, train=replace(by_chance.train, stochastic_rounding=True)))
    lines, _ = run_ranks(_said, 1, by_chance, 1, timeout=60)[0]
    assert not any("rounded away" in line for line in lines) and _dtypes(by_chance) == {torch.bfloat16}
    again = _cut(by_chance, tmp_path / "again")
    run_ranks(train_rank, 1, again, 1, timeout=60)
    assert _losses(again) == _losses(by_chance) != _losses(_on_one(config))


def _on_one(config: RunConfig) -> RunConfig:
    return replace(
        config, context=replace(config.context, context_parallel_size=1).set_evaluation(context_parallel_size=1)
    )
