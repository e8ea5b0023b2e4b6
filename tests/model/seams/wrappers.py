"""Tiny models of several modalities whose text path is a causal language model."""

from typing import Any

import numpy as np
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.model.seams.families import GEMMA4, LENGTHS
from tests.model.stock import random_model, texts
from tests.model.vision import models

VISION = models.PIXELS | {"num_key_value_heads": 2, "head_dim": 8}
TOKENS = {"image_token_id": 60, "video_token_id": 59, "audio_token_id": 58}


def here() -> list[str]:
    gemma4 = ["gemma4"] if hasattr(transformers, "Gemma4Config") else []
    return ["gemma3", *gemma4, *(name for name in models.here() if name == "qwen3-vl")]


def tiny(name: str, vision: dict[str, Any] | None = VISION) -> PreTrainedModel:
    if name != "gemma4":
        return models.tiny(name)
    text = GEMMA4 | {"pad_token_id": 0}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **TOKENS)
    return random_model(config, make=AutoModelForCausalLM.from_config, attn_implementation="eager")


def plain_texts() -> list[np.ndarray]:
    return [document % 50 + 1 for document in texts(LENGTHS)]
