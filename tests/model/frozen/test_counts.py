"""What a plan of memory counts as packed, by the model's shape, is what is packed of the model."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from longspan.model import preset_config
from longspan.model.frozen.frozen_weights import weights_to_pack
from longspan.plan.shape.packed import packed_weights_of_model


@pytest.mark.parametrize(
    "preset", ["qwen3-tiny", "llama-tiny", "qwen3-moe-tiny", "gpt-oss-tiny", "qwen3-0.6b", "qwen3-30b-a3b"]
)
def test_the_shape_says_what_is_packed(preset: str) -> None:
    config = preset_config(preset, vocab_size=2048)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    places = weights_to_pack(model)
    assert sum(getattr(module, name).numel() for module, name in places.values()) == sum(
        packed_weights_of_model(config, "nf4")[::2]
    )
