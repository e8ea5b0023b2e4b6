"""What rows keep for backward passes, counted in stock models whose norms keep their inputs alone, as fused ones do."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from longspan.errors import PlanError
from longspan.plan.simulate.row_bytes import QWEN3_8B, RowBytes

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 176,
    "vocab_size": 32,
}


class FusedNorm(torch.autograd.Function):
    """A norm that keeps its input and nothing else; its gradient is not asked for here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_activations_without_recomputation_are_those_that_a_model_saves(family: str) -> None:
    config = AutoConfig.for_model(family, **SIZES, attn_implementation="sdpa")
    model, saved = AutoModel.from_config(config), dict[int, torch.Tensor]()
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.forward = partial(lambda norm, x: FusedNorm.apply(x, norm.weight), module)

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    rows = 256
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(torch.arange(rows)[None] % 32, use_cache=False)
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / rows
    counted = RowBytes.of(config, bytes_per_value=4, checkpointing="none").activations
    assert 1 <= measured / counted < 1.04  # beside layers: the last norm's input, and rotary angles


def test_selective_keeps_outputs_of_attention_and_nothing_of_what_a2a_exchanged() -> None:
    full, selective = (RowBytes.of(QWEN3_8B, checkpointing=kind).activations for kind in ("full", "selective"))
    assert full == RowBytes().activations and selective - full == 36 * (4096 * 2 + 32 * 4)
    assert RowBytes.of(QWEN3_8B, checkpointing="selective", exchanged=True).activations == selective


def test_layers_that_are_not_counted_are_refused() -> None:
    mixture = SIZES | {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32}
    selective, every = (RowBytes.of(mixture, checkpointing=kind).activations for kind in ("selective", "none"))
    assert every > 3 * selective
    shared_blocks = SIZES | {"model_type": "zamba2"}
    assert RowBytes.of(shared_blocks, checkpointing="selective").activations > 0
    with pytest.raises(PlanError, match='under checkpointing "none" is not counted here: '):
        RowBytes.of(shared_blocks, checkpointing="none")
