"""NF4 (Dettmers et al. 2023): 4-bit codes of 16 values, and a float32 scale for each 64 numbers of a row.

Codes, scales and values are those of bitsandbytes without double quantisation, bit for bit.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from longspan.attention.rows import kernel_module
from longspan.model.frozen.packed_format import PackedFormat, pair_pieces
from longspan.plan.shape.packed import NF4 as ROWS

BLOCK = ROWS.block  # numbers that share a scale
_KERNELS = "longspan.model.frozen.nf4_kernels"
_LEAST_SCALE = 1e-38  # of a block of zeros, by which it is divided
VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def _plain_arithmetic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without gradients; and scales are of float32 also where a mode widens casts, as in proofs in float64."""

    @wraps(function)
    def run(*args: Any) -> Any:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return function(*args)

    return run


class _NF4(PackedFormat):
    """A row of C numbers is C / 2 bytes of codes, the earlier number in the upper half, then C / 64 scales."""

    rows = ROWS

    @_plain_arithmetic
    def pack(self, weight: Tensor) -> Tensor:
        rows, columns = weight.shape
        out = weight.new_empty((rows, self.rows.row_bytes(columns)), dtype=torch.uint8)
        if weight.is_meta:
            return out
        values = _values(weight.device)
        limits = (values[:-1] + values[1:]) / 2
        for piece, into in pair_pieces(weight, out):
            blocks = piece.float().unflatten(1, (-1, BLOCK))
            scales = blocks.abs().amax(-1)
            # bitsandbytes multiplies by the reciprocal
            unit = (blocks * (1.0 / scales.clamp(min=_LEAST_SCALE)).unsqueeze(-1)).clamp(-1, 1)
            codes = torch.bucketize(unit, limits, out_int32=True).to(torch.uint8).flatten(1)
            into[:, : columns // 2] = codes[:, ::2] << 4 | codes[:, 1::2]
            into[:, columns // 2 :] = scales.view(torch.uint8)
        return out

    @_plain_arithmetic
    def unpack(self, packed: Tensor, out: Tensor) -> None:
        if packed.is_cuda and (kernels := kernel_module(_KERNELS)) is not None:
            kernels.unpack_nf4(packed, _values(packed.device), out, BLOCK)
            return
        columns = out.shape[1]
        values = _values(packed.device)
        for piece, into in pair_pieces(packed, out):
            codes = piece[:, : columns // 2]
            scales = piece[:, columns // 2 :].contiguous().view(torch.float32)
            pairs = torch.stack((codes >> 4, codes & 15), -1).flatten(1)
            blocks = values[pairs.int()].unflatten(1, (-1, BLOCK))
            into.copy_((blocks * scales.unsqueeze(-1)).flatten(1))


NF4 = _NF4()


@cache
def _values(device: torch.device) -> Tensor:
    return torch.tensor(VALUES, dtype=torch.float32, device=device)
