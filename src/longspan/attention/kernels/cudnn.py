"""cuDNN's attention through torch: bfloat16 and float16, dense calls.

Every tile is a call of its own. cuDNN's causal mask is aligned to the first key, so a causal tile with more keys than
rows is a square one on the last keys and a full one on the keys before, merged. Windows it would need are not offered.
Query and value sizes are padded with zeros to multiples of 8, each for itself. cuDNN takes no tile of a single key and
its backward none of a single row: those few numbers are computed in plain tensor operations. Grouped heads are its own.

Source: torch `aten/src/ATen/native/cudnn/MHA.cpp` and `transformers/cuda/sdp_utils.cpp` (2.11 to 2.13).
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan.attention.geometry.launch import Launch
from longspan.attention.geometry.tiles import Tile, Tiling
from longspan.attention.kernels import reference
from longspan.attention.sums.merge import accumulation_dtype, merge_

_CAPABILITIES = (9, 10)
_VERSION = 91100  # from it on, query heads of 192 with values of 128
_SIZES = 8  # head sizes are multiples of this


class _Call(NamedTuple):
    rows: slice
    keys: slice
    causal: bool
    first: bool  # whether no call before had these rows


@cache
def missing(device: torch.device) -> str:
    """What this installation or device lacks for the kernel; "" where nothing."""
    version = torch.backends.cudnn.version()
    if version is None or version < _VERSION:
        return f"needs cuDNN {_dotted(_VERSION)}, got {'none' if version is None else _dotted(version)}"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major in _CAPABILITIES else f"needs compute capability 9 or 10, got {major}.{minor}"


def forward(
    q: Tensor, k: Tensor, v: Tensor, launch: Launch, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """q (Tq, N, H), k (Tk, K, H), v (Tk, K, Hv) -> out (Tq, N, Hv), lse (Tq, N) float32."""
    assert softcap is None
    dtype = accumulation_dtype(q.dtype)
    out = q.new_empty((*q.shape[:2], v.shape[2]), dtype=dtype)
    lse = q.new_empty(q.shape[:2], dtype=dtype)
    for call in calls(launch):
        given = q[call.rows], k[call.keys], v[call.keys]
        if _is_tiny(call):
            part_out, part_lse = reference.forward(*given, _alone(call, launch), scale=scale)
        else:
            part_out, part_lse = _forward(*given, call.causal, scale)
        if call.first:
            out[call.rows], lse[call.rows] = part_out, part_lse
        else:
            merge_(out, lse, call.rows, part_out, part_lse)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    launch: Launch,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this block, where out (Tq, N, Hv) and lse (Tq, N) are over the keys of all blocks."""
    assert softcap is None
    totals = tuple(x.new_zeros(x.shape, dtype=accumulation_dtype(x.dtype)) for x in (q, k, v))
    for call in calls(launch):
        rows, keys = call.rows, call.keys
        given = dout[rows], q[rows], k[keys], v[keys], out[rows], lse[rows]
        if _is_tiny(call):
            gradients = reference.backward(*given, _alone(call, launch), scale=scale)
        else:
            gradients = _backward(*given, call.causal, scale)
        for total, where, x in zip(totals, (rows, keys, keys), gradients, strict=True):
            total[where] += x
    return totals  # pyright: ignore[reportReturnType]


def calls(launch: Launch) -> Iterator[_Call]:
    """The dense calls of a launch: each full, or causal with as many keys as rows."""
    for tile in launch.tiles:
        rows, keys = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        assert tile.left is None and tile.right in (None, 0), "cuDNN was chosen for a window"
        if tile.right is None or tile.queries == 1:
            yield _Call(rows, keys, False, True)
            continue
        diagonal = tile.k_stop - tile.queries
        yield _Call(rows, slice(diagonal, tile.k_stop), True, True)
        if tile.keys > tile.queries:
            yield _Call(rows, slice(tile.k_start, diagonal), False, False)


def _is_tiny(call: _Call) -> bool:
    return min(call.rows.stop - call.rows.start, call.keys.stop - call.keys.start) == 1


def _alone(call: _Call, launch: Launch) -> Launch:
    rows, keys = call.rows.stop - call.rows.start, call.keys.stop - call.keys.start
    return Launch(Tiling.of((Tile(0, rows, 0, keys, right=0 if call.causal else None),)), launch.device)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out (Tq, N, Hv) in q's dtype, lse (Tq, N) float32."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(_batched(x) for x in (q, k, v)), None, True, 0.0, causal, False, scale=scale
    )
    return out[0].transpose(0, 1)[..., : v.shape[2]], lse.view(q.shape[1], q.shape[0]).transpose(0, 1)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    heads_first = lse.float().transpose(0, 1).contiguous()[None]  # (1, N, Tq)
    unread = torch.zeros((), dtype=torch.int64, device=q.device)  # seed and offset, at dropout 0
    none = None  # bias and boundaries of variable lengths: torch takes None for an undefined tensor
    # torch keeps cuDNN's plans by the strides of q, k and v alone, so those of out and dout have to be the same always.
    dout, out = dout.contiguous(), out.to(q.dtype).contiguous()
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(_batched(x) for x in (dout, q, k, v, out)),
        heads_first.unsqueeze(-1) if _lse_has_a_last_one(q.device) else heads_first,
        unread,
        unread,
        none,
        none,
        none,
        q.shape[0],
        k.shape[0],
        0.0,
        causal,
        scale=scale,
    )
    return tuple(x[0].transpose(0, 1)[..., : y.shape[2]] for x, y in zip(gradients, (q, k, v), strict=True))


@cache
def _lse_has_a_last_one(device: torch.device) -> bool:
    """Whether this torch gives, and so takes, the log-sum-exp as (1, N, T, 1) instead of (1, N, T)."""
    x = torch.zeros((1, 1, 64, 64), dtype=torch.bfloat16, device=device)
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, True, 0.0, False, False, scale=1.0)
    return found[1].ndim == 4


def _batched(x: Tensor) -> Tensor:
    """(T, N, H) to (1, N, T, H) without moving rows; H padded."""
    size = -(-x.shape[2] // _SIZES) * _SIZES
    x = x if x.shape[2] == size else pad(x, (0, size - x.shape[2]))
    return (x if x.stride(2) == 1 else x.contiguous()).unsqueeze(0).transpose(1, 2)


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
