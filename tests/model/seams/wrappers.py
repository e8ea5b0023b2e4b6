"""Tiny models of several modalities whose text path is a causal language model, as AutoModelForCausalLM gives some."""

from typing import Any

import numpy as np
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.model.seams.families import GEMMA4, LENGTHS
from tests.model.stock import SIZES, random_model, texts

TEXT = SIZES | {"pad_token_id": 0}
VISION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
PATCHES = VISION | {"image_size": 8, "patch_size": 4}
TOKENS = {"image_token_id": 60, "video_token_id": 59, "audio_token_id": 58}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
QWEN_VISION = {"hidden_size": 16, "depth": 2, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32}

# By name: the configuration's class and values; and the model's class where AutoModelForCausalLM has none.
WRAPPERS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": TEXT | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
            "vision_config": PATCHES | {"model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
            "image_token_id": 60,
        },
        None,
    ),
    "gemma4": (
        "Gemma4Config",
        {
            "text_config": GEMMA4 | {"pad_token_id": 0},
            "vision_config": PATCHES | {"num_key_value_heads": 2, "head_dim": 8},
            "audio_config": None,
        }
        | TOKENS,
        None,
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {
            "text_config": TEXT | {"rope_parameters": MROPE},
            "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]},
            "vision_start_token_id": 57,
            "vision_end_token_id": 56,
            "image_token_id": 60,
            "video_token_id": 59,
        },
        "Qwen3VLForConditionalGeneration",
    ),
}


def here() -> list[str]:
    return [name for name, (config, _, _) in WRAPPERS.items() if hasattr(transformers, config)]


def tiny(name: str) -> PreTrainedModel:
    config_class, values, model_class = WRAPPERS[name]
    config: PreTrainedConfig = getattr(transformers, config_class)(**values)
    make = getattr(transformers, model_class)._from_config if model_class else AutoModelForCausalLM.from_config
    return random_model(config, make=make, attn_implementation="eager")


def plain_texts() -> list[np.ndarray]:
    return [document % 50 + 1 for document in texts(LENGTHS)]
