"""Runs whose keys are of precision, optimizer and schedule: what checkpoints hold, how they go on, how they learn."""

import re
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
from longspan.layout import Layout
from longspan.model import prepare
from longspan.plan import plan_fixed
from longspan.run.checks import check_config
from longspan.run.loggers import read_metrics
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from longspan.train.optim.optimizer import OptimizerChoice, StochasticRounding
from tests.model.stock import texts, tiny
from tests.run.runs.homes import ALONE, gone_on_from_the_first_checkpoint, lines_of, refusals, train_rows
from tests.train.small import small_config, without_times


def _evaluated(rank: int, config: RunConfig, ranks: int) -> float:
    with World(check_config(config, ranks), backend=backend(), timeout=60) as world:
        request = EvalRequest(subjects=(Subject(saved_weights(config.run.dir), config),))
        (result,) = evaluate_saved(request, world, print, lambda *_: None)
        return result.sets[0].evaluation.loss


def _rows(config: RunConfig) -> list[Any]:
    return [without_times(row) for row in read_metrics(Path(config.run.dir) / "metrics.jsonl")]


def _dtypes(config: RunConfig) -> set[torch.dtype]:
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
    said = run_ranks(lines_of, 2, config, 2, timeout=120)[0]
    rows = _rows(config)
    trained = [row for row in rows if "loss" in row]
    assert len(trained) != 6 and said.count(f"train.epochs 1.5: {len(trained)} steps") == 1
    assert [row["lr"] for row in trained[-3:]] == pytest.approx([1e-2, 0.55e-2, 1e-3])
    assert _dtypes(config) == {torch.float32}
    assert "rounded away" not in said

    again = gone_on_from_the_first_checkpoint(config, tmp_path / "again")
    train_rows(again, 2)
    assert _rows(again) == rows

    wide = gone_on_from_the_first_checkpoint(config, tmp_path / "wide")
    wide = replace(wide, model=replace(wide.model, compute_dtype="float32"))
    train_rows(wide, 2)
    for old, new in zip(rows, _rows(wide), strict=True):
        key = "loss" if "loss" in old else "eval_loss"
        assert new[key] == pytest.approx(old[key], rel=2e-2)
    evaluated = [run_ranks(_evaluated, 2, run, 2, timeout=60)[0] for run in (again, replace(again, model=wide.model))]
    assert evaluated[0] != evaluated[1] and evaluated[0] == pytest.approx(evaluated[1], rel=1e-2)
    other = gone_on_from_the_first_checkpoint(config, tmp_path / "other")
    changes: list[dict[str, Any]] = [{"optimizer_arguments": ()}, {"epochs": 0.2, "decay_steps": 0}]
    arguments, short = refusals([replace(other, train=replace(other.train, **keys)) for keys in changes])
    assert type(arguments) is type(short) is ConfigError and "train.optimizer_arguments was" in str(arguments)
    assert re.search(r"is at step 3, beyond train.steps \d; raise train.epochs", str(short))


def test_pure_bfloat16_says_what_it_loses_and_rounds_by_chance_on_request(tmp_path: Path) -> None:
    keys = {"train__save_every": 2, "train__steps": 3, "train__eval_every": 0, "data__eval_documents": 0, **ALONE}
    config = small_config(tmp_path, model__dtype="bfloat16", **keys)
    assert lines_of(0, config, 1).count("updates below 1/512 of a weight are rounded away") == 1
    by_chance = replace(config, run=replace(config.run, dir=str(tmp_path / "by chance")))
    by_chance = replace(by_chance, train=replace(by_chance.train, stochastic_rounding=True))
    assert "rounded away" not in lines_of(0, by_chance, 1) and _dtypes(by_chance) == {torch.bfloat16}
    again = gone_on_from_the_first_checkpoint(by_chance, tmp_path / "again")
    lines_of(0, again, 1)
    assert _rows(again) == _rows(by_chance) != _rows(config)


STEPS, RATE, LENGTHS = 40, 5e-5, (24,) * 8
KINDS = ("float32", "mixed", "bfloat16", "by chance")


def _losses(world: World, kind: str) -> list[float]:
    dtype = torch.float32 if kind in ("float32", "mixed") else torch.bfloat16
    compute = torch.bfloat16 if kind == "mixed" else None
    model: Any = prepare(tiny("qwen3", dtype), world, compute_dtype=compute, probe=False)
    world.seed = 1
    optimizer: Any = build_optimizer(model, "adamw", RATE)
    if kind == "by chance":
        optimizer = StochasticRounding(OptimizerChoice("adamw", RATE, 0.0, (("betas", (0.9, 0.95)),)), model, world)
    documents, plan = texts(LENGTHS), plan_fixed(LENGTHS, world.home, cp=1)
    return [run_step(model, plan, documents, world, optimizer, step=step).loss for step in range(1, STEPS + 1)]


def _curves(rank: int) -> dict[str, list[float]]:
    with World(Layout(1), backend=backend(), timeout=60) as world:
        return {kind: _losses(world, kind) for kind in KINDS}


@pytest.mark.whole
def test_mixed_precision_learns_as_float32_and_pure_bfloat16_does_not() -> None:
    (curves,) = run_ranks(_curves, 1, timeout=120)
    # bfloat16 weights begin at another loss: what counts is how far each has fallen.
    falls = {kind: [losses[0] - loss for loss in losses] for kind, losses in curves.items()}
    fall = falls["float32"][-1]
    share = {kind: max(abs(a - b) for a, b in zip(falls["float32"], falls[kind], strict=True)) / fall for kind in KINDS}
    assert fall > 0 and share["mixed"] < 0.02 < 0.3 < share["bfloat16"], share
    assert share["by chance"] < 0.2, share  # weights of so small a model are noisy when rounded by chance
