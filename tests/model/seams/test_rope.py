"""Scaled rotary positions: exact at every degree, refused where a model has its own, and read back by transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

from longspan import Layout, World, plan_fixed, prepare, run_step
from longspan.errors import ModelError
from longspan.model.exactness.small_copies import make_tiny_model
from longspan.model.seams.rope import (
    has_no_positions,
    position_limit,
    scale_rope,
    smallest_factor,
)
from longspan.testing import run_ranks
from tests.model.seams.test_mixers import here, small_config
from tests.model.stock import SIZES, at_random, dense_answer, gradients_of, texts, worst

LENGTHS = (61, 40, 17, 9)  # beyond the 16 positions of the model
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


def _config(**more: Any) -> PreTrainedConfig:
    return Qwen3Config(**SIZES | {"max_position_embeddings": 16, "tie_word_embeddings": True} | more)


def _dense(parameters: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and gradients of stock transformers, document by document, under these rope parameters."""
    model = at_random(_config(rope_parameters=dict(parameters), max_position_embeddings=64))
    return dense_answer(model, texts(LENGTHS))


def _sharded(rank: int, kind: str, axes: dict[str, int]) -> tuple[dict[int, float], float, dict[str, torch.Tensor]]:
    with World(Layout(ranks=2, **axes)) as world:
        model = prepare(at_random(scale_rope(_config(), kind, 4.0)), world)
        losses = {}
        for cp in (1, 2):
            if world.home.slots % cp == 0:
                plan = plan_fixed(LENGTHS, world.home, cp=cp)
                losses[cp] = run_step(model, plan, texts(LENGTHS), world, backward=False).loss
        trained = run_step(model, plan_fixed(LENGTHS, world.home, cp=world.home.slots), texts(LENGTHS), world)
        return losses, trained.loss, gradients_of(model)


@pytest.mark.parametrize(("kind", "parameters"), [("yarn", YARN), ("linear", LINEAR)])
def test_scaled_positions_are_exact_at_every_degree(kind: str, parameters: dict[str, Any]) -> None:
    loss, gradients = _dense(parameters)
    for losses, trained, found in run_ranks(_sharded, 2, kind, {}):
        assert set(losses) == {1, 2}
        assert max(abs(x - loss) for x in (*losses.values(), trained)) <= 1e-12 * loss
        assert worst(found, gradients) <= 1e-12
    without, _ = _dense(parameters | {"rope_type": "default"})
    assert abs(without - loss) > 1e-3 * loss


def test_the_attention_factor_of_yarn_counts_and_stages_have_it() -> None:
    loss, _ = _dense(YARN)
    unscaled, _ = _dense(YARN | {"attention_factor": 1.0})
    assert abs(unscaled - loss) > 1e-4 * loss
    for losses, trained, _ in run_ranks(_sharded, 2, "yarn", {"pp": 2}):
        assert set(losses) == {1}
        assert max(abs(x - loss) for x in (*losses.values(), trained)) <= 1e-12 * loss


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_stock_transformers_reads_a_scaled_configuration_back(kind: str, tmp_path: Path) -> None:
    scaled = scale_rope(_config(), kind, 2.5)
    scaled.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters == scaled.rope_parameters and position_limit(again) == 40
    assert json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["rope_type"] == kind
    with pytest.raises(ModelError, match=rf"a rope scaling of its own \('{kind}', for documents of up to 40 tokens\)"):
        scale_rope(again, "yarn", 2.0)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 4096,
}
LIMITS: list[tuple[PreTrainedConfig, int | None]] = [
    (_config(), 16),
    (LlamaConfig(max_position_embeddings=131072, rope_parameters=dict(LLAMA3)), 131072),
    (
        LlamaConfig(max_position_embeddings=32768, rope_parameters=YARN | {"original_max_position_embeddings": 32768}),
        131072,
    ),
    (LlamaConfig(max_position_embeddings=4096, rope_parameters=dict(LINEAR)), 16384),
    (LlamaConfig(max_position_embeddings=4096, rope_parameters=LINEAR | {"rope_type": "dynamic"}), 16384),
    (Phi3Config(max_position_embeddings=131072, rope_parameters=dict(LONGROPE)), 131072),
    (Gemma3TextConfig(max_position_embeddings=1024), 1024),
    (GPT2Config(n_positions=512), 512),
]


@pytest.mark.parametrize(("config", "limit"), LIMITS, ids=[f"{c.model_type} {n}" for c, n in LIMITS])
def test_the_limit_of_a_configuration_is_that_of_its_own_scaling(config: PreTrainedConfig, limit: int) -> None:
    assert position_limit(config) == limit


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            LlamaConfig(max_position_embeddings=131072, rope_parameters=dict(LLAMA3)),
            "own .'llama3', for .* 131072 tokens",
        ),
        (GPT2Config(), "gpt2 cannot be scaled"),
        (Gemma3TextConfig(), "gemma3_text cannot be scaled"),
    ],
    ids=["llama3", "learnt", "one for each type of layer"],
)
def test_models_that_cannot_be_scaled_are_refused(config: PreTrainedConfig, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        scale_rope(config, "yarn", 2.0)


@pytest.mark.parametrize(("longest", "factor"), [(3, 1.0), (16, 1.0), (17, 1.25), (20, 1.25), (21, 1.5), (64, 4.0)])
def test_the_smallest_factor_is_in_quarters(longest: int, factor: float) -> None:
    assert smallest_factor(_config(), longest) == factor
    assert factor == 1.0 or (position_limit(scale_rope(_config(), "yarn", factor)) or 0) >= longest


# ---- hybrids whose attention has no positions

WITHOUT = {"nemotron_h": {}, "kimi_linear": {}, "granitemoehybrid": {}, "zamba2": {"use_mem_rope": False}}
WITH = {"bamba": {}, "granitemoehybrid": {"position_embedding_type": "rope"}, "zamba2": {}, "qwen3_next": {}}


@pytest.mark.parametrize(
    ("family", "changes", "left"),
    [(f, kinds[f], kinds is WITHOUT) for kinds in (WITHOUT, WITH) for f in here(tuple(kinds))],
)
def test_hybrids_without_positions_have_no_limit(family: str, changes: dict[str, Any], left: bool) -> None:
    config = small_config(family)
    config.update(changes)
    assert has_no_positions(config) == left == (position_limit(config) is None)
    model, ids = make_tiny_model(config, torch.float64).eval(), torch.arange(9)[None]
    seen = {"attention_mask": torch.ones_like(ids), "use_cache": False}  # or positions would mean packed documents
    with torch.no_grad():
        near, far = (model(input_ids=ids, position_ids=step * ids, **seen).logits for step in (1, 3))
    assert torch.equal(near, far) == left
    if left:
        with pytest.raises(ModelError, match=r"no rotary positions that 'yarn' could scale.*leave model.rope_scaling"):
            scale_rope(config, "yarn", 2.0)
