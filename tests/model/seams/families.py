"""Tiny models of families that need a seam of their own."""

from collections.abc import Sequence
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tests.model.seams.renamed import renamed_class
from tests.model.stock import SIZES, VOCABULARY, random_model

LENGTHS = (13, 1, 30, 7, 2, 18)
PLAIN = {name: size for name, size in SIZES.items() if name != "head_dim"}
QUIET = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0}
OPT = PLAIN | QUIET | {"ffn_dim": 48, "max_position_embeddings": 40, "word_embed_proj_dim": 32}
GEMMA4 = SIZES | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 16,
    "sliding_window": 5,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 2,
    "final_logit_softcapping": 3.0,
}
DBRX = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    "vocab_size": VOCABULARY,
    "resid_pdrop": 0.0,
    "emb_pdrop": 0.0,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4, "attn_pdrop": 0.0},
    "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
}
# Layers whose indexer chooses 6 keys a row. Few of its heads tie, many do not.
INDEXED = {name: size for name, size in PLAIN.items() if name != "num_key_value_heads"} | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "mlp_layer_types": ["dense", "dense"],
}
IN_GROUPS = {"n_group": 1, "topk_group": 1}
SHARED = {"num_hidden_layers": 4, "mlp_layer_types": ["dense"] * 4, "indexer_types": ["full", "shared"] * 2}
MANY_HEADS = ", many index heads"
# A layer with a window alone, one with entries of 8 rows, and one with entries of 4, of which each row chooses 3;
# experts by token id, then by scores.
ENTRIES = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")} | {
    "num_key_value_heads": 1,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
    "compress_rates": {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4},
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "hc_mult": 2,
    "index_topk": 3,
    "index_head_dim": 16,
    "index_n_heads": 16,
}
# Two attentions and two MLPs in each layer, and experts that hand rows on.
LONGCAT = {
    **{name: INDEXED[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "q_lora_rank")},
    **{name: INDEXED[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    "num_layers": 2,
    "head_dim": 4,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 24,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "moe_topk": 2,
}
# Stacks of two layers: the low one runs four times, once without gradients, and the high one twice.
HRM = SIZES | {"H_cycles": 2, "L_cycles": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPTConfig", OPT),
    "opt, norms after": ("OPTConfig", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "nemotron": ("NemotronConfig", PLAIN | {"tie_word_embeddings": False}),
    "stablelm": ("StableLmConfig", PLAIN | {"use_qkv_bias": True, "qk_layernorm": True}),
    "stablelm, parallel": ("StableLmConfig", PLAIN | {"use_parallel_residual": True}),
    "gemma4": ("Gemma4TextConfig", GEMMA4),
    "gemma4 without sharing": (
        "Gemma4TextConfig",
        GEMMA4 | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
    ),
    "gemma4_unified": ("Gemma4UnifiedTextConfig", GEMMA4),
    "dbrx": ("DbrxConfig", DBRX),
    "deepseek-v3.2": ("DeepseekV32Config", INDEXED | IN_GROUPS),
    f"deepseek-v3.2{MANY_HEADS}": ("DeepseekV32Config", INDEXED | IN_GROUPS | {"index_n_heads": 16}),
    "glm-5": ("GlmMoeDsaConfig", INDEXED | IN_GROUPS | SHARED),
    "a.x-k2": ("AXK2Config", INDEXED),
    "hy-v4": ("HYV4Config", INDEXED | IN_GROUPS | SHARED),
    "longcat": ("LongcatFlashConfig", LONGCAT),
    "hrm": ("HrmTextConfig", HRM),
    "dots.3": ("Dots3NoteTextConfig", INDEXED | IN_GROUPS),
    "deepseek-v4": ("DeepseekV4Config", ENTRIES),
}


EAGER = ("hy-v4", "deepseek-v4")


def here(families: Sequence[str]) -> list[str]:
    return [family for family in families if hasattr(transformers, FAMILIES[family.removesuffix(RENAMED)][0])]


RENAMED = ", renamed"


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    config_class, values = FAMILIES[family.removesuffix(RENAMED)]
    config = getattr(transformers, config_class)(**values | changes)
    attention = "eager" if family in EAGER else "sdpa"
    settings: dict[str, Any] = {"attn_implementation": attention, "experts_implementation": "eager"}
    if not family.endswith(RENAMED):
        return random_model(config, **settings)
    family_name = config_class.removesuffix("Config")
    kind = renamed_class(getattr(transformers, f"{family_name}ForCausalLM"), family_name, "Renamed")
    return random_model(config, make=kind._from_config, **settings)


def gradient_error(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest error of any gradient; infinite where others have one. A bias of keys has none but rounding."""
    if gradients.keys() != exact.keys():
        return float("inf")
    floor = 1e-3 * max(g.abs().max().item() for g in exact.values())
    return max(((gradients[n] - g).abs().max() / g.abs().max().clamp(min=floor)).item() for n, g in exact.items())
