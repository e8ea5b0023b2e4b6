"""Values that decide the kinds of layers, where a config.json leaves them out: those of transformers' class.

Sizes that a class fills in, such as head_dim, are not here.
"""

from collections.abc import Mapping
from typing import Any

# By attribute and value, the types of model.
_FAMILIES: Mapping[str, Mapping[Any, str]] = {
    "sliding_window": {
        128: "gpt_oss granite_swa granitemoe_swa openai_privacy_filter unlimited_ocr_text",
        129: "mimo_v2_flash",
        256: "lfm3",
        512: "beam diffusion_gemma_text embedding_gemma2_text gemma3n_text gemma4_text laguna lara_mini",
        513: "flint kolibri1",
        1024: "afmoe dory gemma4_unified_text mellum",
        2048: "muse_glimmer_text muse_spark_text",
        4096: "cohere2 cohere2_moe cohere_compass_text dots1 exaone4 exaone_moe gemma2 gemma3_text ministral mistral "
        "olmo3 qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe t5gemma2_decoder vaultgemma",
        8192: "cwm",
        32768: "qwen2_5_omni_text",
    },
    "use_sliding_window": {
        False: "qwen2 qwen2_5_omni_text qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe smollm3",
    },
    "max_window_layers": {
        28: "qwen2 qwen2_5_omni_text qwen2_moe qwen3",
        62: "dots1",
        80: "qwen2_5_vl_text qwen2_vl_text",
    },
    "attention_chunk_size": {8192: "llama4_text"},
    "local_attention": {128: "modernbert modernbert-decoder"},
    "first_k_dense_replace": {
        1: "axk1 axk2 dots3_note_text exaone_moe glm4_moe glm4_moe_lite glm4v_moe_text hy_v3 hy_v4 hy_v4_vl_text "
        "kimi_linear laguna mimo_v2_flash mistral_large4_text sarvam_moe unlimited_ocr_text",
        2: "bailing_hybrid",
        3: "beam deepseek_v3 deepseek_v32 glm5_next_text glm_moe_dsa step3p5",
    },
    "num_dense_layers": {1: "afmoe", 2: "lfm2_moe"},
    "moe_layer_start_index": {1: "ernie4_5_moe"},
    "mlp_only_layers": {(0, 1): "flint"},
}
_VALUES: Mapping[tuple[str, str], Any] = {
    (family, attribute): value
    for attribute, families in _FAMILIES.items()
    for value, names in families.items()
    for family in names.split()
}


def class_default(model_type: str, attribute: str) -> Any:
    """Return the value of an attribute of this table, also for a model whose text model is of this family; or None."""
    own = _VALUES.get((model_type, attribute))
    return _VALUES.get((f"{model_type}_text", attribute)) if own is None else own
