"""Attention to chosen blocks of keys in Triton: each row gathers the blocks that it chose, of few key/value heads.

One launch has all key/value heads, whether they share a choice or each has its own. Forward and backward cost rows ×
chosen keys, and hold no number for each row and key. Gradients of keys are summed over the rows that chose a block, in
one order: the same bits each time.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.attention.call import AttendCall, Saved
from longspan.attention.kernels.triton_flash import BlockSizes, head_sizes, launch_fitting_blocks, strides_of
from longspan.attention.rows import contiguous_heads
from longspan.attention.tiles import Launch
from longspan.lazy import import_triton_kernels

LARGEST = 256
# Without a name the kernel is chosen where a document has this many times the keys that a row may choose. In shorter
# ones a masked kernel computes dense tiles sooner. Not measured yet (bench/attention/sparse_layers.py has both ways).
GATHERS_FROM = 8
# By the head's width, from 128: query heads (`rows`) and keys of a block, warps, stages of loads in flight.
FORWARD: dict[int, tuple[BlockSizes, ...]] = {
    128: (BlockSizes(16, 64, 4, 3), BlockSizes(16, 32, 4, 1)),
    256: (BlockSizes(16, 64, 4, 2), BlockSizes(16, 32, 4, 1)),
}
QUERY_GRADIENTS: dict[int, tuple[BlockSizes, ...]] = {
    128: (BlockSizes(16, 64, 4, 3), BlockSizes(16, 32, 4, 1)),
    256: (BlockSizes(16, 64, 4, 2), BlockSizes(16, 32, 4, 1)),
}
# `rows` are pairs of a row and a head.
KEY_GRADIENTS: dict[int, tuple[BlockSizes, ...]] = {
    128: (BlockSizes(64, 64, 4, 2), BlockSizes(32, 32, 4, 1)),
    256: (BlockSizes(64, 32, 4, 2), BlockSizes(32, 16, 4, 1)),
}
# The lists of keys of a run of rows take this many bytes.
_LISTED_BYTES = 256 << 20
# A program lists this many keys at a time.
_COLUMNS = 512
# So many choices of rows are sorted by their block at a time: up to 24 bytes each.
_SORTED_CHOICES = 1 << 24


def pays(call: AttendCall) -> bool:
    """Whether the call's documents are so long that gathering blocks is sooner done than masking all keys."""
    return call.longest >= GATHERS_FROM * call.chosen_keys


def forward(q: Tensor, k: Tensor, v: Tensor, launch: Launch, call: AttendCall) -> tuple[Tensor, Tensor]:
    """Attend from q (Tq, N, H) to k (Tk, K, H), v (Tk, K, Hv): out (Tq, N, Hv), lse (Tq, N) float32."""
    q, k, v = (contiguous_heads(x) for x in (q, k, v))
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    _launch_on_lists("forward", FORWARD, (q, k, v), (out, lse), launch, call)
    return out, lse


