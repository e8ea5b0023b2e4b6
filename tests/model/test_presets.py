"""Presets are configurations by name."""

import pytest

from longspan.errors import ModelError
from longspan.model.presets import PRESETS, preset_config


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_promised_sizes(name: str) -> None:
    config = preset_config(name, vocab_size=2048)
    assert config.model_type == name.removesuffix("-tiny").removesuffix("-deep").replace("-", "_")
    assert (config.hidden_size, config.vocab_size) == (192, 2048)
    assert config.num_hidden_layers == (4 if "deep" in name else 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 24)
    assert config.tie_word_embeddings


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
