"""A run that freezes parameters, and gives others rates of their own, by patterns of names."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from longspan.checkpoint.storage import read_metadata
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError
from tests.run.runs.homes import ALONE, lines_of
from tests.train.small import small_config


def _config(folder: Path, **changes: object) -> RunConfig:
    keys = {"train__freeze": ("layers.0",), "optimizer__groups": ("embed* lr=1e-4", "*mlp* weight_decay=0")}
    return small_config(folder, **ALONE | {"evaluation__every": 0, "train__steps": 2} | keys | changes)


def test_its_lines_count_parameters_by_pattern_and_a_resumed_run_keeps_what_is_frozen(tmp_path: Path) -> None:
    config = _config(tmp_path, checkpoint__every=1)
    lines = lines_of(0, config, 1)
    assert re.search(r"^groups +embed\* lr=1e-4: 57,600 parameters$", lines, re.M), lines
    assert re.search(r"^groups +\*mlp\* weight_decay=0: 294,912 parameters$", lines, re.M)  # of one of two layers
    assert re.search(r"^freeze +layers.0: 405,936 parameters$", lines, re.M)
    assert re.search(r"^model .* trained$", lines, re.M)
    stored = read_metadata(Path(config.run.dir) / "checkpoints/step-000002").state_dict_metadata
    moments = {name for name in stored if name.startswith("optimizer.state.")}
    assert moments and not any(".layers.0." in name for name in moments)
    train = replace(config.train, steps=3)
    assert "going on from" in lines_of(0, replace(config, train=train), 1)
    with pytest.raises(ConfigError, match=r"train.freeze was \['layers.0'\] when .* and is \['layers.1'\] now"):
        lines_of(0, replace(config, train=replace(train, steps=4, freeze=("layers.1",))), 1)


def test_a_pattern_that_meets_nothing_is_refused_before_data_are_read(tmp_path: Path) -> None:
    for changes in ({"train__freeze": ("layers.7",)}, {"optimizer__groups": ("attention* lr=1",)}):
        config = _config(tmp_path, **changes)
        with pytest.raises(ConfigError, match="which meets none of"):
            lines_of(0, config, 1)
        assert not Path(config.run.dir, "corpus").exists()
