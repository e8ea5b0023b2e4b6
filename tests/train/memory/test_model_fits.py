"""A GPU that is too small for a model is refused before anything is made there, with figures and a cure."""

from dataclasses import replace
from pathlib import Path

import pytest

from longspan.comm import World
from longspan.config.sections import (
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.model import load_model, preset_config
from longspan.model.lora.new import NewAdapter, add_lora
from longspan.testing import run_ranks
from longspan.train.memory import model_fits
from longspan.train.memory.model_fits import check_model_fits, shard_bytes
from tests.train.small import small_config, train_rank

CONFIG = RunConfig(model=ModelConfig(preset="qwen3-8b"), train=TrainConfig(optimizer="adamw"))
WEIGHTS = 8_190_735_360


def needed(config: RunConfig, *, training: bool = True, rank: int = 0, **home: int) -> dict[str, int]:
    model = load_model(config=preset_config("qwen3-8b"), dtype=config.model.dtype, sharded=True)
    if rank:
        add_lora(model, NewAdapter(rank=rank))
    return shard_bytes(config, model, Layout(**home), training=training)


def test_bytes_of_a_model_of_eight_billion_weights() -> None:
    four = {"weights": WEIGHTS, "gradients": WEIGHTS, "optimizer states": 2 * WEIGHTS}  # of 4 bytes, over 4 shards
    assert needed(CONFIG, ranks=4) == four == needed(CONFIG, ranks=8, dp_replicate=2) == needed(CONFIG, ranks=4, pp=2)
    half = replace(CONFIG, model=replace(CONFIG.model, dtype="bfloat16"))
    assert needed(half, ranks=1) == {name: 2 * size for name, size in four.items()}
    assert needed(CONFIG, ranks=4, training=False) == {"weights": WEIGHTS, "gradients": 0, "optimizer states": 0}
    adapters = 4 * 43_646_976  # in float32; frozen weights have neither gradients nor states
    of_adapters = {"weights": 2 * WEIGHTS + adapters, "gradients": adapters, "optimizer states": 2 * adapters}
    assert needed(half, ranks=1, rank=16) == of_adapters


def _small_gpu(rank: int, config: RunConfig, ranks: int, room: int) -> str:
    """A run where the last rank's device has so much room; the error."""
    before = model_fits.free_room
    size = room if rank == ranks - 1 else 1 << 60
    model_fits.free_room = lambda world: (size, f"the GPU of rank {rank}")
    try:
        train_rank(rank, config, ranks)
    except ConfigError as error:
        return str(error)
    finally:
        model_fits.free_room = before
    return "it fits"


def test_every_rank_says_so(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__steps=1, train__eval_every=0)
    size = sum(p.numel() for p in load_model(preset="qwen3-tiny", vocab_size=300).parameters()) * 4
    first, last = run_ranks(_small_gpu, 2, config, 2, size * 3 // 2)
    assert last.startswith(first) and "the model does not fit: a rank needs at least" in first
    assert "optimizer states" in first and "the GPU of rank 1 has 0.0 GiB free" in first
    assert not list(Path(config.run.dir).glob("checkpoints/*"))


def _small_host(rank: int, config: RunConfig) -> str:
    """A model of eight billion weights on a host whose memory cannot hold them; the error."""
    model_fits.free_host_bytes = lambda swap: 6 << 30
    with World(Layout(2)) as world, pytest.raises(ConfigError) as error:
        model = load_model(config=preset_config("qwen3-8b"), sharded=True)
        check_model_fits(config, model, world, training=True)
    return str(error.value)


def test_a_host_that_is_too_small_is_named() -> None:
    first, last = run_ranks(_small_host, 2, CONFIG)
    assert "a rank needs at least 61.0 GiB" in first and "rank 0, one of 2 on its host, has 3.0 GiB free" in first
    assert "are all sizes in its configuration?" in first and last.startswith(first)
