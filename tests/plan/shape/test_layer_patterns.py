"""The layers of a config.json that names no types, beside those of transformers' class, for every class."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from bench.census.models import default_config, names
from transformers import PreTrainedConfig

from longspan.errors import PlanError
from longspan.plan import ModelShape
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.layers import LayerKind, layer_kinds

_TYPES = ("layer_types", "layers_block_type", "mlp_layer_types")


def without_types() -> Iterator[tuple[str, dict[str, Any], PreTrainedConfig]]:
    """Yield the name of each model of the census, its values without types of layers, and what the class makes of
    them.
    """
    for name in names():
        try:
            made = default_config(name).get_text_config()
            values = {key: value for key, value in made.to_dict().items() if key not in _TYPES}
            yield name, values, type(made)(**values)
        except Exception:  # a class without defaults, or one that needs the types
            continue


def kinds(config: Any) -> tuple[LayerKind, ...]:
    return layer_kinds(ConfigReader.read_language_model(config))


def test_every_class_has_the_layers_that_it_makes_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    priced = 0
    wrong = list[str]()
    for name, values, made in without_types():
        try:
            ModelShape.of(values)
        except PlanError:
            continue
        priced += 1
        if kinds(values) != kinds(made):
            wrong.append(name)
    assert not wrong and priced > 100


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
    }
    assert {model: ModelShape.of(values | {"model_type": model}).window_layers for model in windowed} == windowed


def test_experts_of_ernie_begin_and_end_where_it_says() -> None:
    values = {"model_type": "ernie4_5_moe", "num_hidden_layers": 8, "moe_k": 2, "moe_num_experts": 4}
    values |= {"moe_layer_start_index": 1, "moe_layer_end_index": 6, "moe_layer_interval": 2}
    assert [kind.feeds == "experts" for kind in kinds(values)] == [layer in (1, 3, 5) for layer in range(8)]
