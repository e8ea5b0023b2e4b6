"""Runs whose weights are in bfloat16: what is said, what checkpoints hold, and how they go on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from longspan.checkpoint.storage import read_metadata
from longspan.config.sections import RunConfig
from longspan.run.metrics import read_metrics
from tests.run.runs.homes import ALONE, gone_on_from_the_first_checkpoint, lines_of
from tests.train.small import small_config, without_times


def _rows(config: RunConfig) -> list[Any]:
    return [without_times(row) for row in read_metrics(Path(config.run.dir) / "metrics.jsonl")]


def _dtypes(config: RunConfig) -> set[torch.dtype]:
    newest = sorted((Path(config.run.dir) / "checkpoints").iterdir())[-1]
    stored = read_metadata(newest).state_dict_metadata
    numbers = (x for name, x in stored.items() if hasattr(x, "properties") and not name.endswith(".step"))
    return {x.properties.dtype for x in numbers}


def test_pure_bfloat16_says_what_it_loses_and_rounds_by_chance_on_request(tmp_path: Path) -> None:
    keys = {"checkpoint__every": 2, "train__steps": 3, "evaluation__every": 0, "evaluation__documents": 0, **ALONE}
    config = small_config(tmp_path, model__dtype="bfloat16", **keys)
    assert lines_of(0, config, 1).count("updates below 1/512 of a weight are rounded away") == 1
    by_chance = replace(config, run=replace(config.run, dir=str(tmp_path / "by chance")))
    by_chance = replace(by_chance, optimizer=replace(by_chance.optimizer, stochastic_rounding=True))
    assert "rounded away" not in lines_of(0, by_chance, 1) and _dtypes(by_chance) == {torch.bfloat16}
    again = gone_on_from_the_first_checkpoint(by_chance, tmp_path / "again")
    lines_of(0, again, 1)
    assert _rows(again) == _rows(by_chance) != _rows(config)
