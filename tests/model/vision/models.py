"""Tiny vision-language models in float64 with random weights: patches of 2 to 4 pixels, towers of few layers."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import transformers
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from tests.model.stock import random_model

IMAGE, VIDEO = 60, 59  # the ids of placeholders
TEXT: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT |= {"intermediate_size": 48, "vocab_size": 62, "initializer_range": 0.2}
TEXT |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 57, "vision_end_token_id": 56}
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
PIXELS = VIT | {"image_size": 8, "patch_size": 4}
QWEN: dict[str, Any] = {"hidden_size": 16, "depth": 3, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32}
QWEN |= {"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
DEEP = QWEN | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
SIGLIP = PIXELS | {"model_type": "siglip_vision_model", "vision_use_head": False}
GATED = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}

OLD_TOKENS = {"image_token_index": IMAGE}
SPANS = TEXT | {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
SPANS |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA2 = TEXT | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 40, "query_pre_attn_scalar": 16}
# Two layers take keys of earlier ones, and each has inputs made of its ids; a window is shorter than images.
GEMMA4 = TEXT | {"pad_token_id": 0, "head_dim": 8, "global_head_dim": 16, "sliding_window": 5}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
GEMMA4 |= {"final_logit_softcapping": 3.0, "tie_word_embeddings": True}
PER_LAYER = {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 62}
OWN_KEYS = {"num_kv_shared_layers": 0}
PLAIN = OWN_KEYS | {"hidden_size_per_layer_input": 0}
SEES = {"use_bidirectional_attention": "vision"}
# Images of 2 x 2 patches a row, as QWEN's.
PLACED = VIT | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 2, "pooling_kernel_size": 2}
PLACED |= {"position_embedding_size": 16}
MERGED = {"patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16}
SOUNDS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [8, 4]}
SOUNDS |= {"output_proj_dims": 16}
GEMMA4_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": 58, "tie_word_embeddings": True}
QWEN2 = {k: v for k, v in QWEN.items() if k not in ("intermediate_size", "out_hidden_size")}
QWEN2 |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
QWEN2_5 = QWEN | {"window_size": 8, "fullatt_block_indexes": [1]}
HYBRID = TEXT | GATED | {"head_dim": 8, "rope_parameters": MROPE["rope_parameters"]}


def _config(text: dict[str, Any], vision: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"text_config": text, "vision_config": vision, **more}


CLIP_PIXELS, SIGLIP_PIXELS = (
    PIXELS | {"model_type": "clip_vision_model"},
    PIXELS | {"model_type": "siglip_vision_model"},
)
FULL: dict[str, Any] = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1, "image_token_id": IMAGE}
OF_GEMMA3 = OLD_TOKENS | {"mm_tokens_per_image": 9, "boi_token_index": 57, "eoi_token_index": 56}
# By name: the configuration's class, and its values.
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llava-clip": ("LlavaConfig", _config(TEXT | {"model_type": "llama"}, CLIP_PIXELS, image_token_id=IMAGE)),
    "llava-siglip": ("LlavaConfig", _config(TEXT | {"model_type": "qwen2"}, SIGLIP_PIXELS, **FULL)),
    "gemma3": ("Gemma3Config", _config(SPANS, SIGLIP | {"image_size": 24}, **OF_GEMMA3)),
    "paligemma": (
        "PaliGemmaConfig",
        _config(TEXT | {"model_type": "gemma", "head_dim": 8}, SIGLIP, projection_dim=32, **OLD_TOKENS),
    ),
    "paligemma2": ("PaliGemmaConfig", _config(GEMMA2, SIGLIP, projection_dim=32, **OLD_TOKENS)),
    "gemma4": ("Gemma4Config", _config(GEMMA4 | PER_LAYER, PLACED | {"standardize": True}, **GEMMA4_TOKENS)),
    "gemma4-audio": ("Gemma4Config", _config(GEMMA4 | SEES | PLAIN, PLACED, audio_config=SOUNDS, **GEMMA4_TOKENS)),
    "gemma4-spans": ("Gemma4Config", _config(GEMMA4 | PER_LAYER | SEES | OWN_KEYS, PLACED, **GEMMA4_TOKENS)),
    "gemma4-unified": ("Gemma4UnifiedConfig", _config(GEMMA4 | SEES | OWN_KEYS, MERGED, **GEMMA4_TOKENS)),
    "qwen2-vl": ("Qwen2VLConfig", _config(TEXT | MROPE, QWEN2, **TOKENS)),
    "qwen2.5-vl": ("Qwen2_5_VLConfig", _config(TEXT | MROPE, QWEN2_5, **TOKENS)),
    "qwen3-vl": ("Qwen3VLConfig", _config(TEXT | MROPE | {"head_dim": 8}, DEEP, tie_word_embeddings=True, **TOKENS)),
    "qwen3-vl-untied": ("Qwen3VLConfig", _config(TEXT | MROPE | {"head_dim": 8}, DEEP, **TOKENS)),
    "qwen3.5": ("Qwen3_5Config", _config(HYBRID, QWEN | {"num_position_embeddings": 16}, **TOKENS)),
}


def here() -> list[str]:
    return [name for name, (config, _) in MODELS.items() if hasattr(transformers, config)]


def config_of(name: str) -> PreTrainedConfig:
    config_class, values = MODELS[name]
    return getattr(transformers, config_class)(**deepcopy(values))  # some write into those that they are given


def tiny(name: str) -> PreTrainedModel:
    # Gemma 2 and towers of sounds are not given "sdpa".
    attention = "eager" if name in ("paligemma2", "gemma4-audio") else "sdpa"
    return random_model(config_of(name), make=AutoModelForImageTextToText.from_config, attn_implementation=attention)
