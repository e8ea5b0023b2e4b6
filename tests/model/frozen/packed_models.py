"""Tiny models with an adapter, whose widths 64 divides, and the same ones over what packed weights stand for."""

from typing import Any

import peft
import torch
import transformers

from longspan.model.frozen.four_bit import NF4
from longspan.model.frozen.frozen_weights import weights_to_pack
from tests.model.lora.adapted import drawn
from tests.model.stock import SIZES, random_model

WIDE = SIZES | {
    "hidden_size": 128,
    "intermediate_size": 128,
    "head_dim": 32,
    "vocab_size": 62,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}


def adapted(family: str = "llama", *, dequantised: torch.dtype | None = None, **changes: Any) -> Any:
    """A PeftModel in float32; with `dequantised` its frozen weights are what NF4 makes of them in that type."""
    if family != "llama":
        config: Any = transformers.Qwen3MoeConfig(**WIDE | MOE | changes)
    else:
        config = transformers.LlamaConfig(**WIDE | changes)
    model = random_model(config, torch.float32, attn_implementation="sdpa")
    linears = ["q_proj", "k_proj", "v_proj", "o_proj"] + ["gate_proj", "up_proj", "down_proj"] * (family == "llama")
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=linears)
    if family == "adapted experts":
        lora.target_parameters = ["experts.gate_up_proj", "experts.down_proj"]
    peft_model = drawn(peft.get_peft_model(model, lora))
    if dequantised is not None:
        for module, name in weights_to_pack(model).values():
            weight = getattr(module, name).data
            rows = weight.flatten(0, -2)
            values = torch.empty_like(rows, dtype=dequantised)
            NF4.unpack(NF4.pack(rows), values)
            weight.copy_(values.view(weight.shape))
    return peft_model
