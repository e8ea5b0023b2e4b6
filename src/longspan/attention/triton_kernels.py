"""Triton kernels of `fused.py`, which alone imports this module: it needs triton, which CPU builds of torch lack."""

# pyright: basic, reportMissingImports=false

import triton
import triton.language as tl


@triton.jit
def merge(
    total_out,
    total_lse,
    out,
    lse,
    index,
    pairs,
    heads,
    size,
    total_row,
    total_head,
    total_lse_row,
    total_lse_head,
    out_row,
    out_head,
    lse_row,
    lse_head,
    HAS_INDEX: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """total ← total + σ(lse − total_lse) · (out − total), for PAIRS (row, head) pairs of `size` columns each."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    real = pair < pairs
    row, head = (pair // heads).to(tl.int64), pair % heads
    into = row
    if HAS_INDEX:
        into = tl.load(index + row, mask=real, other=0)
    held_at = total_lse + into * total_lse_row + head * total_lse_head
    held = tl.load(held_at, mask=real, other=0.0)
    new = tl.load(lse + row * lse_row + head * lse_head, mask=real, other=0.0)
    step = tl.sigmoid(new - held)
    top = tl.maximum(held, new)
    tl.store(held_at, top + tl.log(tl.exp(held - top) + tl.exp(new - top)), mask=real)
    column = tl.arange(0, WIDTH)
    inside = real[:, None] & (column < size)[None, :]
    at = total_out + (into * total_row + head * total_head)[:, None] + column[None, :]
    before = tl.load(at, mask=inside, other=0.0)
    after = tl.load(out + (row * out_row + head * out_head)[:, None] + column[None, :], mask=inside, other=0.0)
    tl.store(at, before + step[:, None] * (after.to(tl.float32) - before), mask=inside)
