"""Attention to chosen latents in Triton: each row gathers the keys that it chose, where a masked kernel computes all.

A key is the numbers of its value and then those of k, one key/value head for many query heads, as multi-head latent
attention has them in its absorbed form. Forward and backward cost rows × chosen keys. Gradients of keys are added by
float32 atomics, whose order differs from run to run: not for deterministic mode.
"""

from typing import Any

import torch
from torch import Tensor

from longspan.attention.call import AttendCall, Saved
from longspan.attention.kernels.triton_flash import (
    BlockSizes,
    head_sizes,
    launch_fitting_blocks,
    padded_size,
    strides_of,
)
from longspan.attention.rows import contiguous_heads
from longspan.attention.tiles import Launch
from longspan.lazy import import_triton_kernels

# By the value's width, from 128: heads (`rows`) and keys of a block, warps, stages of loads in flight. Those of 128 and
# 512 are the fastest of four to six on an H200.
FORWARD: dict[int, tuple[BlockSizes, ...]] = {
    128: (BlockSizes(32, 64, 4, 2), BlockSizes(16, 32, 4, 1)),
    256: (BlockSizes(32, 64, 4, 2), BlockSizes(16, 32, 4, 1)),
    512: (BlockSizes(64, 64, 8, 2), BlockSizes(64, 32, 8, 2), BlockSizes(16, 32, 4, 1)),
}
GRADIENTS: dict[int, tuple[BlockSizes, ...]] = {
    128: (BlockSizes(32, 64, 4, 2), BlockSizes(16, 32, 4, 1)),
    256: (BlockSizes(32, 64, 8, 2), BlockSizes(32, 32, 4, 2), BlockSizes(16, 32, 4, 1)),
    512: (BlockSizes(32, 32, 8, 2), BlockSizes(16, 32, 4, 1)),
}
# A key has 512 numbers of its value, and 64 more.
LARGEST = 576
# The lists of keys of a run of rows take this many bytes.
_LISTED_BYTES = 256 << 20
# A program lists this many columns of a choice at a time.
_COLUMNS = 512
# A program sums the gradients of this many columns of a value at once, or of a quarter of a wide value's.
_PIECE = 64


def forward(q: Tensor, k: Tensor, v: Tensor, launch: Launch, call: AttendCall) -> tuple[Tensor, Tensor]:
    """Attend from q (Tq, N, H) to latents k (Tk, 1, H − Hv), v (Tk, 1, Hv): out (Tq, N, Hv), lse (Tq, N) float32."""
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    _launch_on_runs("forward", FORWARD, (q, k, v), (out, lse), launch, call)
    return out, lse


def backward(dout: Tensor, saved: Saved, launch: Launch, call: AttendCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this block: dq (Tq, N, H), dk (Tk, 1, H − Hv) and dv (Tk, 1, Hv), these in float32."""
    q, k, v, _, lse = saved
    delta = saved.deltas(dout)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (k, v))
    results = (lse.contiguous(), delta.contiguous(), dq, dk, dv)
    _launch_on_runs("gradients", GRADIENTS, (q, k, v, dout), results, launch, call)
    return dq, dk, dv


def _launch_on_runs(
    name: str,
    table: dict[int, tuple[BlockSizes, ...]],
    tensors: tuple[Tensor, ...],
    contiguous: tuple[Tensor, ...],
    launch: Launch,
    call: AttendCall,
) -> None:
    """Before each run of rows `list_keys` writes for every row which of its chosen keys it sees in this launch; these
    lists take _LISTED_BYTES. A program has 16 heads at least, as products of Triton want."""
    assert call.indices is not None
    kernels = import_triton_kernels("longspan.attention.kernels.triton_gathered_kernels")
    indices = call.indices.contiguous()
    places, place_starts, *_ = launch.key_bits
    q, k, v, *dout = (contiguous_heads(x) for x in tensors)
    heads = q.shape[1]
    columns = indices.shape[1]
    strides = (*strides_of(q), k.stride(0), v.stride(0), *strides_of(*dout))
    sizes = head_sizes(k, v)
    if dout:
        sizes["PIECE"] = min(max(_PIECE, padded_size(v) // 4), padded_size(v))
    limits = {"HAS_LEFT": launch.left is not None, "HAS_RIGHT": launch.right is not None}
    limits |= {"COLUMNS": _COLUMNS, "BLOCK": 1}
    run_length = max(1, _LISTED_BYTES // (4 * max(1, columns)))  # a listed key takes 4 bytes
    for row_blocks in launch.blocks(1, of_keys=False).split(run_length):  # blocks of one row each
        rows = len(row_blocks)
        lists, counts = (row_blocks.new_empty(shape) for shape in ((rows, columns), (rows,)))
        kernels.list_keys[rows, 1](
            *(indices, lists, counts, row_blocks, *launch.cu_seqlens, places, place_starts, columns),
            *(launch.left or 0, launch.right or 0),
            **limits,
        )
        run_arguments = (
            *contiguous,
            lists,
            counts,
            row_blocks,
            launch.cu_seqlens[0],
            columns,
            heads,
            call.scale,
            *strides,
        )

        def launch_blocks(
            blocks: BlockSizes, run_arguments: tuple[Any, ...] = run_arguments, programs: int = rows
        ) -> None:
            heads_of_program = min(blocks.rows, max(16, 1 << (heads - 1).bit_length()))
            launched = {
                "HEADS": heads_of_program,
                "KEYS": blocks.keys,
                "num_warps": blocks.warps,
                "num_stages": blocks.stages,
            }
            getattr(kernels, name)[programs, -(-heads // heads_of_program)](
                q, k, v, *dout, *run_arguments, **sizes, **launched
            )

        launch_fitting_blocks(f"gathered {name}", table, k, v, launch_blocks)
