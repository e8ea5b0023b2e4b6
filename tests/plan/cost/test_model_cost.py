"""Costs of models: by what H200s sustain, and with layers that run forward twice, counted beside torch's own count."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from longspan.plan import Cost
from longspan.plan.cost.machine import LAYER_BYTES, LOGIT_BYTES, UPDATE_BYTES, Machine, with_recomputation
from longspan.plan.shape.model_shape import ModelShape

CONFIG = Qwen3Config(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=128,
)
SHAPE = ModelShape.of(CONFIG)


def test_on_h200_attention_and_all_else_have_rates_of_their_own() -> None:
    cost, shape, h200 = Machine.known("H200").cost(CONFIG), ModelShape.of(CONFIG), Machine.known("H200")
    assert cost.attention_seconds == pytest.approx(3 * 7 * 64 / h200.attention_flops_per_second)
    passes = (3 * 64 * LAYER_BYTES + 128 * LOGIT_BYTES) / h200.memory_bytes_per_second
    assert cost.linear_seconds == pytest.approx(6 * shape.weights / h200.product_flops_per_second + passes)
    assert cost.ring_step_seconds == pytest.approx(3 * 2 * h200.step_seconds)
    weights = shape.weights + 64 * 128  # the embedding multiplies nothing
    assert shape.stored_weights == weights
    assert cost.update_seconds == pytest.approx(
        h200.micro_batch_seconds + weights * UPDATE_BYTES / h200.memory_bytes_per_second
    )


def flops(recomputed: int) -> int:
    """Of a forward and a backward pass over one row, where attention's products are as good as none."""
    model = Qwen3ForCausalLM(CONFIG)
    for layer in model.model.layers[:recomputed]:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **more: checkpoint(forward, *args, use_reentrant=False, **more)
    embedded = torch.randn(1, 1, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        model(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    return counted.get_total_flops()


@pytest.mark.parametrize("layers", (1, 2, 3))
def test_recomputed_flops_are_those_that_torch_counts(layers: int) -> None:
    none, some = flops(0), flops(layers)
    cost = Cost.for_model(CONFIG, tflops=1.0)
    recomputed = with_recomputation(cost, SHAPE, "selective", layers)
    assert recomputed.linear_seconds / cost.linear_seconds == pytest.approx(some / none, rel=2e-3)
    assert recomputed == (with_recomputation(cost, SHAPE, "selective") if layers == 3 else recomputed)


def test_full_recomputation_repeats_attention_and_its_ring() -> None:
    cost = Cost.for_model(CONFIG, tflops=1.0)
    full, third = (
        with_recomputation(cost, SHAPE, "full"),
        with_recomputation(cost, SHAPE, "full", 1),
    )
    assert full.attention_seconds == pytest.approx(cost.attention_seconds * 9 / 7)
    assert full.ring_step_seconds == pytest.approx(cost.ring_step_seconds * 3 / 2)
    assert full.ring_bytes == pytest.approx(cost.ring_bytes * 4 / 3)
    assert third.attention_seconds == pytest.approx(cost.attention_seconds * (1 + 2 / 21))
    assert with_recomputation(cost, SHAPE, "none") == cost


def test_lean_recomputation_exchanges_queries_keys_and_values_once_more() -> None:
    cost = Cost.for_model(CONFIG, tflops=1.0)
    lean, half = (with_recomputation(cost, SHAPE, "selective", layers) for layers in (0, 1))
    exchanged = with_recomputation(cost, SHAPE, "exchanged")
    queries, keys = 4 * 16, 2 * 16
    once, again = 2 * 2 * (queries + keys), queries + 2 * keys  # q, k, v and out forward, their gradients backward
    assert lean.exchange_bytes == pytest.approx(cost.exchange_bytes * (1 + again / once))
    assert half.exchange_bytes == pytest.approx(cost.exchange_bytes * (1 + again / once / 3))
    assert exchanged == replace(lean, exchange_bytes=cost.exchange_bytes)


def test_frozen_weights_cost_no_gradients_of_their_own() -> None:
    cost = Cost.for_model(CONFIG, tflops=1.0)
    frozen, recomputed = (with_recomputation(cost, SHAPE, kind, frozen=True) for kind in ("none", "selective"))
    assert frozen.linear_seconds == pytest.approx(cost.linear_seconds * 4 / 6)
    assert frozen.attention_seconds == cost.attention_seconds and frozen.forward_only() == cost.forward_only()
    more = with_recomputation(cost, SHAPE, "selective").linear_seconds - cost.linear_seconds
    assert recomputed.linear_seconds == pytest.approx(frozen.linear_seconds + more)
