"""Tiny models with an adapter of peft, and what they do in one process, document by document."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import peft
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration
from longspan.model.presets import preset_config
from tests.model.deep import deep
from tests.model.experts.moe_models import moe_model
from tests.model.seams.families import FAMILIES, tiny as of_family
from tests.model.seams.test_mixers import small_config
from tests.model.stock import SIZES, at_random, gradients_of, random_model, texts, tiny

LENGTHS = (13, 1, 30, 7, 2, 18)
EVEN = 62  # a vocabulary that tp 2 divides
ALL = "all-linear"
PROJECTIONS = [  # of mixers, attention and shared experts, but for names that peft takes for experts
    *(
        f"{name}_proj"
        for name in ("q", "k", "v", "o", "b", "g", "in", "out", "q_a", "q_b", "kv_b", "f_a", "f_b", "g_a")
    ),
    *("in_proj_qkvz", "in_proj_ba", "g_b_proj", "kv_a_proj_with_mqa"),
    *("input_linear", "output_linear", "shared_expert_gate"),
]
ADAPTERS: Mapping[str, dict[str, Any]] = {
    "every linear": {"target_modules": ALL},
    "attention": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "row-wise alone": {"target_modules": ["o_proj", "down_proj"], "use_rslora": True},
    "the first layer": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0]},
    "the last layer": {"target_modules": ["v_proj", "up_proj"], "layers_to_transform": [1]},
    "embedding and head": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "mixers": {"target_modules": ["in_proj_qkvz", "in_proj_ba", "in_proj", "out_proj"]},
    "projections": {"target_modules": PROJECTIONS},
    "dora": {"target_modules": ALL, "use_dora": True},
    "experts": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "last products of experts": {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
    "modules_to_save": {"target_modules": ALL, "modules_to_save": ["lm_head"]},
}


def adapted(family: str, adapter: str, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    model = base_model(family, dtype)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, **ADAPTERS[adapter], **more})
    if family in ("falcon_h1", "nemotron_h"):  # where peft refuses it
        config.target_modules = {name for name in config.target_modules or () if name != "out_proj"}
    return drawn(peft.get_peft_model(model, config))


def drawn(peft_model: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return peft_model


HYBRIDS: dict[str, dict[str, Any]] = {  # two layers, a mixer and attention
    "qwen3-next": {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4},
    "qwen3.5": {"layer_types": ["linear_attention", "full_attention"], "vocab_size": EVEN},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16},
}


OTHER_HYBRIDS = ("granitemoehybrid", "kimi_linear", "lfm2", "nemotron_h", "falcon_h1", "olmo_hybrid", "zamba2")


def _hybrid(family: str) -> PreTrainedModel:
    if family in OTHER_HYBRIDS:
        config = small_config(family)
        config.vocab_size = EVEN
        return make_tiny_model(config, torch.float64)
    if family == "qwen3.5":  # without experts, which peft would adapt with every linear
        config: Any = shrink_configuration(CONFIG_MAPPING["qwen3_5_text"]())
    else:
        config = preset_config(f"{family}-tiny", vocab_size=EVEN)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config.update(sizes | HYBRIDS[family])
    config._experts_implementation = "eager"
    return at_random(config)


def base_model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    if family in ("qwen3-moe", "gpt-oss"):
        return moe_model(family, dtype)
    if family in HYBRIDS or family in OTHER_HYBRIDS:
        return _hybrid(family).to(dtype)
    if family in FAMILIES:
        return of_family(family).to(dtype)
    if family == "deep":
        return deep("llama", dtype, 4, EVEN)
    if family != "biased":
        return tiny(family, dtype, vocabulary=EVEN)
    config = LlamaConfig(**SIZES | {"vocab_size": EVEN}, attention_bias=True, mlp_bias=True)
    return random_model(config, dtype, seed=3, attn_implementation="sdpa")


def dense(peft_model: Any, *, disabled: bool = False) -> float:
    peft_model.eval()
    documents, device = texts(LENGTHS), peft_model.device
    targets = sum(len(document) - 1 for document in documents)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for document in documents:
        ids = torch.from_numpy(document).to(device)
        logits = peft_model(input_ids=ids[None], use_cache=False).logits[0]
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        loss = loss + F.cross_entropy(logits[:-1], ids[1:], reduction="none").sum(dtype=torch.float64) / targets
    if not disabled:
        loss.backward()
    return loss.item()


@cache
def dense_answer(
    family: str, adapter: str, dtype: torch.dtype = torch.float64
) -> tuple[float, float, dict[str, Tensor]]:
    peft_model = adapted(family, adapter, dtype)
    loss = dense(peft_model)
    gradients = gradients_of(peft_model.get_base_model())
    with torch.no_grad(), peft_model.disable_adapter():
        return loss, dense(peft_model, disabled=True), gradients
