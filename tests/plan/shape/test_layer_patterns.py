"""The layers of a config.json that lists none, beside those of transformers' class, for every class."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from bench.census.images import image_names
from bench.census.models import default_config, names
from transformers import CONFIG_MAPPING, PreTrainedConfig

from longspan.errors import PlanError
from longspan.plan import ModelShape
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.layers import LayerKind, layer_kinds, sliding_window

LISTS = {"layer_types", "layers_block_type", "mlp_layer_types", "moe_layers", "no_rope_layers", "mlp_only_layers"}
LISTS |= {"block_types", "hybrid_layer_ids"}
SWITCHES = {"sliding_window", "use_sliding_window", "max_window_layers", "attention_chunk_size", "layer_group_size"}
SWITCHES |= {"sliding_window_pattern", "global_attn_every_n_layers", "no_rope_layer_interval", "decoder_sparse_step"}
SWITCHES |= {"first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "moe_layer_end_index"}
SWITCHES |= {"prefix_dense_sliding_window_pattern", "full_attention_interval", "interleave_moe_layer_step"}
ON = {"num_hidden_layers": 13, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 5}
ON |= {"sliding_window_pattern": 3, "global_attn_every_n_layers": 5}
OF_13_LAYERS = LISTS | {"per_layer_config", "layer_rope_theta", "indexer_types", "num_attention_heads_per_layer"}
OWN_COUNTS = {"dory", "nemotron_h", "zamba", "zamba2"}  # their lists say how many layers there are
DAILY = ("afmoe", "cohere2", "dots1", "flint", "gemma3_text", "gpt_oss", "lfm2", "llama4_text", "qwen2", "qwen2_moe")
DAILY += ("exaone4", "ernie4_5_moe", "mistral", "qwen3_moe+sliding", "qwen3+sliding", "mimo_v2_flash", "olmo3")


def text_config(name: str) -> PreTrainedConfig | None:
    """Make the configuration of a language model of the census, or None where its class needs values."""
    in_census = name.partition("+")[0] in names()
    try:
        return (default_config(name) if in_census else CONFIG_MAPPING[name]()).get_text_config()
    except Exception:
        return None


def files(name: str, config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield what a config.json may say of this model: without lists of layers, without what its class has by itself,
    and with windows in other places.
    """
    values: dict[str, Any] = config.to_dict()
    yield {key: value for key, value in values.items() if key not in LISTS - {"hybrid_layer_ids", "block_types"}}
    if "+" not in name:
        yield {key: value for key, value in values.items() if key not in (LISTS | SWITCHES) - {"hybrid_layer_ids"}}
    if config.model_type not in OWN_COUNTS:
        yield {key: value for key, value in values.items() if key not in OF_13_LAYERS} | ON


def kinds(config: Any) -> tuple[LayerKind, ...]:
    return layer_kinds(ConfigReader.read_language_model(config))


def layers_and_window(config: Any) -> tuple[tuple[LayerKind, ...], int]:
    return kinds(config), sliding_window(ConfigReader.read_language_model(config))


def compare(chosen: list[str], caplog: pytest.LogCaptureFixture) -> int:
    """Compare what is planned for these models with what their classes make; return how many files have a price."""
    caplog.set_level(logging.CRITICAL)
    priced = 0
    wrong = list[str]()
    for name in chosen:
        for number, values in enumerate(files(name, config) if (config := text_config(name)) else ()):
            try:
                ModelShape.of(values)
                made = layers_and_window(type(config)(**values))
            except Exception:  # a PlanError is no silent number, and a class may refuse a file
                continue
            priced += 1
            if layers_and_window(values) != made:
                wrong.append(f"{name}, file {number}")
    assert not wrong
    return priced


def test_classes_have_the_layers_that_they_make_themselves(caplog: pytest.LogCaptureFixture) -> None:
    assert compare(list(DAILY), caplog) > 40


@pytest.mark.whole
def test_every_class_has_the_layers_that_it_makes_itself(caplog: pytest.LogCaptureFixture) -> None:
    chosen = {*names(), *image_names()} - {"gemma3_text+bidirectional"}  # its class halves the window; no run takes it
    assert compare(sorted(chosen), caplog) > 500


def test_a_window_of_some_layers_does_not_price_all() -> None:
    values = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 64}
    values |= {"vocab_size": 100, "sliding_window": 8}
    windowed = {
        "gpt_oss": 3,
        "gemma2": 3,
        "gemma3_text": 5,
        "cohere2": 5,
        "olmo3": 5,
        "mistral": 6,
        "qwen2": 0,
        "llama": 0,  # its class has no window, whatever the file says
    }
    assert {model: ModelShape.of(values | {"model_type": model}).window_layers for model in windowed} == windowed


def test_experts_of_ernie_begin_and_end_where_it_says() -> None:
    values = {"model_type": "ernie4_5_moe", "num_hidden_layers": 8, "moe_k": 2, "moe_num_experts": 4}
    values |= {"moe_layer_start_index": 1, "moe_layer_end_index": 6, "moe_layer_interval": 2}
    assert [kind.feeds == "experts" for kind in kinds(values)] == [layer in (1, 3, 5) for layer in range(8)]


def test_a_window_that_is_nowhere_is_asked_for() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    with pytest.raises(PlanError, match="has no sliding_window"):
        ModelShape.of(sizes | {"vocab_size": 9, "layer_types": ["sliding_attention", "full_attention"]})