def backward(dout: Tensor, saved: Saved, launch: Launch, call: AttendCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this block: dq (Tq, N, H), dk (Tk, K, H) and dv (Tk, K, Hv), these in float32."""
    q, k, v, dout = (contiguous_heads(x) for x in (saved.q, saved.k, saved.v, dout))
    statistics = saved.lse.contiguous(), saved.deltas(dout).contiguous()
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (k, v))
    _launch_on_lists("query_gradients", QUERY_GRADIENTS, (q, k, v, dout), (*statistics, dq), launch, call)
    choices = _count_choices(call)
    places, place_starts, *_ = launch.key_bits
    group = q.shape[1] // k.shape[1]
    strides = strides_of(q, k, v, dout)
    limits = {"HAS_LEFT": launch.left is not None, "HAS_RIGHT": launch.right is not None}
    for run in _rows_by_block(launch, call):

        def launch_blocks(blocks: BlockSizes, run: _RowsByBlock = run) -> None:
            keys = min(blocks.keys, max(16, 1 << (call.block_size - 1).bit_length()))
            grid = len(run.block_list), k.shape[1], -(-call.block_size // keys)
            _kernels().key_gradients[grid](
                *(q, k, v, dout, *statistics, dk, dv, run.order, run.block_list, run.starts, run.rows),
                *(*launch.cu_seqlens, places, place_starts, group, choices, launch.left or 0, launch.right or 0),
                *(call.scale, *strides),
                **limits,
                **head_sizes(k, v),
                BLOCK=call.block_size,
                PAIRS=blocks.rows,
                KEYS=keys,
                num_warps=blocks.warps,
                num_stages=blocks.stages,
            )

        launch_fitting_blocks("blocks key_gradients", KEY_GRADIENTS, k, v, launch_blocks)
    return dq, dk, dv


def _kernels() -> Any:
    return import_triton_kernels("longspan.attention.kernels.triton_blocks_kernels")


def _count_choices(call: AttendCall) -> int:
    assert call.indices is not None
    return call.indices.shape[1] if call.by_head else 1


def _launch_on_lists(
    name: str,
    table: dict[int, tuple[BlockSizes, ...]],
    tensors: tuple[Tensor, ...],
    contiguous: tuple[Tensor, ...],
    launch: Launch,
    call: AttendCall,
) -> None:
    """Before each run of rows `list_keys` writes which keys of their blocks they see in this launch. A program has 16
    heads at least, as products of Triton want."""
    assert call.indices is not None
    kernels = _kernels()
    indices = call.indices.contiguous()
    places, place_starts, *_ = launch.key_bits
    q, k, v, *dout = tensors
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    choices, columns = _count_choices(call), indices.shape[-1]
    width = max(1, columns * call.block_size)
    limits = {"HAS_LEFT": launch.left is not None, "HAS_RIGHT": launch.right is not None}
    limits |= {"COLUMNS": _COLUMNS, "BLOCK": call.block_size}
    run_length = max(1, _LISTED_BYTES // (4 * width * choices))  # a listed key takes 4 bytes
    for row_blocks in launch.blocks(1, of_keys=False).split(run_length):  # blocks of one row each
        rows = len(row_blocks)
        lists, counts = (row_blocks.new_empty(shape) for shape in ((rows, choices, width), (rows, choices)))
        kernels.list_keys[rows, choices](
            *(indices, lists, counts, row_blocks, *launch.cu_seqlens, places, place_starts, columns),
            *(launch.left or 0, launch.right or 0),
            **limits,
        )
        arguments = (
            *contiguous,
            lists,
            counts,
            row_blocks,
            launch.cu_seqlens[0],
            width,
            group,
            choices,
            call.scale,
        )

        def launch_blocks(blocks: BlockSizes, arguments: tuple[Any, ...] = arguments, programs: int = rows) -> None:
            grid = programs, kv_heads, -(-group // blocks.rows)
            launched = {
                "HEADS": blocks.rows,
                "KEYS": blocks.keys,
                "num_warps": blocks.warps,
                "num_stages": blocks.stages,
            }
            getattr(kernels, name)[grid](
                q, k, v, *dout, *arguments, *strides_of(*tensors), **head_sizes(k, v), **launched
            )

        launch_fitting_blocks(f"blocks {name}", table, k, v, launch_blocks)


class _RowsByBlock(NamedTuple):
    """The rows of a run that chose each block of a launch.

    `block_list` (n, 2) has the tile and the number of each block, `order` (choices, n) the blocks, those with the most
    rows first; `rows` of block b of choice c are those from starts[c, b] to starts[c, b + 1], (choices, n + 1).
    """

    block_list: Tensor
    order: Tensor
    starts: Tensor
    rows: Tensor


def _rows_by_block(launch: Launch, call: AttendCall) -> Iterator[_RowsByBlock]:
    """Runs of rows are so long that _SORTED_CHOICES are sorted at a time, or have one row."""
    assert call.indices is not None
    choices, columns = _count_choices(call), call.indices.shape[-1]
    blocks = launch.key_blocks(call.block_size)
    count = len(blocks.list)
    q_ends = launch.cu_seqlens[0]
    run_length = max(1, _SORTED_CHOICES // max(1, choices * columns))
    for first in range(0, len(call.indices), run_length):
        indices = call.indices[first : first + run_length]
        row = torch.arange(first, first + len(indices), device=q_ends.device, dtype=torch.int32)
        tile = torch.bucketize(row, q_ends[1:], right=True)
        starts = blocks.starts[tile][:, None, None]
        number = indices.reshape(len(indices), choices, columns) + starts
        exists = (number >= starts) & (number < blocks.starts[tile + 1][:, None, None])
        # What is no block of the row's tile comes behind all blocks of the choice.
        number = torch.where(exists, number, count)
        number += (count + 1) * torch.arange(choices, device=number.device, dtype=torch.int32)[:, None]
        ordered, place = number.int().flatten().sort(stable=True)
        edges = torch.arange(choices * (count + 1), device=number.device, dtype=torch.int32)
        edges = torch.searchsorted(ordered, edges).view(choices, count + 1)
        order = edges.diff(dim=1).argsort(dim=1, descending=True, stable=True)
        yield _RowsByBlock(blocks.list, order, edges, row[place // (choices * columns)])
