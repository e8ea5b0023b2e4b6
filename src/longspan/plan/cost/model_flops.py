"""Model FLOPs of a step, and what a device could do: the two sides of MFU.

The convention is that of PaLM (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B), but attention is
counted as it is masked. Of experts the active ones count; the output head counts, the input embedding, norms and
padding do not. A state-space layer counts by its recurrence, row by row, not by the chunks of its kernels.
"""

from collections.abc import Sequence

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
    in_chunks = 0
    for length in lengths if shape.chunk_layers else ():
        chunks, last_rows = divmod(length, shape.chunk)
        in_chunks += chunks * _window_pairs(shape.chunk, shape.chunk) + _window_pairs(last_rows, last_rows)
    pairs_of_layers = (shape.layers - shape.window_layers - shape.chunk_layers) * pairs
    pairs_of_layers += shape.window_layers * in_windows + shape.chunk_layers * in_chunks
    scans = 3 * shape.mixer_layers * shape.mixer.scan_flops if shape.mixer else 0
    row_flops = (4 if frozen else 6) * shape.weights + scans
    return row_flops * sum(lengths) + 12 * shape.query_width * pairs_of_layers


def _window_pairs(length: int, window: int) -> int:
    """Count the visible pairs of one document: each row sees itself and up to window - 1 before it."""
    seen = min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


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
