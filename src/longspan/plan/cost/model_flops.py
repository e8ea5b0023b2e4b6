"""Model FLOPs of a step, what a device could do (the two sides of MFU), and the constants of a `Cost` from FLOPs.

The convention is that of PaLM (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B): forward and
backward without recomputation, 6 FLOPs a token for each weight that multiplies it, and attention's two products. Unlike
there, attention is counted as it is masked: causally over each document's true length, in windowed layers over the
window, and in chunked layers inside each chunk. Of experts the active ones count; the output head counts, the input
embedding, norms and padding do not. A state-space layer counts by its recurrence, row by row: the products of a row
with its state, not those of the chunks in which kernels compute them.
"""

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

from longspan.errors import PlanError
from longspan.plan.cost.attention_price import FORWARD_OF_ATTENTION
from longspan.plan.cost.state_cost import StateCost
from longspan.plan.shape.model_shape import ModelShape

# TFLOP/s of dense matrix products by the vendor's data sheets, without sparsity. The first name counts whose words are
# all in the device's. tensorfloat32 is what torch computes float32 products in, if that is allowed.
PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"bfloat16": 2250.0, "tensorfloat32": 1100.0}),
    ("H200 NVL", {"bfloat16": 835.0, "tensorfloat32": 417.0, "float32": 60.0}),
    ("H200", {"bfloat16": 989.0, "tensorfloat32": 494.0, "float32": 67.0}),
    ("H100 NVL", {"bfloat16": 835.0, "tensorfloat32": 417.0, "float32": 60.0}),
    ("H100 PCIe", {"bfloat16": 756.0, "tensorfloat32": 378.0, "float32": 51.0}),
    ("H100", {"bfloat16": 989.0, "tensorfloat32": 494.0, "float32": 67.0}),
    ("A100", {"bfloat16": 312.0, "tensorfloat32": 156.0, "float32": 19.5}),
    ("L40S", {"bfloat16": 362.0, "tensorfloat32": 183.0, "float32": 91.6}),
)

# What forward takes of forward and backward together: 2 of 6 FLOPs for each weight; 2 of 7 products of attention; keys
# and values go round once, of three turns (backward sends them again, and their gradients home), in one of two passes;
# queries, keys, values and outputs are exchanged in either pass alike; weights are gathered in either pass, and their
# gradients summed in float32; and, as one kernel has two in backward, a third of the launches and of the closing. A
# cost with measured forward passes does not use these.
FORWARD_SHARES = {
    "linear_seconds": 1 / 3,
    "real_row_seconds": 1 / 3,
    "attention_seconds": FORWARD_OF_ATTENTION,
    "ring_bytes": 1 / 3,
    "exchange_bytes": 1 / 2,
    "ring_step_seconds": 1 / 2,
    "merge_seconds": FORWARD_OF_ATTENTION,
    "copy_seconds": FORWARD_OF_ATTENTION,
    "micro_batch_seconds": 1 / 3,
    "launch_seconds": 1 / 3,
    "group_launch_seconds": 1 / 3,
    "document_launch_seconds": 1 / 3,
    "sharding_seconds": 1 / 4,
    "closing_seconds": 1 / 3,
    "update_seconds": 0.0,
}

USUAL_FLOPS = 4e14  # a second, of a device that is not named: that of `Cost()`


def model_flops(shape: ModelShape, lengths: Sequence[int], *, frozen: bool = False) -> int:
    """Count the FLOPs of forward and backward for documents of these lengths, by the convention above.

    `frozen` weights, under adapters, have no gradients of their own: 4 FLOPs in place of 6. Adapters do not count.

    >>> shape = ModelShape(layers=2, weights=1000, query_width=64, key_width=32)
    >>> model_flops(shape, [10, 20])
    587040

    Attention has two products, of queries and keys and of weights and values. Each takes 2 FLOPs for each visible pair
    and number of the query width, and backward twice that: 12 x query width x pairs. A state-space layer takes 3 times
    its `MixerShape.scan_flops` for each row. Rows of an image that see its later ones are not counted: less than 1 %.
    """
    pairs = sum(_window_pairs(length, length) for length in lengths)
    in_windows = sum(_window_pairs(length, shape.window) for length in lengths) if shape.window_layers else 0
    in_chunks = sum(_chunk_pairs(length, shape.chunk) for length in lengths) if shape.chunk_layers else 0
    pairs_of_layers = (shape.layers - shape.window_layers - shape.chunk_layers) * pairs
    pairs_of_layers += shape.window_layers * in_windows + shape.chunk_layers * in_chunks
    scans = 3 * shape.mixer_layers * shape.mixer.scan_flops if shape.mixer else 0
    row_flops = (4 if frozen else 6) * shape.weights + scans
    return row_flops * sum(lengths) + 12 * shape.query_width * pairs_of_layers


