"""Configurations of models that are small, with the ratios of large ones: widths of MLPs, experts and heads."""

from typing import Any

from transformers import (
    BambaConfig,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

_DENSE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 768,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "max_position_embeddings": 8192,
}
_HYBRID: dict[str, Any] = _DENSE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_ROUTED: dict[str, Any] = {"num_experts_per_tok": 2}
_EXPERTS: dict[str, Any] = _ROUTED | {"num_experts": 8, "moe_intermediate_size": 192}
_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 192,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}

DENSE = ("qwen3", "llama", "gemma3")
EXPERTS = ("qwen3-moe", "gpt-oss")
HYBRIDS = ("bamba", "qwen3-next")


_HYBRID_SIZES = _HYBRID | _MAMBA2 | {"attn_layer_indices": [1]}
_KINDS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, _DENSE),
    "llama": (LlamaConfig, _DENSE),
    "gemma3": (Gemma3TextConfig, _DENSE | {"sliding_window": 64}),
    "qwen3-moe": (Qwen3MoeConfig, _DENSE | _EXPERTS),
    "gpt-oss": (
        GptOssConfig,
        _HYBRID | _ROUTED | {"intermediate_size": 192, "num_local_experts": 8, "sliding_window": 64},
    ),
    "bamba": (BambaConfig, _HYBRID_SIZES),
    "qwen3-next": (Qwen3NextConfig, _HYBRID | _EXPERTS | _DELTA_NET),
}


def config_of(family: str) -> PreTrainedConfig:
    """A model of a family in two layers."""
    kind, sizes = _KINDS[family]
    return kind(**sizes)
