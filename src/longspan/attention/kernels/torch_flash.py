"""torch's FlashAttention 2 on CUDA: bfloat16 and float16, all tiles of a launch in one variable-length call.

Causal and window masks are aligned to the last key (FlashAttention 2.1 on), as tiles are. One head size, a multiple of
8: smaller ones are padded with zeros. Log-sum-exp is (heads, rows) for variable lengths (torch 2.6 on). Backward goes
some heads at a time where all have more elements than its sums can count.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.attention.call import AttendCall, Saved
from longspan.attention.rows import concat_heads, pad_heads
from longspan.attention.tiles import Launch

# The kernel's sums for dq have at most this many elements.
MAX_SUM_ELEMENTS = 2**31 - 1
_BLOCK_ROWS = 128


def forward(q: Tensor, k: Tensor, v: Tensor, launch: Launch, call: AttendCall) -> tuple[Tensor, Tensor]:
    """Attend from q (Tq, N, H) to k (Tk, K, H), v (Tk, K, Hv): out (Tq, N, Hv), lse (Tq, N) float32."""
    size = _padded_head_dim(q, v)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(pad_heads(x, size) for x in (q, k, v)),
        *launch.cu_seqlens,
        *_max_lengths(launch),
        dropout_p=0.0,
        is_causal=_is_causal(launch),
        return_debug_mask=False,
        scale=call.scale,
        **_mask_arguments(launch),
    )
    assert lse.shape == (q.shape[1], q.shape[0]), (
        f"log-sum-exp of {tuple(lse.shape)} from torch {torch.__version__}"
    )
    return out[..., : v.shape[2]], lse.transpose(0, 1)


def backward(dout: Tensor, saved: Saved, launch: Launch, call: AttendCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq (Tq, N, H), dk (Tk, K, H), dv (Tk, K, Hv) of this block, from the lse over the keys of all blocks.

    Heads go through the kernel some at a time where all have more elements than it can count: it indexes those of the
    sum for dq in 32 bits, in whole blocks of rows and of 64 columns. Past MAX_SUM_ELEMENTS of them it writes to wrong
    addresses (an illegal address on an H200, torch 2.11).
    """
    q, k, v, out, lse = saved
    size = _padded_head_dim(q, v)
    tensors = [*(pad_heads(x, size) for x in (dout, q, k, v, out)), lse]
    rows = q.shape[0] + _BLOCK_ROWS * len(launch.tiling)
    elements_of_key_head = rows * (q.shape[1] // k.shape[1]) * -(-q.shape[2] // 64) * 64
    at_once = max(1, MAX_SUM_ELEMENTS // elements_of_key_head)  # key/value heads, each with its query heads
    slices = zip(*(x.split(at_once * (x.shape[1] // k.shape[1]), 1) for x in tensors), strict=True)
    parts = [_call_backward(slice_tensors, launch, call) for slice_tensors in slices]
    dq, dk, dv = (concat_heads(gradients) for gradients in zip(*parts, strict=True))
    return dq[..., : q.shape[2]], dk[..., : k.shape[2]], dv[..., : v.shape[2]]


def _call_backward(saved: Sequence[Tensor], launch: Launch, call: AttendCall) -> tuple[Tensor, ...]:
    *tensors, lse = saved
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=lse.device)  # seed and offset, unread at dropout 0
    return torch.ops.aten._flash_attention_backward(
        *tensors,
        lse.transpose(0, 1).contiguous(),
        *launch.cu_seqlens,
        *_max_lengths(launch),
        0.0,  # probability of dropout
        _is_causal(launch),
        no_dropout,
        no_dropout,
        scale=call.scale,
        **_mask_arguments(launch),
    )


def _is_causal(launch: Launch) -> bool:
    return launch.left is None and launch.right == 0


def _mask_arguments(launch: Launch) -> dict[str, int]:
    if _is_causal(launch):
        return {}
    limits = {"window_size_left": launch.left, "window_size_right": launch.right}
    return {name: limit for name, limit in limits.items() if limit is not None}


def _max_lengths(launch: Launch) -> tuple[int, int]:
    """With max_seqlen_q 1 the kernel folds head groups into rows, and its log-sum-exp with them, so it gets at least 2.
    If a window has no limit on its right, the kernel takes max_seqlen_k for the limit: too few keys if there are more
    queries, so it gets at least as many as queries (torch 2.11)."""
    queries, keys = launch.max_lengths
    open_right = launch.left is not None and launch.right is None
    return max(queries, 2), max(queries, keys) if open_right else keys


def _padded_head_dim(q: Tensor, v: Tensor) -> int:
    return -(-max(q.shape[2], v.shape[2]) // 8) * 8
