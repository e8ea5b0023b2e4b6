"""The cost of a model on a machine, from its configuration alone."""

import doctest
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from longspan.errors import PlanError
from longspan.plan import Cost
from longspan.plan.shape import model_shape
from longspan.plan.shape.model_shape import ModelShape, read_experts

QWEN3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "layer_types": ["full_attention"] * 36,
    "sliding_window": None,
}
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 10,
    "vocab_size": 100,
}
_ATTENTION = (
    8 * (8 + 2 * 8) + 8 * 8
)  # no head_dim, no key/value heads: 2 heads of 8 / 2, queries, keys and values alike


def test_the_default_cost_is_qwen3_8b_at_400_tflops() -> None:
    values = Cost.for_model(QWEN3_8B, tflops=400, inside_gbps=350, across_gbps=40).to_json()
    constants = {name: value for name, value in Cost().to_json().items() if name != "source"}
    assert len(constants) == 17
    for name, value in constants.items():
        assert values[name] == pytest.approx(value, rel=1e-3), name


def test_attention_at_another_rate() -> None:
    windows = {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}
    plain, faster = (Cost.for_model(SMALL | windows, tflops=100, attention_tflops=rate) for rate in (None, 200.0))
    assert faster.attention_seconds == plain.attention_seconds / 2
    linear = 6 * ModelShape.of(SMALL).weights / 100e12
    assert faster.linear_seconds == pytest.approx((plain.linear_seconds + linear) / 2) != plain.linear_seconds
    with pytest.raises(PlanError, match="attention_tflops is 0; give a number above 0"):
        Cost.for_model(SMALL, tflops=100, attention_tflops=0)


FAMILIES = {  # with the width of their MLPs
    "gpt2": {"n_inner": None},
    "gpt2, a width": {"n_inner": 100},
    "gpt_bigcode": {},
    "nemotron": {"intermediate_size": 100, "num_key_value_heads": 4},
    "opt": {"ffn_dim": 100, "word_embed_proj_dim": 64},
    **{family: {"intermediate_size": 100} for family in ("biogpt", "gpt_neox", "phi", "starcoder2", "llama")},
}


@pytest.mark.parametrize("case", FAMILIES)
def test_weights_are_those_of_the_family(case: str, tmp_path: Path) -> None:
    family = case.partition(",")[0]
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500}
    config: Any = CONFIG_MAPPING[family](**sizes, max_position_embeddings=8, **FAMILIES[case])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1)
    config.save_pretrained(tmp_path)
    shape = ModelShape.of(config)
    assert shape.stored_weights == pytest.approx(matrices, rel=0.01) and ModelShape.of(tmp_path) == shape


