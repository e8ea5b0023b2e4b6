"""A device that is too small for a model is refused before anything is made there, with figures and a cure."""

from dataclasses import replace
from pathlib import Path

import pytest

from longspan.comm import World
from longspan.config.sections import ModelConfig, RunConfig, TrainConfig
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.model import load_model, preset_config
from longspan.model.lora import NewAdapter, add_lora
from longspan.testing import backend, run_ranks
from longspan.train import run_memory
from longspan.train.run_memory import check_model_fits
from tests.train.small import small_config, train_rank

CONFIG = RunConfig(model=ModelConfig(preset="qwen3-8b"), train=TrainConfig(optimizer="adamw"))
HALF = replace(CONFIG, model=replace(CONFIG.model, dtype="bfloat16"))


def _refusal(config: RunConfig, world: World, *, training: bool = True, rank: int = 0) -> str:
    model = load_model(config=preset_config("qwen3-8b"), dtype=config.model.dtype, sharded=True)
    if rank:
        add_lora(model, NewAdapter(rank=rank))
    with pytest.raises(ConfigError) as error:
        check_model_fits(config, model, world, training=training)
    return str(error.value)


def test_bytes_of_a_model_of_eight_billion_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """8,190,735,360 weights; adapters of 43,646,976 in float32, and frozen weights without gradients and states."""
    monkeypatch.setattr(run_memory, "free_host_bytes", lambda swap: 6 << 30)
    with World(Layout(1), backend=backend()) as world:
        whole = "at least 122.1 GiB before any activation (weights 30.5 GiB, gradients 30.5 GiB, optimizer states 61.0"
        assert whole in _refusal(CONFIG, world)
        assert "at least 30.5 GiB before any activation (weights 30.5 GiB)" in _refusal(CONFIG, world, training=False)
        halves = "at least 61.0 GiB before any activation (weights 15.3 GiB, gradients 15.3 GiB, optimizer states 30.5"
        assert halves in _refusal(HALF, world)
        adapters = "(weights 15.4 GiB, gradients 0.2 GiB, optimizer states 0.3 GiB)"
        assert adapters in _refusal(HALF, world, rank=16)


def _small_host(rank: int, config: RunConfig) -> tuple[str, str]:
    """A model of eight billion weights, and a run, on a host whose memory the last rank finds too small; the errors."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(run_memory, "free_host_bytes", lambda swap: 6 << 30)
        with World(Layout(2), backend=backend()) as world:
            refusal = _refusal(CONFIG, world)
        monkeypatch.setattr(run_memory, "free_host_bytes", lambda swap: 1 << (20 if rank else 60))
        with pytest.raises(ConfigError) as error:
            train_rank(rank, config, 2)
    return refusal, str(error.value)


def test_a_host_that_is_too_small_is_named_on_every_rank(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__steps=1, train__eval_every=0)
    (first, first_run), (last, last_run) = run_ranks(_small_host, 2, config)
    assert "a rank needs at least 61.0 GiB" in first and "rank 0, one of 2 on its host, has 3.0 GiB free" in first
    assert "are all sizes in its configuration?" in first and last.startswith(first)
    assert last_run.startswith(first_run) and "rank 1, one of 2 on its host, has 0.0 GiB free" in first_run
    assert "optimizer states" in first_run and not list(Path(config.run.dir).glob("checkpoints/*"))
