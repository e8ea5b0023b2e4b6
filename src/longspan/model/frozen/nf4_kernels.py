"""Triton kernel of `packed_format.py`, its only importer: it needs triton, which CPU builds of torch lack."""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false

import triton
import triton.language as tl


@triton.jit
def unpack_kernel(packed, scales, values, out, columns, row_bytes, BLOCK: tl.constexpr, BYTES: tl.constexpr):
    """Compute the numbers of BYTES bytes of codes of one row: values[code] times the scale of the number's block.

    A row of `packed` has columns / 2 bytes of codes, then float32 scales; `scales` is the same memory as float32.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    inside = at < columns // 2
    pair = tl.load(packed + row * row_bytes + at, mask=inside, other=0).to(tl.int32)
    # in float32 numbers: the codes before take columns / 2 bytes
    first_scale = row * (row_bytes // 4) + columns // 8
    scale = tl.load(scales + first_scale + at // (BLOCK // 2), mask=inside, other=0.0)
    upper = tl.load(values + (pair >> 4)) * scale
    lower = tl.load(values + (pair & 15)) * scale
    column = tl.program_id(1) * BYTES * 2 + tl.arange(0, BYTES * 2)
    number = tl.interleave(upper, lower).to(out.dtype.element_ty)
    tl.store(out + row * columns + column, number, mask=column < columns)