@pytest.mark.parametrize("place", ["object", "file", "folder", "text_config", "text_config object"])
def test_wherever_the_configuration_is_kept(place: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    config: Any = {
        "object": SimpleNamespace(**QWEN3_8B),
        "file": tmp_path / "config.json",
        "folder": str(tmp_path),
        "text_config": {"text_config": QWEN3_8B, "hidden_size": 1},
        "text_config object": SimpleNamespace(text_config=SimpleNamespace(**QWEN3_8B)),
    }[place]
    assert Cost.for_model(config, tflops=100) == Cost.for_model(QWEN3_8B, tflops=100)


@pytest.mark.parametrize(
    ("changes", "weights", "query", "key"),
    [
        ({}, 2 * (_ATTENTION + 3 * 8 * 10) + 800, 8, 8),
        ({"head_dim": 16, "num_key_value_heads": 1}, 2 * (8 * (32 + 2 * 16) + 32 * 8 + 240) + 800, 32, 16),
        # two experts of 5 for a token, and a router over 4
        (
            {"num_experts_per_tok": 2, "moe_intermediate_size": 5, "num_experts": 4},
            2 * (_ATTENTION + 240 + 32) + 800,
            8,
            8,
        ),
        # experts as wide as intermediate_size, as Mixtral has them
        ({"num_experts_per_tok": 2, "num_local_experts": 4}, 2 * (_ATTENTION + 480 + 32) + 800, 8, 8),
        # the first layer dense, in three spellings
        *(
            (
                {"num_experts_per_tok": 1, "moe_intermediate_size": 3, **dense},
                2 * _ATTENTION + 240 + 72 + 800,
                8,
                8,
            )
            for dense in ({"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}, {"first_k_dense_replace": 1})
        ),
        # experts for everybody beside those that are chosen
        (
            {"num_experts_per_tok": 1, "moe_intermediate_size": 3, "n_shared_experts": 2},
            2 * (_ATTENTION + 216) + 800,
            8,
            8,
        ),
        (
            {"num_experts_per_tok": 1, "moe_intermediate_size": 3, "shared_expert_intermediate_size": 4},
            2 * (_ATTENTION + 168) + 800,
            8,
            8,
        ),
        # Llama 4: the listed layers have experts, one shared, as wide as intermediate_size; others are wider
        (
            {"num_experts_per_tok": 1, "num_local_experts": 4, "moe_layers": [1], "intermediate_size_mlp": 20},
            2 * _ATTENTION + 3 * 8 * 20 + (3 * 8 * 20 + 32) + 800,
            8,
            8,
        ),
    ],
)
def test_sizes(changes: dict[str, Any], weights: int, query: int, key: int) -> None:
    shape = ModelShape.of(SMALL | changes)
    assert (shape.weights, shape.query_width, shape.key_width, shape.layers) == (weights, query, key, 2)


@pytest.mark.parametrize(
    ("changes", "window_layers"),
    [
        ({"sliding_window": 16}, 2),
        ({"sliding_window": 16, "use_sliding_window": False}, 0),
        ({"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}, 1),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 2}, 0),
    ],
)
def test_a_window_costs_every_token_the_same(changes: dict[str, Any], window_layers: int) -> None:
    plain, changed = Cost.for_model(SMALL, tflops=1e-12), Cost.for_model(SMALL | changes, tflops=1e-12)
    assert changed.attention_seconds == 7 * 8 * (2 - window_layers)
    assert changed.linear_seconds - plain.linear_seconds == window_layers * 14 * 8 * 16


def test_a_chunk_costs_every_token_half_of_it() -> None:
    kinds = {"attention_chunk_size": 16, "layer_types": ["chunked_attention", "full_attention"]}
    plain, changed = Cost.for_model(SMALL, tflops=1e-12), Cost.for_model(SMALL | kinds, tflops=1e-12)
    assert changed.attention_seconds == 7 * 8
    assert changed.linear_seconds - plain.linear_seconds == 7 * 8 * 16


def test_every_number_of_the_machine_counts() -> None:
    base = {"tflops": 1.0, "inside_gbps": 2.0, "across_gbps": 3.0, "micro_batch_seconds": 0.5}
    base |= {"ring_step_latency": 1e-3}
    plain = Cost.for_model(SMALL, **base)
    changed = {
        "tflops": {"linear_seconds": 0.5, "attention_seconds": 0.5},
        "inside_gbps": {"inside_bytes_per_second": 2.0},
        "across_gbps": {"across_bytes_per_second": 2.0},
        "micro_batch_seconds": {"micro_batch_seconds": 2.0},
        "ring_step_latency": {"ring_step_seconds": 2.0},
    }
    for name, factors in changed.items():
        doubled = Cost.for_model(SMALL, **(base | {name: 2 * base[name]})).to_json()
        expected = plain.to_json() | {"source": doubled["source"]}
        assert doubled == expected | {key: expected[key] * factor for key, factor in factors.items()}, name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {},
            "dict has no hidden_size, no num_hidden_layers, no num_attention_heads, no vocab_size, no inter",
        ),
        (SimpleNamespace(**(SMALL | {"vocab_size": None})), "SimpleNamespace has no vocab_size; the cost"),
        ({"text_config": {}}, "text_config of dict has no hidden_size"),
        (SMALL | {"intermediate_size": None}, "no intermediate_size or moe_intermediate_size"),
        (SMALL | {"num_attention_heads": "two"}, "num_attention_heads of dict is 'two'; it must be a count"),
        (SMALL | {"num_attention_heads": -2}, "is -2; it must be a count"),
        (
            SMALL | {"kv_lora_rank": 512},
            "latent attention, which no configuration prices; give a Cost of your own",
        ),
        (SMALL | {"mamba_d_state": 128}, "state-space layers"),
        (SMALL | {"layer_types": ["full_attention", "linear_attention"]}, "layers of type 'linear_attention'"),
        ("no/such/config.json", "cannot read a model's configuration from no/such/config.json: No such file"),
    ],
)
def test_refused(config: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Cost.for_model(config, tflops=100)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_no_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PlanError, match=r"not JSON|not an object"):
        Cost.for_model(tmp_path, tflops=100)


@pytest.mark.parametrize("name", ["tflops", "inside_gbps", "across_gbps"])
def test_a_machine_that_does_nothing(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name} is 0; give a number above 0"):
        Cost.for_model(SMALL, **({"tflops": 1} | {name: 0}))


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_experts_under_every_name(name: str) -> None:
    counts: dict[str, Any] = {name: 8, "num_experts_per_tok": 2}
    assert read_experts({"text_config": SimpleNamespace(**counts)}) == read_experts(counts) == (8, name, 2)
    assert read_experts({"num_experts_per_tok": 2, name: None}) == (0, "", 0)


def test_docstrings() -> None:
    outcome = doctest.testmod(model_shape)
    assert outcome.attempted and not outcome.failed
