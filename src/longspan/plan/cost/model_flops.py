"""Model FLOPs of a step, and what a device could do: the two sides of model FLOPs utilisation (MFU).

The convention is that of PaLM (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B): forward and
backward without recomputation, 6 FLOPs a token for each weight that multiplies it, and attention's two products. Unlike
there, attention is counted as it is masked: causally over each document's true length, in windowed layers over the
window, and in chunked layers inside each chunk. Of experts the active ones count; the output head counts, the input
embedding, norms and padding do not. A state-space layer counts by its recurrence, row by row: the products of a row
with its state, not those of the chunks in which kernels compute them.
"""

from collections.abc import Iterable, Sequence

from longspan.plan.cost.model_shape import ModelShape
from longspan.plan.cost.spans import later_pairs

# TFLOP/s of dense matrix products by the vendor's data sheets, without sparsity. The first name all of whose words are
# in the device's counts. tensorfloat32 is what torch computes float32 products in where that is allowed.
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


def model_flops(shape: ModelShape, lengths: Sequence[int], *, frozen: bool = False, spans: Iterable[int] = ()) -> int:
    """FLOPs of forward and backward for documents of these lengths, by the convention above.

    Of `frozen` weights, under adapters, which do not count themselves, the gradients are not computed: 4 FLOPs in place
    of 6.

    >>> shape = ModelShape(layers=2, weights=1000, query_width=64, key_width=32)
    >>> model_flops(shape, [10, 20])
    587040

    Attention takes 2 FLOPs for each pair of a query and a key that it sees, value of the query width and product (of
    queries and keys, of weights and values), and backward twice that: 12 x query width x pairs. A state-space layer
    takes 3 times its `MixerShape.scan_flops` for each row. `spans` are the rows of each span whose rows see each other.
    """
    pairs = sum(_pairs(length, length) for length in lengths)
    in_windows = sum(_pairs(length, shape.window) for length in lengths) if shape.window_layers else 0
    in_chunks = sum(_pairs_in_chunks(length, shape.chunk) for length in lengths) if shape.chunk_layers else 0
    pairs_of_layers = (shape.layers - shape.window_layers - shape.chunk_layers) * pairs
    pairs_of_layers += shape.window_layers * in_windows + shape.chunk_layers * in_chunks
    pairs_of_layers += shape.span_layers * later_pairs(spans)
    scans = 3 * shape.mixer_layers * shape.mixer.scan_flops if shape.mixer else 0
    of_rows = (4 if frozen else 6) * shape.weights + scans
    return of_rows * sum(lengths) + 12 * shape.query_width * pairs_of_layers


def _pairs(length: int, window: int) -> int:
    """Queries and keys of one document that see each other: each row sees itself and up to window - 1 before it."""
    seen = min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def _pairs_in_chunks(length: int, chunk: int) -> int:
    """The same where each row sees itself and those before it in its chunk."""
    chunks, rest = divmod(length, chunk)
    return chunks * _pairs(chunk, chunk) + _pairs(rest, rest)


def peak_tflops(device: str, dtype: str) -> float | None:
    """What a device of this name does at most in this type, in 1e12 FLOP/s; None where it is not in the table.

    >>> peak_tflops("NVIDIA H100 80GB HBM3", "bfloat16")
    989.0
    """
    for name, peaks in PEAK_TFLOPS:
        if all(word in device for word in name.split()):
            return peaks.get("bfloat16" if dtype == "float16" else dtype)
    return None
