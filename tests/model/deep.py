"""Tiny models of more layers, for pipelines, and what the stock model says about documents that it sees one by one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from longspan.model.experts.moe import router_modules
from longspan.testing import backend
from tests.model.experts.moe_models import router_losses
from tests.model.stock import SIZES, VOCABULARY, _norms_in_float64, gradients_of, weights_of


def deep_config(family: str, layers: int, vocabulary: int = VOCABULARY, **changes: Any) -> PreTrainedConfig:
    """Qwen3 with tied and Llama with untied embeddings; gpt-oss with sinks, experts and windows; tied Qwen3-MoE whose
    second layer is dense. Their pipelines have stages with and without experts."""
    sizes: dict[str, Any] = SIZES | {"num_hidden_layers": layers, "vocab_size": vocabulary} | changes
    if family == "qwen3":
        return Qwen3Config(**sizes, tie_word_embeddings=True)
    if family == "gpt-oss":
        return GptOssConfig(**sizes, sliding_window=5, num_local_experts=4, num_experts_per_tok=2)
    if family == "qwen3-moe":
        experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        return Qwen3MoeConfig(**sizes, **experts, mlp_only_layers=[1], tie_word_embeddings=True)
    return LlamaConfig(**sizes, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e4})


def deep(
    family: str, dtype: torch.dtype, layers: int = 4, vocabulary: int = VOCABULARY, **changes: Any
) -> PreTrainedModel:
    """A tiny model whose weights depend on its sizes alone; eager attention for gpt-oss and for float32.

    `changes` are further keys of its configuration.
    """
    attention = "eager" if family == "gpt-oss" or dtype == torch.float32 else "sdpa"
    settings: dict[str, Any] = {"attn_implementation": attention}
    if family in ("gpt-oss", "qwen3-moe"):
        settings["experts_implementation"] = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(deep_config(family, layers, vocabulary, **changes), **settings)
        for parameter in model.parameters():  # norms start at one and biases at zero, which would hide their gradients
            parameter.data += 0.1 * torch.randn_like(parameter)
    if dtype == torch.float64 and backend() == "nccl":
        _norms_in_float64(model)
    return model.to(dtype)


@dataclass(frozen=True)
class Answer:
    """The mean cross entropy, its gradients, their norm, and the logits of each document."""

    loss: float
    gradients: dict[str, Tensor]
    norm: float
    logits: list[Tensor]


def answer(
    model: PreTrainedModel,
    documents: Sequence[np.ndarray],
    device: torch.device | str,
    balance: float = 0.0,
    z: float = 0.0,
) -> Answer:
    """A stock model sees documents one by one; router losses are over all tokens and layers."""
    torch.nn.Module.to(model, device)
    targets, loss = sum(len(d) - 1 for d in documents), torch.zeros((), device=device).double()
    logits, routed = list[Tensor](), list[list[Tensor]]()
    routers = router_modules(model).values()
    hooks = [router.register_forward_hook(lambda _, __, out: routed[-1].append(out[0])) for router in routers]
    for document in documents:
        routed.append([])
        ids = torch.from_numpy(document).to(device)
        logits.append(model(input_ids=ids[None], use_cache=False).logits[0])
        loss = loss + F.cross_entropy(logits[-1][:-1], ids[1:], reduction="none").sum(dtype=torch.float64) / targets
    mean = loss.item()
    if balance or z:
        layers = [torch.cat(layer) for layer in zip(*routed, strict=True)]
        extra = router_losses(layers, model.config.num_experts_per_tok)
        loss = loss + balance * extra[0] + z * extra[1]
    loss.backward()
    for hook in hooks:
        hook.remove()
    gradients = gradients_of(model)
    norm = torch.cat([gradient.flatten().double() for gradient in gradients.values()]).norm().item()
    return Answer(mean, gradients, norm, [x.detach().cpu() for x in logits])


def weights_after(
    model: PreTrainedModel,
    batches: Sequence[Sequence[np.ndarray]],
    device: torch.device | str,
    *,
    lr: float,
    max_norm: float,
) -> dict[str, Tensor]:
    """The stock model's weights after a clipped SGD step on each batch."""
    torch.nn.Module.to(model, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for documents in batches:
        optimizer.zero_grad()
        answer(model, documents, device)
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return weights_of(model)
