"""Model FLOPs by counting pairs of rows one by one, and the peaks that they are compared with."""

import pytest

from longspan.model import preset_config
from longspan.plan.shape.model_shape import ModelShape, model_flops, peak_tflops

DENSE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
}


def pairs(length: int, window: int | None = None) -> int:
    """How many keys the rows of one document see, row by row."""
    return sum(1 for query in range(length) for key in range(query + 1) if window is None or query - key < window)


@pytest.mark.parametrize("lengths", [[], [1], [40, 24], [7] * 5])
def test_six_for_each_weight_and_token_and_causal_attention(lengths: list[int]) -> None:
    shape = ModelShape.of(DENSE)
    weights = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128) + 64 * 512  # the output head once, no embedding
    attention = 2 * sum(12 * 64 * pairs(n) for n in lengths)
    assert model_flops(shape, lengths) == 6 * weights * sum(lengths) + attention


@pytest.mark.parametrize("window", [1, 8, 24, 100])
def test_windowed_layers_count_their_window(window: int) -> None:
    kinds = ["full_attention", "sliding_attention"]
    shape = ModelShape.of(DENSE | {"sliding_window": window, "layer_types": kinds})
    lengths = [40, 24, 3]
    attention = sum(12 * 64 * (pairs(n) + pairs(n, window)) for n in lengths)
    assert model_flops(shape, lengths) == 6 * shape.weights * sum(lengths) + attention


@pytest.mark.parametrize("chunk", [1, 8, 24, 100])
def test_chunked_layers_count_each_chunk(chunk: int) -> None:
    kinds = ["chunked_attention", "full_attention"]
    shape = ModelShape.of(DENSE | {"attention_chunk_size": chunk, "layer_types": kinds})
    lengths = [40, 24, 3]
    seen = sum(row % chunk + 1 for n in lengths for row in range(n))
    attention = 12 * 64 * (sum(pairs(n) for n in lengths) + seen)
    assert model_flops(shape, lengths) == 6 * shape.weights * sum(lengths) + attention


def test_experts_count_as_far_as_a_token_visits_them() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    weights = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 2 * 3 * 64 * 32 + 64 * 8) + 64 * 512
    assert model_flops(ModelShape.of(DENSE | experts), [10]) == 6 * weights * 10 + 2 * 12 * 64 * 55


def test_qwen3_8b_takes_six_flops_a_weight_and_token() -> None:
    shape = ModelShape.of(preset_config("qwen3-8b"))
    weights = model_flops(shape, [1]) / 6
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
