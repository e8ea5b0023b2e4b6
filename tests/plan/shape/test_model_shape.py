"""Sizes, weights, FLOPs and cost of a model, from its configuration alone."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from longspan.errors import PlanError
from longspan.model import preset_config
from longspan.plan import Cost
from longspan.plan.shape.model_shape import QWEN3_8B, ModelShape, model_flops, peak_tflops, read_experts

SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 10, "vocab_size": 100}
_ATTENTION = 8 * (8 + 2 * 8) + 8 * 8  # no head_dim, no key/value heads: 2 heads of 8 / 2, all alike


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


ONE, TWO = {"num_experts_per_tok": 1, "moe_intermediate_size": 3}, {"num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("changes", "weights", "query", "key"),
    [
        ({}, 2 * (_ATTENTION + 3 * 8 * 10) + 800, 8, 8),
        ({"head_dim": 16, "num_key_value_heads": 1}, 2 * (8 * (32 + 2 * 16) + 32 * 8 + 240) + 800, 32, 16),
        # two experts of 5 for a token, and a router over 4
        (TWO | {"moe_intermediate_size": 5, "num_experts": 4}, 2 * (_ATTENTION + 240 + 32) + 800, 8, 8),
        # experts as wide as intermediate_size, as Mixtral has them
        (TWO | {"num_local_experts": 4}, 2 * (_ATTENTION + 480 + 32) + 800, 8, 8),
        # the first layer dense, in three spellings
        *(
            (ONE | dense, 2 * _ATTENTION + 240 + 72 + 800, 8, 8)
            for dense in ({"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}, {"first_k_dense_replace": 1})
        ),
        # experts for everybody beside those that are chosen
        (ONE | {"n_shared_experts": 2}, 2 * (_ATTENTION + 216) + 800, 8, 8),
        (ONE | {"shared_expert_intermediate_size": 4}, 2 * (_ATTENTION + 168) + 800, 8, 8),
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
    ("changes", "attention", "linear"),  # of 2 layers: those that see all, and rows that a token sees in the others
    [
        ({"sliding_window": 16}, 0, 2 * 16),
        ({"sliding_window": 16, "use_sliding_window": False}, 2, 0),
        ({"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}, 1, 16),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 2}, 2, 0),
        ({"attention_chunk_size": 16, "layer_types": ["chunked_attention", "full_attention"]}, 1, 16 / 2),
    ],
)
def test_a_window_costs_every_token_the_same_and_a_chunk_half(
    changes: dict[str, Any], attention: int, linear: float
) -> None:
    plain, changed = Cost.for_model(SMALL, tflops=1e-12), Cost.for_model(SMALL | changes, tflops=1e-12)
    assert changed.attention_seconds == 7 * 8 * attention
    assert changed.linear_seconds - plain.linear_seconds == 14 * 8 * linear


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
        ({}, "dict has no hidden_size, no num_hidden_layers, no num_attention_heads, no vocab_size, no inter"),
        (SimpleNamespace(**(SMALL | {"vocab_size": None})), "SimpleNamespace has no vocab_size; the cost"),
        ({"text_config": {}}, "text_config of dict has no hidden_size"),
        (SMALL | {"intermediate_size": None}, "no intermediate_size or moe_intermediate_size"),
        (SMALL | {"num_attention_heads": "two"}, "num_attention_heads of dict is 'two'; it must be a count"),
        (SMALL | {"num_attention_heads": -2}, "is -2; it must be a count"),
        (SMALL | {"kv_lora_rank": 512}, "latent attention, which no configuration prices; leave --model out"),
        (SMALL | {"mamba_d_state": 128}, "state-space layers"),
        (SMALL | {"layer_types": ["full_attention", "linear_attention"]}, "layers of type 'linear_attention'"),
        ("no/such/config.json", "cannot read a model's configuration from no/such/config.json: No such file"),
    ],
)
def test_refused(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message):
        Cost.for_model(config, tflops=100)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(PlanError, match=r"not JSON|not an object"):
            Cost.for_model(tmp_path, tflops=100)
    for name in ("tflops", "inside_gbps", "across_gbps"):
        with pytest.raises(PlanError, match=f"{name} is 0; give a number above 0"):
            Cost.for_model(SMALL, **({"tflops": 1} | {name: 0}))


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_experts_under_every_name(name: str) -> None:
    counts: dict[str, Any] = {name: 8, "num_experts_per_tok": 2}
    assert read_experts({"text_config": SimpleNamespace(**counts)}) == read_experts(counts) == (8, name, 2)
    assert read_experts({"num_experts_per_tok": 2, name: None}) == (0, "", 0)


DENSE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
DENSE |= {"intermediate_size": 128, "vocab_size": 512}


def pairs(length: int, window: int | None = None) -> int:
    """How many keys the rows of one document see, row by row."""
    return sum(1 for query in range(length) for key in range(query + 1) if window is None or query - key < window)


@pytest.mark.parametrize("lengths", [[], [1], [40, 24], [7] * 5])
def test_six_for_each_weight_and_token_and_causal_attention(lengths: list[int]) -> None:
    shape = ModelShape.of(DENSE)
    weights = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128) + 64 * 512  # the output head once, no embedding
    attention = 2 * sum(12 * 64 * pairs(n) for n in lengths)
    assert model_flops(shape, lengths) == 6 * weights * sum(lengths) + attention


@pytest.mark.parametrize("width", [1, 8, 24, 100])
def test_layers_of_windows_and_chunks_count_what_their_rows_see(width: int) -> None:
    lengths = [40, 24, 3]
    windows = {"sliding_window": width, "layer_types": ["full_attention", "sliding_attention"]}
    chunks = {"attention_chunk_size": width, "layer_types": ["chunked_attention", "full_attention"]}
    in_chunks = sum(row % width + 1 for n in lengths for row in range(n))
    for values, seen in ((windows, sum(pairs(n, width) for n in lengths)), (chunks, in_chunks)):
        shape = ModelShape.of(DENSE | values)
        attention = 12 * 64 * (sum(pairs(n) for n in lengths) + seen)
        assert model_flops(shape, lengths) == 6 * shape.weights * sum(lengths) + attention


def test_experts_count_as_far_as_a_token_visits_them() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    weights = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 2 * 3 * 64 * 32 + 64 * 8) + 64 * 512
    assert model_flops(ModelShape.of(DENSE | experts), [10]) == 6 * weights * 10 + 2 * 12 * 64 * 55
    weights = model_flops(ModelShape.of(preset_config("qwen3-8b")), [1]) / 6
    assert weights == pytest.approx(7.57e9, rel=0.001)  # 8.19e9 without the input embedding


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989.0),
        ("NVIDIA H200 NVL", "bfloat16", 835.0),
        ("NVIDIA H100 80GB HBM3", "float16", 989.0),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("NVIDIA A100-SXM4-80GB", "tensorfloat32", 156.0),
        ("NVIDIA H200", "float64", None),
        ("NVIDIA GeForce RTX 3090", "bfloat16", None),
        ("CPU", "bfloat16", None),
    ],
)
def test_peaks_by_name_and_type(device: str, dtype: str, peak: float | None) -> None:
    assert peak_tflops(device, dtype) == peak
