"""Tiny Hugging Face models, and what the stock model says about documents that it sees one by one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from longspan import World, prepare
from longspan.model.exactness import check_model, class_trial, row_trial
from longspan.model.seams import row_loss
from longspan.model.seams.meta_pass import MetaRecord, record_calls_and_draws
from longspan.testing import backend

VOCABULARY = 61
# Where the stock model computes: angles in float32 differ in their last bits between CPUs and GPUs.
REFERENCE = "cuda" if backend() == "nccl" else "cpu"

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
        return transformers.ApertusConfig(**SIZES)
    if family == "nanochat":
        return transformers.NanoChatConfig(**SIZES)
    if family == "qwen3":
        return transformers.Qwen3Config(**SIZES, tie_word_embeddings=True)
    if family == "mistral":
        return transformers.MistralConfig(**SIZES, sliding_window=5)
    if family == "gemma2":
        return transformers.Gemma2Config(**SIZES, sliding_window=5, query_pre_attn_scalar=8)
    if family in ("gpt-j", "codegen"):
        kind = transformers.GPTJConfig if family == "gpt-j" else transformers.CodeGenConfig
        drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        ids = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return kind(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, **ids, **drops)
    if family == "gpt-oss":
        return transformers.GptOssConfig(**SIZES, sliding_window=5, num_local_experts=1, num_experts_per_tok=1)
    if family == "qwen3-moe":
        return transformers.Qwen3MoeConfig(**SIZES, num_experts=1, num_experts_per_tok=1, mlp_only_layers=[0, 1])
    if family == "deepseek-v3":
        mla = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
        experts = {"n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
        sizes = {name: size for name, size in SIZES.items() if name != "head_dim"} | {"num_key_value_heads": 4}
        return transformers.DeepseekV3Config(**sizes, **mla, **experts, first_k_dense_replace=2)
    return transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )


def tiny(
    family: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    attention: str = "sdpa",
    vocabulary: int = VOCABULARY,
) -> PreTrainedModel:
    config = config_of(family)
    config.vocab_size = vocabulary
    return random_model(config, dtype, seed, attn_implementation=attention)


def random_model(
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    make: Callable[..., Any] = transformers.AutoModelForCausalLM.from_config,
    **settings: Any,
) -> PreTrainedModel:
    """A stock model with random weights, norms and biases among them: at one and zero they would hide gradients."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(config, **settings)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    if dtype == torch.float64 and backend() == "nccl":
        _norms_in_float64(model)
    return model.to(dtype)


def at_random(config: PreTrainedConfig, attention: str = "sdpa") -> PreTrainedModel:
    return random_model(config, attn_implementation=attention)


def _norms_in_float64(model: PreTrainedModel) -> None:
    """transformers' norms compute in float32, and a GPU may add a row's squares in another order for other rows."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(name, norm)


def texts(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCABULARY, size=length) for length in lengths]


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
    device: torch.device | str = REFERENCE,
    extra_loss: Callable[[], Tensor | float] = lambda: 0.0,
    targets: int | None = None,
) -> Answer:
    """What a stock model says that sees documents one by one; gradients are of what is added to the loss too."""
    torch.nn.Module.to(model, device)
    targets = targets or sum(len(d) - 1 for d in documents)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    logits = list[Tensor]()
    for document in documents:
        ids = torch.from_numpy(document).to(device)
        logits.append(model(input_ids=ids[None], use_cache=False).logits[0])
        loss = loss + F.cross_entropy(logits[-1][:-1], ids[1:], reduction="none").sum(dtype=torch.float64) / targets
    (loss + extra_loss()).backward()
    gradients = gradients_of(model)
    norm = torch.cat([gradient.flatten().double() for gradient in gradients.values()]).norm().item()
    return Answer(loss.item(), gradients, norm, [x.detach().cpu() for x in logits])


def stock_answer(
    family: str,
    dtype: torch.dtype,
    documents: Sequence[np.ndarray],
    device: torch.device | str = REFERENCE,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
) -> Answer:
    """Eager attention in float32; its softmax is float32 always, so float64 takes torch's own attention in float64."""
    attention = "eager" if dtype == torch.float32 else "sdpa"
    return answer(tiny(family, dtype, seed, attention, vocabulary).eval(), documents, device)


def dense_answer(model: PreTrainedModel, documents: Sequence[np.ndarray]) -> tuple[float, dict[str, Tensor]]:
    exact = answer(model.train(), documents)
    return exact.loss, exact.gradients


@contextmanager
def without_trials() -> Iterator[None]:
    """Models' classes, rows and losses are not tried before their steps: trials take as long as two steps."""
    with (
        patch.object(check_model, "try_small_model_of_class", lambda model: class_trial.ClassTrial()),
        patch.object(row_loss, "_try_row_loss"),
        patch.object(row_trial, "_tried_modes", lambda model: {False, True}),
    ):
        yield


def prepare_untried(model: PreTrainedModel, world: World, **options: Any) -> Any:
    with without_trials(), patch("longspan.model.prepared.record_calls_and_draws", _record_once):
        prepared = prepare(model, world, **options)
    vars(prepared)["modes_of_row_trial"] = {False, True}
    return prepared


_RECORDS = dict[Any, tuple[MetaRecord, list[str]]]()


def _record_once(model: PreTrainedModel, class_draws: tuple[str, ...]) -> MetaRecord:
    """What a pass on the meta device records, which takes half of `prepare`, once for models that differ in weights."""
    modules = dict(model.named_modules())
    key = (
        model.config.to_json_string(),
        *((name, type(module), module.extra_repr()) for name, module in modules.items()),
    )
    if key not in _RECORDS:
        record, names = record_calls_and_draws(model, class_draws), {module: name for name, module in modules.items()}
        _RECORDS[key] = record, [names[call.module] for call in record.calls]
    record, names = _RECORDS[key]
    calls = (replace(call, module=modules[name]) for call, name in zip(record.calls, names, strict=True))
    return replace(record, calls=tuple(calls))


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
    return max(error(single[name].double(), exact[name]) for name in exact)


def worst(results: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest error of any entry; infinite where the names differ."""
    return max(error(results[name], exact[name]) for name in exact) if results.keys() == exact.keys() else float("inf")
