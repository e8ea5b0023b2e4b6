"""Runs with pipelines: the same losses and weights as without, and checkpoints that either may go on from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from longspan.config.sections import ParallelConfig, RunConfig
from longspan.corpus.tokenizer import train_tokenizer
from longspan.errors import ConfigError
from longspan.run.checks import check_config
from longspan.testing import backend
from tests.model.stock import SIZES
from tests.run.runs.homes import check_homes_are_equal, into_and_out_of, losses_at_home
from tests.train.small import small_config

SETTINGS = {
    "model__dtype": "float64",
    "train__steps": 4,
    "train__save_every": 2,
    "train__eval_every": 2,
    "context__planner": "dynamic",
}
INTERLEAVED = ParallelConfig(pp=2, vpp=2)
FOLDED = ParallelConfig(pp=2, vpp=2, pipeline_schedule="zbv")
BOUND = 1e-12 if backend() == "gloo" else 1e-5


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, list[float]]:
    """Four steps of a model of four layers with a tied embedding, without a pipeline."""
    folder = tmp_path_factory.mktemp("straight")
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES | {"num_hidden_layers": 4, "vocab_size": 300}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes, tie_word_embeddings=True))
    model.double().save_pretrained(folder / "model")  # a run saves its weights in the dtype of the folder
    train_tokenizer(["some text"], 300).save_pretrained(folder / "model")
    config = small_config(folder, model__path=str(folder / "model"), **SETTINGS)
    return config, losses_at_home(config)


@pytest.mark.parametrize(("begun", "gone_on"), into_and_out_of(INTERLEAVED, FOLDED))
def test_losses_weights_and_checkpoints_do_not_depend_on_the_pipeline(
    straight: tuple[RunConfig, list[float]], tmp_path: Path, begun: ParallelConfig, gone_on: ParallelConfig
) -> None:
    second, stock = check_homes_are_equal(straight, tmp_path, begun, gone_on)
    facts = json.loads((Path(second.run.dir) / "run.json").read_text())
    assert facts["parameters"] == sum(p.numel() for p in stock.parameters())  # a tied embedding is on two stages


CONFLICTS = [
    ({"parallel__vpp": 2}, r"parallel.vpp is 2 and parallel.pp is 1: virtual stages need a pipeline; use pp = 2"),
    (
        {"parallel__pp": 2, "parallel__pipeline_schedule": "zbv"},
        r'"zbv", which folds .* parallel.vpp is 1; use vpp = 2',
    ),
    (
        {"parallel__pp": 4, "context__eval_context_parallel_size": 2},
        r"2 does not divide 1 slot \(4 ranks / tp 1 / pp 4",
    ),
]


@pytest.mark.parametrize(("changes", "says"), CONFLICTS)
def test_conflicts_are_errors_with_numbers(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_config(small_config(tmp_path, **{"context__context_parallel_size": 1, **changes}), 4)
