"""Values that the rules for attributes cannot find, by model type; a function gets the small values so far.

Most are of configurations whose own defaults do not fit together, which a real config.json fills.
"""

from collections.abc import Mapping
from typing import Any

_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}


def _rope_of_both_kinds(small: Mapping[str, Any]) -> Any:
    return small["rope_parameters"] or dict.fromkeys(("full_attention", "sliding_attention"), _DEFAULT_ROPE)


def _unless(name: str, value: Any) -> Any:
    return lambda small: value if small.get(name) is None else small[name]


_QWEN4_INDEXER = {
    "indexer_n_heads": _unless("indexer_n_heads", 2),
    "indexer_kv_heads": _unless("indexer_kv_heads", 1),
    "indexer_head_dim": _unless("indexer_head_dim", 16),
    "indexer_budget": _unless("indexer_budget", 8),
    "indexer_compress_ratio": _unless("indexer_compress_ratio", 4),
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "cohere_compass_text": {"rope_parameters": _rope_of_both_kinds},
    "dbrx": {"attn_config": lambda small: small["attn_config"] | {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": _unless("num_experts_per_tok", 2)},
    "dots1": {
        "n_shared_experts": _unless("n_shared_experts", 1),
        "n_routed_experts": _unless("n_routed_experts", 4),
        "num_experts_per_tok": _unless("num_experts_per_tok", 2),
    },
    "kimi_k25": {"projection_hidden_size": lambda small: small["vision_config"]["hidden_size"]},
    "lfm2_moe": {"layer_types": _unless("layer_types", ["conv", "full_attention"])},
    "llama4_vision_model": {
        "intermediate_size": lambda small: int(small["hidden_size"] / small["pixel_shuffle_ratio"] ** 2),
        "vision_output_dim": lambda small: small["projector_output_dim"],
    },
    "mamba2": {"num_heads": lambda small: small["expand"] * small["hidden_size"] // small["head_dim"]},
    "paligemma": {"projection_dim": lambda small: small["text_config"]["hidden_size"]},
    "qwen4_exp_text": _QWEN4_INDEXER,
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": lambda small: small["languages"][0]},
    "zamba2": {  # two layers of the same shared block
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
    },
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}
