"""A GPU that is too small for a model is refused before anything is made there, with figures and a cure."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longspan.comm import World
from longspan.config.sections import (
    ContextConfig,
    LoraSection,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.model import PRESETS, load_model, preset_config
from longspan.model.lora.new import NewAdapter, add_lora
from longspan.testing import run_ranks
from longspan.train.memory import model_fits
from longspan.train.memory.model_fits import NeededBytes, Room, check_model_fits, needed_bytes
from tests.train.small import small_config, train_rank

CONFIG = RunConfig(model=ModelConfig(preset="qwen3-8b"), train=TrainConfig(optimizer="adamw"))
WEIGHTS, LAYER, ROOT = 8_190_735_360, 192_946_432, 2 * 151936 * 4096 + 4096


def needed(config: RunConfig, *, training: bool = True, **home: int) -> NeededBytes:
    model = load_model(config=preset_config(config.model.preset), dtype=config.model.dtype, sharded=True)
    assert sum(p.numel() for p in model.parameters()) == WEIGHTS
    return needed_bytes(config, model, Layout(**home), torch.bfloat16, training=training)


def test_bytes_of_a_model_of_eight_billion_weights() -> None:
    four = needed(CONFIG, ranks=4)
    assert (four.weights, four.gradients, four.states) == (WEIGHTS, WEIGHTS, 2 * WEIGHTS)  # of 4 bytes, over 4 shards
    assert four.gathered == 2 * (LAYER + ROOT)
    assert needed(CONFIG, ranks=8, tp=2).gathered == LAYER + ROOT
    assert needed(CONFIG, ranks=8, dp_replicate=2) == four
    half = needed(replace(CONFIG, model=replace(CONFIG.model, dtype="bfloat16")), ranks=1)
    assert (half.weights, half.states, half.gathered) == (2 * WEIGHTS, 4 * WEIGHTS, 0)
    evaluated = needed(CONFIG, ranks=4, training=False)
    assert (evaluated.weights, evaluated.gradients, evaluated.states) == (WEIGHTS, 0, 0)
    for change in ({"parallel": ParallelConfig(reshard_after_forward=False)}, {"context": ContextConfig(mode="free")}):
        assert needed(replace(CONFIG, **change), ranks=4).gathered == 2 * WEIGHTS


def test_frozen_weights_have_neither_gradients_nor_states() -> None:
    model = load_model(config=preset_config("qwen3-8b"), dtype="bfloat16", sharded=True)
    config = replace(CONFIG, model=replace(CONFIG.model, dtype="bfloat16"), lora=LoraSection(rank=16))
    add_lora(model, NewAdapter(rank=16))
    trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    bytes_needed = needed_bytes(config, model, Layout(ranks=1), torch.bfloat16, training=True)
    assert trained == 4 * 43_646_976
    assert (bytes_needed.gradients, bytes_needed.states) == (trained, 2 * trained)
    assert bytes_needed.weights == 2 * WEIGHTS + trained


def test_how_many_shards_would_do() -> None:
    two = NeededBytes(weights=100, gradients=100, states=200, gathered=50, shards=2)
    assert [two.shards_that_fit(room) for room in (450, 449, 250, 51, 50)] == [2, 3, 4, 800, 0]


def _small_gpu(rank: int, config: RunConfig, ranks: int, room: int) -> str:
    """A run where the last rank's device has so much room; the error."""
    before = model_fits.free_room
    size = room if rank == ranks - 1 else 1 << 60
    model_fits.free_room = lambda world: Room(size, f"the GPU of rank {rank}", of_gpu=True)
    try:
        train_rank(rank, config, ranks)
    except ConfigError as error:
        return str(error)
    finally:
        model_fits.free_room = before
    return "it fits"


@pytest.mark.parametrize(("gpus", "room"), [("at least 5 such GPUs would do", 5), ("no number of such GPUs", 1)])
def test_every_rank_says_so(tmp_path: Path, gpus: str, room: int) -> None:
    config = small_config(tmp_path, train__steps=1, train__eval_every=0)
    size = sum(p.numel() for p in load_model(preset="qwen3-tiny", vocab_size=300).parameters()) * 4
    first, last = run_ranks(_small_gpu, 2, config, 2, size * 3 // 2 if room == 5 else size // 8)
    assert last.startswith(first) and "the model does not fit: a rank needs at least" in first and gpus in first
    assert "optimizer states" in first and "the GPU of rank 1 has 0.0 GiB free" in first
    assert not list(Path(config.run.dir).glob("checkpoints/*"))


def _small_host(rank: int, config: RunConfig) -> str:
    """A model of eight billion weights on a host whose memory cannot hold them; the error."""
    model_fits.free_host_bytes = lambda swap: 6 << 30
    with World(Layout(2)) as world, pytest.raises(ConfigError) as error:
        model = load_model(config=preset_config("qwen3-8b"), sharded=True)
        check_model_fits(config, model, world, torch.float32, training=True)
    return str(error.value)


def test_a_host_that_is_too_small_is_named() -> None:
    first, last = run_ranks(_small_host, 2, CONFIG)
    assert "a rank needs at least 66.4 GiB" in first and "rank 0, one of 2 on its host, has 3.0 GiB free" in first
    assert "does its configuration say all of its sizes?" in first and last.startswith(first)


def test_published_presets_are_counted_without_memory() -> None:
    for name in PRESETS:
        if PRESETS[name].rows:
            model = load_model(config=preset_config(name), sharded=True)
            assert all(p.device == torch.device("meta") for p in model.parameters())
            config = replace(CONFIG, model=ModelConfig(preset=name))
            assert needed_bytes(config, model, Layout(8), torch.bfloat16, training=True).total > 0
