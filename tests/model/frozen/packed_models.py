"""Tiny models with an adapter, whose widths 64 divides, the same ones over what packed weights stand for, and steps."""

from typing import Any

import peft
import torch
import transformers
from torch import Tensor

from longspan.comm import World
from longspan.model.execution import model_execution
from longspan.model.frozen.frozen_weights import weights_to_pack
from longspan.model.frozen.packed_format import NF4
from longspan.model.marks import packed_weights
from longspan.plan import plan_fixed
from longspan.train import run_step
from tests.model.lora.adapted import drawn
from tests.model.stock import SIZES, gradients_of, prepare_untried, random_model, texts

LENGTHS = (13, 1, 30, 7)

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
            weight.copy_(through_nf4(weight, dequantised))
    return peft_model


def through_nf4(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """What NF4 makes of a weight."""
    rows = weight.flatten(0, -2)
    values = torch.empty_like(rows, dtype=dtype)
    NF4.unpack(NF4.pack(rows), values)
    return values.view(weight.shape)


Steps = tuple[list[float], dict[str, Tensor], str]


def two_steps(peft_model: Any, world: World, frozen: str, **options: Any) -> Steps:
    """Losses, gradients, and what is said to be frozen, in bfloat16."""
    model = prepare_untried(peft_model, world, frozen=frozen, compute_dtype=torch.bfloat16, **options)
    assert bool(packed_weights(model)) == (frozen != "whole")
    plan = plan_fixed(LENGTHS, world.home, cp=world.home.slots, max_tokens_per_slot=32)
    losses = [run_step(model, plan, texts(LENGTHS), world).loss for _ in range(2)]
    return losses, gradients_of(model), model_execution(model).words.get("frozen", "")


def are_equal(steps: Steps, expected: Steps) -> bool:
    assert expected[1].keys() == steps[1].keys()
    return steps[0] == expected[0] and all(torch.equal(x, steps[1][name]) for name, x in expected[1].items())