def _window_pairs(length: int, window: int) -> int:
    """Count the visible pairs of one document: each row sees itself and up to window - 1 before it."""
    seen = min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def _chunk_pairs(length: int, chunk: int) -> int:
    """Count the queries and keys that see each other if each row sees itself and those before it in its chunk."""
    chunks, last_rows = divmod(length, chunk)
    return chunks * _window_pairs(chunk, chunk) + _window_pairs(last_rows, last_rows)


def peak_tflops(device: str, dtype: str) -> float | None:
    """Return what a device does at most in this dtype, in 1e12 FLOP/s; None if `PEAK_TFLOPS` lacks device or dtype.

    float16 is as fast as bfloat16 on all devices of the table.

    >>> peak_tflops("NVIDIA H100 80GB HBM3", "bfloat16")
    989.0
    """
    for name, peaks in PEAK_TFLOPS:
        if all(word in device for word in name.split()):
            return peaks.get("bfloat16" if dtype == "float16" else dtype)
    return None


class ModelRates(TypedDict, total=False):
    """Figures of a slot that `Cost.for_model` takes besides its TFLOP/s of linear layers; each may be left out.

    `attention_tflops`, `scan_tflops` and `summary_tflops` are its rates in attention, in scans of state-space layers
    and in the passes that make a run's states for others (None: as `tflops`, summaries as scans). `channel_seconds`
    (0) are those of a row and channel of convolutions with their norms and gates, `ring_step_latency` (10 µs) those of
    a ring's step in one layer. A key or value has `bytes_per_value` (2).
    """

    attention_tflops: float | None
    scan_tflops: float | None
    summary_tflops: float | None
    channel_seconds: float
    ring_step_latency: float
    bytes_per_value: int


def price_model(shape: ModelShape, tflops: float, **rates: Unpack[ModelRates]) -> dict[str, Any]:
    """Return the fields of a `Cost` that follow from a model's shape at these rates.

    A row takes 6 FLOPs for each weight, and a causal document of L rows 7 products (2 forward, 5 backward) of L² / 2
    pairs in each layer, of 2 FLOPs for each number of its queries. A window or chunk makes that a time for each row. A
    ring sends keys and values forward and backward, and their gradients; an exchange has queries, outputs, keys and
    values in both passes. Raises PlanError for a rate of 0.
    """
    attention_tflops = _rate_or_default(rates.get("attention_tflops"), tflops)
    scan_tflops = _rate_or_default(rates.get("scan_tflops"), tflops)
    summary_tflops = _rate_or_default(rates.get("summary_tflops"), scan_tflops)
    step_latency, bytes_per_value = rates.get("ring_step_latency", 10e-6), rates.get("bytes_per_value", 2)
    flop_rates = {"tflops": tflops, "attention_tflops": attention_tflops, "scan_tflops": scan_tflops}
    for name, value in (flop_rates | {"summary_tflops": summary_tflops}).items():
        check_rate(name, value)
    full = shape.layers - shape.window_layers - shape.chunk_layers
    # FLOPs for each row and number of its queries: 7 products of 2 FLOPs for each key that it sees, in documents longer
    # than the window or chunk. A row sees half a chunk in the mean.
    limited_flops = shape.window_layers * 14 * shape.window + shape.chunk_layers * 7 * shape.chunk
    states = StateCost.of(
        shape,
        scan_tflops=scan_tflops,
        summary_tflops=summary_tflops,
        step_latency=step_latency,
        bytes_per_value=bytes_per_value,
        channel_seconds=rates.get("channel_seconds", 0.0),
    )
    scan_seconds = states.scan_seconds if states else 0.0
    limited_seconds = limited_flops * shape.query_width / (attention_tflops * 1e12)
    return {
        "linear_seconds": 6 * shape.weights / (tflops * 1e12) + limited_seconds + scan_seconds,
        "real_row_seconds": 6 * shape.expert_weights / (tflops * 1e12),
        "attention_seconds": full * 7 * shape.query_width / (attention_tflops * 1e12),
        "ring_bytes": float(shape.layers * 3 * 2 * shape.key_width * bytes_per_value),
        "exchange_bytes": float(shape.layers * 2 * 2 * (shape.query_width + shape.key_width) * bytes_per_value),
        "ring_step_seconds": shape.layers * 2 * step_latency,
        "states": states,
    }


def _rate_or_default(rate: float | None, default: float) -> float:
    """Return a rate, or the default where none is given."""
    return default if rate is None else rate


def check_rate(name: str, value: float) -> None:
    """Raise PlanError for a rate that is not above 0."""
    if not value > 0:
        raise PlanError(f"{name} is {value!r}; give a number above 0")
