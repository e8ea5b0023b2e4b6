"""FlashAttention-4 (`flash-attn-4`, the `fa4` extra): bfloat16 and float16 on Hopper and Blackwell.

One tile is a dense call; several are one variable-length call. Masks are aligned to the last key, as tiles are. Head
sizes are padded to one multiple of 32: backward wants equal sizes for grouped heads, and at other sizes, such as 8 and
16, the gradients of a variable-length call are wrong without an error (seen on an H200 with 4.0.0b36). The first call
of each kind of shape compiles for about two seconds. Source: Dao-AILab/flash-attention, `flash_attn/cute`.
"""

import warnings
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from longspan.attention.call import AttendCall, Saved, unsupported_capability_reason
from longspan.attention.rows import pad_heads
from longspan.attention.tiles import Launch

# Gradients may be wrong at other sizes.
_HEAD_SIZE_MULTIPLE = 32


@cache
def unsupported_reason(device: torch.device) -> str:
    """Return what this installation or GPU lacks for FlashAttention-4, as "needs …"; "" for nothing."""
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        return "needs the extra fa4, which is not installed: pip install 'longspan[fa4]'"
    return unsupported_capability_reason(device, range(9, 12), "9 to 11")


@cache
def _kernel_interface() -> Any:
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted", category=UserWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import flash_attn.cute.interface as interface  # pyright: ignore[reportMissingImports]
    return interface


def forward(q: Tensor, k: Tensor, v: Tensor, launch: Launch, call: AttendCall) -> tuple[Tensor, Tensor]:
    """Attend from q (Tq, N, H) to k (Tk, K, H), v (Tk, K, Hv): out (Tq, N, Hv), lse (Tq, N) float32."""
    tensors, lengths = _kernel_arguments(launch, q, k, v)
    out, lse, *_ = _kernel_interface()._flash_attn_fwd(
        *tensors,
        softmax_scale=call.scale,
        softcap=call.softcap,
        return_lse=True,
        **lengths,
        **_mask_arguments(launch),
    )
    if out.ndim == 4:
        out = out[0]
        lse = lse[0]
    return out[..., : v.shape[2]], lse.transpose(0, 1)


def backward(dout: Tensor, saved: Saved, launch: Launch, call: AttendCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq (Tq, N, H), dk (Tk, K, H), dv (Tk, K, Hv) of this block, from the lse over the keys of all blocks.

    The `out` of `saved` may be the deltas, dout · out (Tq, N). The kernel computes dout · out − dlse, which is the same
    with an out of 0 and a dlse of −deltas.
    """
    q, k, v, out, lse = saved
    options: dict[str, Any] = {}
    if out.ndim == 2:
        options["dlse"] = _lay_out_lse(-out, launch)
        out = torch.zeros_like(dout)
    tensors, lengths = _kernel_arguments(launch, q, k, v, out, dout)
    dq, dk, dv, *_ = _kernel_interface()._flash_attn_bwd(
        *tensors,
        _lay_out_lse(lse, launch),
        softmax_scale=call.scale,
        softcap=call.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **lengths,
        **_mask_arguments(launch),
        **options,
    )
    if dq.ndim == 4:
        dq, dk, dv = dq[0], dk[0], dv[0]
    return dq[..., : q.shape[2]], dk[..., : k.shape[2]], dv[..., : v.shape[2]]


def takes_deltas(call: AttendCall) -> bool:
    """Whether backward of this call takes dout · out in place of the output: all kernels but those for heads above 128
    on Blackwell.
    """
    return max(call.head_dim, call.value_dim) <= 128 or torch.cuda.get_device_capability(call.device)[0] == 9


def _lay_out_lse(x: Tensor, launch: Launch) -> Tensor:
    """(Tq, N) to (N, Tq), and to (1, N, Tq) for a launch of one tile."""
    heads_first = x.transpose(0, 1).contiguous()
    return heads_first[None] if len(launch.tiling) == 1 else heads_first


def _kernel_arguments(launch: Launch, *tensors: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
    """One tile is a dense call, of tensors (1, T, heads, size) without lengths."""
    size = -(-max(x.shape[2] for x in tensors) // _HEAD_SIZE_MULTIPLE) * _HEAD_SIZE_MULTIPLE
    tensors = tuple(pad_heads(x, size) for x in tensors)
    if len(launch.tiling) == 1:
        return [x.unsqueeze(0) for x in tensors], {}
    cu_seqlens_q, cu_seqlens_k = launch.cu_seqlens
    queries, keys = launch.max_lengths
    return list(tensors), {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": queries,
        "max_seqlen_k": keys,
    }


def _mask_arguments(launch: Launch) -> dict[str, Any]:
    if launch.left is None and launch.right == 0:
        return {"causal": True}
    return {"window_size_left": launch.left, "window_size_right": launch.right}
