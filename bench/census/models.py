"""The models of the census: every class of transformers' causal language models, and variants that switch features.

A model is named after its class (`qwen3`) or after its class and what differs from its defaults (`qwen3+sliding`).
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_THETA = {"rope_theta": 10000.0}
_YARN = {**_THETA, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
_LLAMA3 = {**_THETA, "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_FACTORS = {"short_factor": [1.0] * 64, "long_factor": [1.0 + i / 8 for i in range(64)]}
_LONGROPE = {**_THETA, **_FACTORS, "rope_type": "longrope", "original_max_position_embeddings": 4096, "factor": 8.0}
_PHI_LONGROPE = {key: value for key, value in _LONGROPE.items() if key != "factor"}
_PHI_LONGROPE |= {"short_factor": [1.0] * 48, "long_factor": [1.0 + i / 8 for i in range(48)]}
_SLIDING = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 14}
_FULL: dict[str, Any] = {"sliding_window": None}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 16, "num_hidden_layers": 32}

VARIANTS: Mapping[str, dict[str, Any]] = {
    "deepseek_v3+yarn": {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "factor": 40.0}},
    "deepseek_v3+no_q_rank": {"q_lora_rank": None},
    "falcon+alibi": {"alibi": True},
    "falcon+new": {"new_decoder_architecture": True},
    "falcon_h1+norm": {"mamba_rms_norm": True},
    "gemma2+untied": {"tie_word_embeddings": False},
    "gemma3_text+bidirectional": {"use_bidirectional_attention": True},
    "gemma3_text+linear": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
    "gemma4_text+moe": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704},
    "gemma4_text+shared": {"num_kv_shared_layers": 18, "use_double_wide_mlp": True},
    "gemma4_text+k_is_v": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "glm4_moe+qk_norm": {"use_qk_norm": True},
    "gpt2+inverse": {"scale_attn_by_inverse_layer_idx": True},
    "gpt2+untied": {"tie_word_embeddings": False},
    "gpt_neox+serial": {"use_parallel_residual": False},
    "gpt_oss+default": {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    "granite+multiplier": {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
    "granitemoehybrid+dense": {"layer_types": ["attention"] * 32, "num_local_experts": 0},
    "granitemoehybrid+moe": {"layer_types": ["attention"] * 32},
    "granitemoehybrid+multiplier": {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
    "granitemoehybrid+hybrid": {"layer_types": (["mamba"] * 9 + ["attention"]) * 4, "num_hidden_layers": 40},
    "hunyuan_v1_dense+dynamic": {
        "head_dim": 128,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0},
    },
    "hunyuan_v1_moe+top2": {"moe_topk": 2, "num_experts": 8},
    "llama+dynamic": {"rope_parameters": {**_THETA, "rope_type": "dynamic", "factor": 4.0}},
    "llama+gqa": {"num_key_value_heads": 8},
    "llama+linear": {"rope_parameters": {**_THETA, "rope_type": "linear", "factor": 4.0}},
    "llama+llama3": {"rope_parameters": _LLAMA3, "num_key_value_heads": 8},
    "llama+longrope": {"rope_parameters": _LONGROPE},
    "llama+mqa": {"num_key_value_heads": 1},
    "llama+tied": {"tie_word_embeddings": True},
    "llama+yarn": {"rope_parameters": _YARN},
    "llama4_text+dense": {"moe_layers": []},
    "llama4_text+full": {"layer_types": ["full_attention"] * 48},
    "minicpm3+longrope": {"rope_parameters": _LONGROPE | {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}},
    "minimax_m2+full": {"layer_types": ["full_attention"] * 62},
    "minimax_m3_vl_text+full": {"layer_types": ["full_attention"] * 60},
    "mistral+full": _FULL,
    "mistral+alternating": {**_ALTERNATING},
    "mixtral+sliding": {"sliding_window": 4096},
    "mixtral+tied": {"tie_word_embeddings": True},
    "opt+postnorm": {"do_layer_norm_before": False},
    "phi3+longrope": {"num_attention_heads": 32, "rope_parameters": _PHI_LONGROPE},
    "phi3+sliding": {"sliding_window": 2047},
    "qwen2+sliding": _SLIDING,
    "qwen2_moe+sliding": _SLIDING,
    "qwen3+sliding": _SLIDING,
    "qwen3+yarn": {"rope_parameters": _YARN},
    "qwen3_moe+dense_layers": {"mlp_only_layers": [0, 1, 2]},
    "qwen3_moe+sliding": _SLIDING,
    "stablelm+parallel": {"use_parallel_residual": True},
    "starcoder2+sliding": {"sliding_window": 4096},
    "zamba2+adapters": {"use_shared_attention_adapter": True, "use_mem_rope": True},
}


# Where a class's defaults lack the kinds of layers that its released models have.
_RELEASED: Mapping[str, dict[str, Any]] = {
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 30},
    "lfm2": {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
}


def names() -> list[str]:
    classes = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return [*classes, *(name for name in VARIANTS if name.partition("+")[0] in classes)]


def default_config(name: str) -> PreTrainedConfig:
    """The configuration of a model of the census in its true size: its class's defaults and the variant's values.

    A class that can be an encoder is a decoder here. Raises what the class itself raises.
    """
    values = {**_RELEASED.get(name.partition("+")[0], {}), **VARIANTS.get(name, {})}
    config = CONFIG_MAPPING[name.partition("+")[0]](**values)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def class_name(name: str) -> str:
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name.partition("+")[0]])


def head_kinds(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """What attention needs of a kernel in each kind of layer: head sizes, window, soft cap and chosen keys or not."""
    values = config.get_text_config().to_dict()
    layers = {int(layer): entry for layer, entry in (values.get("per_layer_config") or {}).items()}
    window = bool(values.get("sliding_window")) and values.get("use_sliding_window", True)
    types = values.get("layer_types") or ["sliding_attention" if window else "full_attention"]
    kinds: list[dict[str, Any]] = []
    for number, kind in enumerate(types):
        if kind not in (*_ATTENTION, *_WITH_ENTRIES):
            continue
        query, value = _head_sizes(values | layers.get(number, {}))
        softcap = bool(values.get("attn_logit_softcapping"))
        has_window = kind in ("sliding_attention", *_WITH_ENTRIES)
        entry = {"query": query, "value": value, "window": has_window, "softcap": softcap}
        if kind in _INDEXED:
            key = _INDEXED[kind]
            # Without a number in its default configuration a class has that of the published models.
            entry |= {"indexed": True} | ({"block_size": values[key] or 4} if key in values else {})
        kinds += [entry] if query and entry not in kinds else []
        # Beside a window of rows, entries are chosen as latents are.
        chosen = entry | {"window": False, "indexed": True, "latents": True}
        kinds += [chosen] if kind == _WITH_ENTRIES[0] and chosen not in kinds else []
    return kinds


# How many keys each of the blocks has that rows of such layers choose, by the key of a configuration.
_INDEXED = {"indexed_attention": "indexer_compress_ratio", "minimax_m3_sparse": "index_block_size"}
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "hybrid", "attention", *_INDEXED)
_WITH_ENTRIES = ("compressed_sparse_attention", "heavily_compressed_attention")


def _head_sizes(values: Mapping[str, Any]) -> tuple[int, int]:
    if values.get("kv_lora_rank"):
        return values["qk_nope_head_dim"] + values["qk_rope_head_dim"], values["v_head_dim"]
    heads = values.get("num_attention_heads") or values.get("n_head") or values.get("n_heads")
    width = values.get("hidden_size") or values.get("n_embd") or values.get("d_model") or 0
    size = (values.get("head_dim") or width // heads) if heads else 0  # Mamba 2 has heads, and no attention
    return size, values.get("v_head_dim") or size
