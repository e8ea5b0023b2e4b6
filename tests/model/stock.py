"""Tiny Hugging Face models, and what the stock model says about documents that it sees one by one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    CodeGenConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPTJConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    NanoChatConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from longspan.comm import World
from longspan.model import prepare
from longspan.testing import backend

VOCABULARY = 61

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def config_of(family: str) -> PreTrainedConfig:
    """Qwen3 with tied and Llama with untied embeddings; Mistral with windows; Gemma 2 with windows and soft caps;
    gpt-oss with sinks and a window in every other layer; DeepSeek-V3 with values unlike queries (MLA). The attention of
    mixture-of-experts models alone: they have one expert, or dense layers in its place. Apertus with a learnt
    activation; NanoChat with its norm before and after the layers. GPT-J and CodeGen with a table of rotary angles."""
    if family == "apertus":
        return ApertusConfig(**SIZES)
    if family == "nanochat":
        return NanoChatConfig(**SIZES)
    if family == "qwen3":
        return Qwen3Config(**SIZES, tie_word_embeddings=True)
    if family == "mistral":
        return MistralConfig(**SIZES, sliding_window=5)
    if family == "gemma2":
        return Gemma2Config(**SIZES, sliding_window=5, query_pre_attn_scalar=8)
    if family in ("gpt-j", "codegen"):
        kind = GPTJConfig if family == "gpt-j" else CodeGenConfig
        drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        ids = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return kind(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, **ids, **drops)
    if family == "gpt-oss":
        return GptOssConfig(**SIZES, sliding_window=5, num_local_experts=1, num_experts_per_tok=1)
    if family == "qwen3-moe":
        return Qwen3MoeConfig(**SIZES, num_experts=1, num_experts_per_tok=1, mlp_only_layers=[0, 1])
    if family == "deepseek-v3":
        mla = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
        experts = {"n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
        sizes = {name: size for name, size in SIZES.items() if name != "head_dim"} | {"num_key_value_heads": 4}
        return DeepseekV3Config(**sizes, **mla, **experts, first_k_dense_replace=2)
    return LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e4})


def tiny(
    family: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    attention: str = "sdpa",
    vocabulary: int = VOCABULARY,
) -> PreTrainedModel:
    """A tiny model whose weights depend on the seed and its vocabulary alone."""
    config = config_of(family)
    config.vocab_size = vocabulary
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        for parameter in model.parameters():  # norms start at one and biases at zero, which would hide their gradients
            parameter.data += 0.1 * torch.randn_like(parameter)
    if dtype == torch.float64 and backend() == "nccl":
        _norms_in_float64(model)
    return model.to(dtype)


def _norms_in_float64(model: PreTrainedModel) -> None:
    """transformers' norms compute in float32, and a GPU may add a row's squares in another order for other rows."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(name, norm)


def texts(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Documents of random token ids."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCABULARY, size=length) for length in lengths]


@dataclass(frozen=True)
class Stock:
    """Logits of every document, the loss and every gradient, of a stock model that sees documents one by one."""

    logits: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]


def stock_answer(
    family: str,
    dtype: torch.dtype,
    documents: Sequence[np.ndarray],
    device: torch.device | str,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
) -> Stock:
    """Eager attention in float32; its softmax is float32 always, so float64 takes torch's own attention in float64."""
    model = tiny(family, dtype, seed, "eager" if dtype == torch.float32 else "sdpa", vocabulary).eval()
    model.to(device)
    targets = sum(len(document) - 1 for document in documents)
    logits, loss = [], torch.zeros((), dtype=torch.float64, device=device)
    for document in documents:
        ids = torch.from_numpy(document).to(device)
        logits.append(model(input_ids=ids[None], use_cache=False).logits[0])
        loss = loss + F.cross_entropy(logits[-1][:-1], ids[1:], reduction="none").sum(dtype=torch.float64) / targets
    loss.backward()
    return Stock([x.detach().cpu() for x in logits], loss.item(), gradients_of(model))


def at_random(config: PreTrainedConfig) -> PreTrainedModel:
    """A stock model in float64 with random weights, norms and biases among them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.double()


def dense_answer(model: PreTrainedModel, documents: Sequence[np.ndarray]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a stock model in training mode that sees documents one by one."""
    model.train()
    targets = sum(len(document) - 1 for document in documents)
    losses: list[Tensor] = []
    for document in documents:
        ids = torch.from_numpy(document)
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits[:-1], ids[1:], reduction="sum") / targets)
    total = torch.stack(losses).sum()
    total.backward()
    return total.item(), gradients_of(model)


def prepare_untried(model: PreTrainedModel, world: World, **options: Any) -> Any:
    """A prepared model whose rows are not tried before its steps, as another of its class is tried by the same test.

    The trials of a model of two layers take as long as two of its steps.
    """
    prepared = prepare(model, world, probe=False, **options)
    vars(prepared)["modes_of_row_trial"] = {False, True}
    return prepared


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every gradient, whole, on the CPU; all ranks call it together."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (g.full_tensor() if isinstance(g, DTensor) else g).cpu() for name, g in gradients.items()}


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter, whole, on the CPU; all ranks call it together."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).to("cpu", copy=True) for n, p in weights.items()}


def error(result: Tensor, exact: Tensor) -> float:
    """The largest difference relative to the largest wanted value."""
    assert result.shape == exact.shape and result.dtype == exact.dtype, (result.shape, exact.shape)
    return ((result - exact).abs().max() / exact.abs().max().clamp(min=1e-30)).item() if exact.numel() else 0.0


def own_error(single: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest error that one process alone makes in float32, of gradients that are known in float64."""
    return max(error(single[name].double(), exact[name]) for name in exact)


def worst(results: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest error of any entry; infinite where the names differ."""
    return max(error(results[name], exact[name]) for name in exact) if results.keys() == exact.keys() else float("inf")
