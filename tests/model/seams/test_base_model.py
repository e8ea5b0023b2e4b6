"""The base model of a causal language model, whatever its class says of where it is."""

import pytest
import torch
import transformers

from longspan.model.layers import base_model, base_name
from tests.model.exactness.test_refusals import build
from tests.model.stock import SIZES


@pytest.mark.parametrize(
    ("config_class", "values", "name"),
    [("LlamaConfig", {}, "model"), ("GPT2Config", {}, "transformer"), ("Llama4TextConfig", {}, "model")],
)
def test_base_models(config_class: str, values: dict[str, int], name: str) -> None:
    model = build(config_class, **values)
    assert base_name(model) == name
    assert base_model(model) is model.get_submodule(name)
    assert base_model(base_model(model)) is base_model(model) and base_name(base_model(model)) == ""


def test_a_model_without_a_head_is_its_own_base_model() -> None:
    with torch.device("meta"):
        model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES))
    assert base_model(model) is model
