"""Tiny models, a tokenizer of words with a chat template, and made datasets, for tests of Trainers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 24,
}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {}),
    "qwen3-moe": (Qwen3MoeConfig, EXPERTS | {"router_aux_loss_coef": 0.0}),
    "gpt-oss": (
        GptOssConfig,
        {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0},
    ),
    "qwen3-next": (Qwen3NextConfig, EXPERTS | DELTA_NET | {"router_aux_loss_coef": 0.0}),
}


def model_of(family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    kind, values = FAMILIES[family]
    config = kind(**SIZES | values | changes)
    attention = "eager" if family == "gpt-oss" else "sdpa"
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation="eager"
    )
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.to(dtype)


TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'a: ' }}{% generation %}{{ m['content'] + ' </s>' }}"
    "{% endgeneration %}{{ ' ' }}{% else %}{{ 'u: ' + m['content'] + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a: ' }}{% endif %}"
)
WORDS = tuple(f"w{i}" for i in range(VOCABULARY - 5))


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(("<pad>", "</s>", "<unk>", "u:", "a:", *WORDS))}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    return fast


def pad(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (longest - len(values))

    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in rows]),
        "labels": torch.tensor([padded(row.get("labels", row["input_ids"]), -100) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
    }


def _texts(seed: int) -> Callable[[int, int], str]:
    generator = np.random.default_rng(seed)
    return lambda low, high: " ".join(generator.choice(WORDS, generator.integers(low, high)))


def texts(count: int, seed: int = 0) -> Dataset:
    text = _texts(seed)
    return Dataset.from_list([{"text": text(5, 40)} for _ in range(count)])


def conversations(count: int, seed: int = 0) -> Dataset:
    text = _texts(seed)

    def turn() -> list[dict[str, str]]:
        return [{"role": "user", "content": text(2, 12)}, {"role": "assistant", "content": text(2, 20)}]

    return Dataset.from_list([{"messages": [m for _ in range(1 + i % 2) for m in turn()]} for i in range(count)])


def completions(count: int, seed: int = 0) -> Dataset:
    text = _texts(seed)
    return Dataset.from_list([{"prompt": text(2, 12) + " ", "completion": text(2, 20)} for _ in range(count)])


def preferences(count: int, seed: int = 0) -> Dataset:
    text = _texts(seed)
    return Dataset.from_list(
        [{"prompt": text(2, 12) + " ", "chosen": text(2, 20), "rejected": text(2, 20)} for _ in range(count)]
    )


def judged(count: int, seed: int = 0) -> Dataset:
    text = _texts(seed)
    return Dataset.from_list(
        [{"prompt": text(2, 12) + " ", "completion": text(2, 20), "label": i % 3 != 0} for i in range(count)]
    )
