"""Tiny models of more layers, for pipelines, and what the stock model says about documents that it sees one by one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from tests.model import stock
from tests.model.experts.moe_models import losses_of_routers
from tests.model.stock import REFERENCE, SIZES, VOCABULARY, Answer, random_model


def deep_config(family: str, layers: int, vocabulary: int = VOCABULARY, **changes: Any) -> PreTrainedConfig:
    """Qwen3 with tied and Llama with untied embeddings; gpt-oss with sinks, experts and windows; tied Qwen3-MoE whose
    second layer is dense. Their pipelines have stages with and without experts."""
    sizes: dict[str, Any] = SIZES | {"num_hidden_layers": layers, "vocab_size": vocabulary} | changes
    if family == "qwen3":
        return transformers.Qwen3Config(**sizes, tie_word_embeddings=True)
    if family == "gpt-oss":
        return transformers.GptOssConfig(**sizes, sliding_window=5, num_local_experts=4, num_experts_per_tok=2)
    if family == "qwen3-moe":
        experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        return transformers.Qwen3MoeConfig(**sizes, **experts, mlp_only_layers=[1], tie_word_embeddings=True)
    return transformers.LlamaConfig(
        **sizes, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )


def deep(
    family: str, dtype: torch.dtype, layers: int = 4, vocabulary: int = VOCABULARY, **changes: Any
) -> PreTrainedModel:
    """A tiny model whose weights depend on its sizes alone; eager attention for gpt-oss and for float32.

    `changes` are further keys of its configuration.
    """
    settings: dict[str, Any] = {"attn_implementation": "sdpa"}
    if family == "gpt-oss" or dtype == torch.float32:
        settings["attn_implementation"] = "eager"
    if family in ("gpt-oss", "qwen3-moe"):
        settings["experts_implementation"] = "eager"
    return random_model(deep_config(family, layers, vocabulary, **changes), dtype, **settings)


def answer(
    model: PreTrainedModel,
    documents: Sequence[np.ndarray],
    device: torch.device | str = REFERENCE,
    balance: float = 0.0,
    z: float = 0.0,
) -> Answer:
    """A stock model sees documents one by one; router losses are over all tokens and layers."""
    if not (balance or z):
        return stock.answer(model, documents, device)
    with losses_of_routers(model) as losses:
        return stock.answer(model, documents, device, lambda: balance * losses()[0] + z * losses()[1])
