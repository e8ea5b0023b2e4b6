"""Tiny mixture-of-experts models, of every family too, and what the stock model says with the losses of its routers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DeepseekV3Config, GptOssConfig, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration
from longspan.model.experts.router import RouterCoefficients
from longspan.model.kinds import router_modules
from tests.model.stock import REFERENCE, SIZES, answer, random_model

EXPERTS = 8


def moe_config(family: str) -> PreTrainedConfig:
    """Qwen3-MoE with a dense layer between; gpt-oss with sinks and a window in every other layer; and others."""
    no_head: dict[str, Any] = {name: size for name, size in SIZES.items() if name != "head_dim"}
    if family == "qwen3-moe":
        sizes: dict[str, Any] = SIZES | {"num_hidden_layers": 3, "moe_intermediate_size": 24}
        return Qwen3MoeConfig(**sizes, num_experts=EXPERTS, num_experts_per_tok=2, mlp_only_layers=[1])
    if family == "gpt-oss":
        return GptOssConfig(**SIZES, sliding_window=5, num_local_experts=EXPERTS, num_experts_per_tok=2)
    heads = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    mla: dict[str, Any] = {"q_lora_rank": 24, "kv_lora_rank": 16, **heads}
    routing: dict[str, Any] = {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}
    sizes = no_head | {"num_key_value_heads": 4, "moe_intermediate_size": 24}
    return DeepseekV3Config(**sizes, **mla, **routing, first_k_dense_replace=1)


def moe_model(family: str, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A tiny model whose weights depend on the seed alone; expert 0 of its first router gets no token.

    Eager attention's softmax is float32 always, but for gpt-oss, so float64 takes torch's own attention.
    """
    attention = "eager" if dtype == torch.float32 or family == "gpt-oss" else "sdpa"
    settings: dict[str, Any] = {"attn_implementation": attention, "experts_implementation": "eager"}
    model = random_model(moe_config(family), dtype, seed, **settings)
    router: Any = next(iter(router_modules(model).values()))
    if getattr(router, "bias", None) is not None:
        router.bias.data[0] = -100.0
    elif hasattr(router, "e_score_correction_bias"):
        router.e_score_correction_bias[0] = -100.0
    return model


@dataclass(frozen=True)
class MoeStock:
    """The mean cross entropy, the losses of routers, and every gradient of their weighted sum."""

    loss: float
    balance: float
    z: float
    gradients: dict[str, Tensor]

    @property
    def more(self) -> dict[str, float]:
        """The losses of routers by their names in the result of a step."""
        return {"router.balance": self.balance, "router.z": self.z}


def moe_answer(
    model: PreTrainedModel,
    documents: Sequence[np.ndarray],
    weights: RouterCoefficients,
    device: torch.device | str = REFERENCE,
) -> MoeStock:
    """The stock model sees documents one by one; its routers' losses are over all tokens and layers of them."""
    with losses_of_routers(model.eval()) as losses:
        exact = answer(
            model, documents, device, lambda: (weights.balance or 0.0) * losses()[0] + weights.z * losses()[1]
        )
        balance, z = losses()
    return MoeStock(exact.loss, balance.item(), z.item(), exact.gradients)


@contextmanager
def losses_of_routers(model: PreTrainedModel) -> Iterator[Callable[[], tuple[Tensor, Tensor]]]:
    """Balance and z of what the model's routers have given inside the context, over all tokens and layers."""
    routed: dict[str, list[Tensor]] = {name: [] for name in router_modules(model)}
    hooks = [
        router.register_forward_hook(lambda _, __, out, name=name: routed[name].append(out[0]))
        for name, router in router_modules(model).items()
    ]
    yield lambda: router_losses([torch.cat(layer) for layer in routed.values()], model.config.num_experts_per_tok)
    for hook in hooks:
        hook.remove()


def router_losses(layers: Sequence[Tensor], top_k: int) -> tuple[Tensor, Tensor]:
    """Balance and z of each layer's logits (T, E), as float64; balance as transformers has it in float32."""
    rows = torch.cat([layer.double() for layer in layers])  # (layers T, E)
    chosen = F.one_hot(rows.topk(top_k).indices, rows.shape[1]).double()
    balance = rows.shape[1] * (chosen.sum((0, 1)) / len(rows) * rows.softmax(-1).mean(0)).sum()
    detached: Any = tuple(layer.detach() for layer in layers)
    stock = load_balancing_loss_func(detached, rows.shape[1], top_k)
    assert isinstance(stock, Tensor) and abs(stock.item() - balance.item()) < 1e-5 * balance.item()
    return balance, rows.logsumexp(-1).square().mean()


# ---- every family with experts that transformers has, by the type of its configuration

_ALL = (
    "qwen3_moe gpt_oss mixtral olmoe deepseek_v3 glm4_moe glm4_moe_lite minimax_m2 ernie4_5_moe deepseek_v2 dots1 "
    "granitemoe granitemoeshared granitemoe_swa hunyuan_v1_moe hy_v3 mimo_v2_flash exaone_moe afmoe flex_olmo "
    "cohere2_moe laguna solar_open mellum aria_text axk1 beam flint kolibri1 qwen2_moe gemma4_text granitemoehybrid "
    "minimax_m3_vl_text llama4_text sarvam_moe"
)
FAMILIES = tuple(family for family in _ALL.split() if family in CONFIG_MAPPING)  # an older transformers has fewer
_SETTINGS: dict[str, dict[str, Any]] = {
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24},
    "glm4_moe": {"use_qk_norm": True},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "granitemoehybrid": {"layer_types": ["attention"] * 4, "num_hidden_layers": 4},  # without state-space layers
}


def family_model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return make_tiny_model(shrink_configuration(CONFIG_MAPPING[family](**_SETTINGS.get(family, {}))), dtype)
