"""Presets are configurations by name."""

import pytest
import torch

from longspan.errors import ModelError
from longspan.model.presets import PRESETS, preset_config
from longspan.model.weights.fill import empty_model

TINY = [name for name, preset in PRESETS.items() if not preset.rows]


@pytest.mark.parametrize("name", TINY)
def test_a_preset_has_the_promised_sizes(name: str) -> None:
    config = preset_config(name, vocab_size=2048)
    family = name.removesuffix("-tiny").removesuffix("-deep").replace("-", "_")
    assert config.model_type == family.replace("granite_hybrid", "granitemoehybrid")
    assert (config.hidden_size, config.vocab_size) == (192, 2048)
    hybrid = "linear_attention" in (getattr(config, "layer_types", None) or ())
    assert config.num_hidden_layers == (4 if "deep" in name or hybrid else 2)
    assert hybrid == (name in ("qwen3-next-tiny", "bamba-tiny", "granite-hybrid-tiny"))
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 24)
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "billions", "experts"),
    [("qwen3-0.6b", 0.596, 0), ("qwen3-4b", 4.022, 0), ("qwen3-8b", 8.191, 0), ("qwen3-30b-a3b", 30.532, 128)],
)
def test_a_published_model_has_its_published_size(name: str, billions: float, experts: int) -> None:
    config = preset_config(name)
    model = empty_model(config, torch.bfloat16)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 3) == billions
    assert (config.vocab_size, config.max_position_embeddings) == (151936, 40960)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert getattr(config, "num_experts", 0) == experts


@pytest.mark.parametrize(
    ("name", "vocab_size", "says"),
    [
        ("qwen3-tyni", 64, "did you mean 'qwen3-tiny'"),
        ("lama", 64, "did you mean 'llama-tiny'"),
        ("zzz", 64, "presets: llama-tiny, qwen3-tiny"),
        ("gpt-os", 64, "did you mean 'gpt-oss-tiny'"),
        ("qwen3-tiny", 0, "vocab_size is 0"),
        ("qwen3-tiny", 2.5, "vocab_size is 2.5"),
    ],
)
def test_refusals(name: str, vocab_size: int, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        preset_config(name, vocab_size=vocab_size)
