"""Models that do not fit are refused before anything is made."""

from dataclasses import replace
from pathlib import Path

import pytest

from longspan.comm import World
from longspan.config.sections import ModelConfig, OptimizerSection, RunConfig
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.model import load_model, preset_config
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.testing import backend, run_ranks
from longspan.train.run_model import prepare
from tests.train.small import small_config, train_rank

CONFIG = RunConfig(model=ModelConfig(preset="qwen3-8b"), optimizer=OptimizerSection(class_="adamw"))


def _refusal(world: World, *, dtype: str = "float32", training: bool = True, rank: int = 0) -> str:
    """Of two layers of Qwen3-8B, 1,630,556,672 weights, on a host with 2 GiB; `rank` of adapters."""
    two_layers, config = preset_config("qwen3-8b"), replace(CONFIG, model=replace(CONFIG.model, dtype=dtype))
    two_layers.num_hidden_layers = 2
    model = load_model(config=two_layers, dtype=dtype, sharded=True)
    if rank:
        add_lora(model, NewAdapter(rank=rank))
    with pytest.MonkeyPatch.context() as patched, pytest.raises(ConfigError) as error:
        patched.setattr(prepare, "free_host_bytes", lambda swap: 2 << 30)
        prepare.check_model_fits(config, model, world, training=training)
    return str(error.value)


def test_bytes_of_a_model_before_any_activation() -> None:
    """Adapters of rank 512 have 77,594,624 weights in float32; frozen weights have no gradients and states."""
    with World(Layout(1), backend=backend()) as world:
        whole = "at least 24.3 GiB before any activation (weights 6.1 GiB, gradients 6.1 GiB, optimizer states 12.1"
        assert whole in _refusal(world)
        assert "at least 6.1 GiB before any activation (weights 6.1 GiB)" in _refusal(world, training=False)
        adapters = "(weights 3.3 GiB, gradients 0.3 GiB, optimizer states 0.6 GiB)"
        assert adapters in _refusal(world, dtype="bfloat16", rank=512)


def _small_host(rank: int, config: RunConfig) -> tuple[str, str]:
    with World(Layout(2), backend=backend()) as world:
        refusal = _refusal(world)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(ConfigError) as error:
        patched.setattr(prepare, "free_host_bytes", lambda swap: 1 << (20 if rank else 60))
        train_rank(rank, config, 2)
    return refusal, str(error.value)


def test_a_host_that_is_too_small_is_named_on_every_rank(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__steps=1, evaluation__every=0)
    (first, first_run), (last, last_run) = run_ranks(_small_host, 2, config)
    assert "a rank needs at least 12.1 GiB" in first and "rank 0, one of 2 on its host, has 1.0 GiB free" in first
    assert "are all sizes in its configuration?" in first and last.startswith(first)
    assert last_run.startswith(first_run) and "rank 1, one of 2 on its host, has 0.0 GiB free" in first_run
    assert "optimizer states" in first_run and not list(Path(config.run.dir).glob("checkpoints/*"))
