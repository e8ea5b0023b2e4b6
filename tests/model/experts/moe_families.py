"""Small models of every family with experts that transformers has, by the type of its configuration."""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration

_ALL = (
    "qwen3_moe gpt_oss mixtral olmoe deepseek_v3 glm4_moe glm4_moe_lite minimax_m2 ernie4_5_moe deepseek_v2 dots1 "
    "granitemoe granitemoeshared granitemoe_swa hunyuan_v1_moe hy_v3 mimo_v2_flash exaone_moe afmoe flex_olmo "
    "cohere2_moe laguna solar_open mellum aria_text axk1 beam flint kolibri1 qwen2_moe gemma4_text granitemoehybrid "
    "minimax_m3_vl_text llama4_text"
)
FAMILIES = tuple(family for family in _ALL.split() if family in CONFIG_MAPPING)  # an older transformers has fewer
_SETTINGS: dict[str, dict[str, Any]] = {
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "granitemoehybrid": {"layer_types": ["attention"] * 4, "num_hidden_layers": 4},  # without state-space layers
}


def family_config(family: str) -> PreTrainedConfig:
    """A small configuration of the family, as its class has it by default, and attention in every layer."""
    return shrink_configuration(CONFIG_MAPPING[family](**_SETTINGS.get(family, {})))


def family_model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A small model whose weights depend on nothing but the family."""
    return make_tiny_model(family_config(family), dtype)
