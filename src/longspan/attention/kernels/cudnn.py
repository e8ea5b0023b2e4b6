"""cuDNN's attention through torch: bfloat16 and float16, dense calls.

Every tile is a call of its own. cuDNN's causal mask is aligned to the first key, so a causal tile with more keys than
rows is a square one on the last keys and a full one on the keys before, merged. Windows it would need are not offered.
Query and value sizes are padded with zeros to multiples of 8, each for itself. cuDNN takes no tile of a single key and
its backward none of a single row: those few numbers are computed in plain tensor operations. Grouped heads are its own.

Source: torch `aten/src/ATen/native/cudnn/MHA.cpp` and `transformers/cuda/sdp_utils.cpp` (2.11 to 2.13).
"""

from collections.abc import Iterator
from functools import cache
from itertools import chain

import torch
from torch import Tensor

from longspan.attention.call import AttendCall, Saved, unsupported_capability_reason
from longspan.attention.kernels import reference
from longspan.attention.rows import accumulation_dtype, pad_heads
from longspan.attention.tiles import DenseCall, Launch, Tile, Tiling, dense_calls

# cuDNN takes query heads of 192 with values of 128 from this version on.
_VERSION = 91100
_HEAD_SIZE_MULTIPLE = 8


@cache
def unsupported_reason(device: torch.device) -> str:
    """Return what cuDNN or the GPU lacks for this kernel, as "needs …, got …"; "" for nothing."""
    version = torch.backends.cudnn.version()
    if version is None or version < _VERSION:
        return f"needs cuDNN {_version_text(_VERSION)}, got {'none' if version is None else _version_text(version)}"
    return unsupported_capability_reason(device, range(9, 11), "9 or 10")


def forward(q: Tensor, k: Tensor, v: Tensor, launch: Launch, call: AttendCall) -> tuple[Tensor, Tensor]:
    """Attend from q (Tq, N, H) to k (Tk, K, H), v (Tk, K, Hv): out (Tq, N, Hv), lse (Tq, N) float32."""
    dtype = accumulation_dtype(q.dtype)
    out = q.new_empty((*q.shape[:2], v.shape[2]), dtype=dtype)
    lse = q.new_empty(q.shape[:2], dtype=dtype)
    for dense in split_into_dense_calls(launch):
        tensors = q[dense.rows], k[dense.keys], v[dense.keys]
        if _is_too_small(dense):
            part_out, part_lse = reference.forward(*tensors, _launch_of_dense_call(dense, launch), call)
        else:
            part_out, part_lse = _call_forward(*tensors, dense.causal, call.scale)
        dense.write_or_merge_result(out, lse, part_out, part_lse)
    return out, lse


def backward(dout: Tensor, saved: Saved, launch: Launch, call: AttendCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq (Tq, N, H), dk (Tk, K, H), dv (Tk, K, Hv) of this block, in the accumulation dtype.

    Each dense call gets the lse over all blocks, so that its gradients are parts of the whole ones and are added up.
    """
    q, k, v, out, lse = saved
    totals = tuple(x.new_zeros(x.shape, dtype=accumulation_dtype(x.dtype)) for x in (q, k, v))
    for dense in split_into_dense_calls(launch):
        rows, keys = dense.rows, dense.keys
        dout_rows = dout[rows]
        saved_tile = Saved(q[rows], k[keys], v[keys], out[rows], lse[rows])
        if _is_too_small(dense):
            gradients = reference.backward(dout_rows, saved_tile, _launch_of_dense_call(dense, launch), call)
        else:
            gradients = _call_backward(dout_rows, saved_tile, dense.causal, call.scale)
        for total, index, x in zip(totals, (rows, keys, keys), gradients, strict=True):
            total[index] += x
    return totals  # pyright: ignore[reportReturnType]


def split_into_dense_calls(launch: Launch) -> Iterator[DenseCall]:
    """Yield the calls of all tiles, one tile after another: full ones, or causal ones with as many keys as rows."""
    return chain.from_iterable(map(dense_calls, launch.tiles))


def _is_too_small(dense: DenseCall) -> bool:
    """cuDNN does not take a single row or key."""
    return min(dense.rows.stop - dense.rows.start, dense.keys.stop - dense.keys.start) == 1


def _launch_of_dense_call(dense: DenseCall, launch: Launch) -> Launch:
    rows, keys = dense.rows.stop - dense.rows.start, dense.keys.stop - dense.keys.start
    return Launch(Tiling.from_tiles((Tile(0, rows, 0, keys, right=0 if dense.causal else None),)), launch.device)


def _call_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q (Tq, N, H) to out (Tq, N, Hv) in its dtype, lse (Tq, N) float32."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(_add_batch_dim(x) for x in (q, k, v)),
        attn_bias=None,
        compute_log_sumexp=True,
        is_causal=causal,
        scale=scale,
    )
    return out[0].transpose(0, 1)[..., : v.shape[2]], lse.view(q.shape[1], q.shape[0]).transpose(0, 1)


def _call_backward(dout: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """out and lse are over the keys of all blocks."""
    q, k, v, out, lse = saved
    heads_first = lse.float().transpose(0, 1).contiguous()[None]  # (1, N, Tq)
    # torch asks for dropout's seed and offset, and reads neither at dropout 0.
    unread_seed = torch.zeros((), dtype=torch.int64, device=q.device)
    absent = None  # bias and boundaries of variable lengths: torch takes None for an undefined tensor
    # torch keeps cuDNN's plans by the strides of q, k and v only, so those of out and dout must always be the same.
    dout = dout.contiguous()
    out = out.to(q.dtype).contiguous()
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(_add_batch_dim(x) for x in (dout, q, k, v, out)),
        heads_first.unsqueeze(-1) if _lse_has_last_dim(q.device) else heads_first,
        philox_seed=unread_seed,
        philox_offset=unread_seed,
        attn_bias=absent,
        cum_seq_q=absent,
        cum_seq_k=absent,
        max_q=q.shape[0],
        max_k=k.shape[0],
        dropout_p=0.0,
        is_causal=causal,
        scale=scale,
    )
    return tuple(x[0].transpose(0, 1)[..., : y.shape[2]] for x, y in zip(gradients, (q, k, v), strict=True))


@cache
def _lse_has_last_dim(device: torch.device) -> bool:
    """torch gives, and so takes, the log-sum-exp as (1, N, T, 1) or as (1, N, T); it is tried out once."""
    x = torch.zeros((1, 1, 64, 64), dtype=torch.bfloat16, device=device)
    _, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        x, x, x, attn_bias=None, compute_log_sumexp=True, scale=1.0
    )
    return lse.ndim == 4


def _add_batch_dim(x: Tensor) -> Tensor:
    """(T, N, H) to (1, N, T, H) without moving rows, H padded"""
    x = pad_heads(x, -(-x.shape[2] // _HEAD_SIZE_MULTIPLE) * _HEAD_SIZE_MULTIPLE)
    return (x if x.stride(2) == 1 else x.contiguous()).unsqueeze(0).transpose(1, 2)


def _version_text(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
