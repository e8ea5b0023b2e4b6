"""Codes of 16 values in 4 bits, and a float32 scale for each block of numbers of a row, as bitsandbytes has them.

NF4 (Dettmers et al. 2023) in blocks of 64 is also made here, without double quantisation, bit for bit as there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.lazy import import_triton_kernels
from longspan.model.frozen.packed_format import PackedFormat, pair_pieces, value_table
from longspan.plan.shape.packed import NF4 as ROWS, PackedRows

_KERNELS = "longspan.model.frozen.nf4_kernels"
_LEAST_SCALE = 1e-38  # of a block of zeros, by which it is divided
VALUES = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (
        *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
        *(0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204),
        -0.25,
    ),
}


@dataclass(frozen=True)
class FourBit(PackedFormat):
    """A row of C numbers is C / 2 bytes of codes, the earlier number in the upper half, then its blocks' scales.

    A product is rounded to `dtype`, and then to the weight's.
    """

    rows: PackedRows
    kind: str = "nf4"
    dtype: torch.dtype = torch.float32

    def values(self, packed: Tensor, columns: int) -> Tensor:
        codes = packed[:, : columns // 2]
        scales = packed[:, columns // 2 :].contiguous().view(torch.float32)
        pairs = torch.stack((codes >> 4, codes & 15), -1).flatten(1)
        numbers = value_table(VALUES[self.kind], packed.device)[pairs.int()]
        return (numbers.unflatten(1, (-1, self.rows.block)) * scales.unsqueeze(-1)).flatten(1).to(self.dtype)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Write numbers into `out`: by the kernel on GPUs for nf4 in blocks of 64, else by torch."""
        has_kernel = (
            self.kind == "nf4" and self.rows.block == ROWS.block and self.dtype in (torch.float32, out.dtype)
        )
        if has_kernel and packed.is_cuda and (kernels := import_triton_kernels(_KERNELS)) is not None:
            with torch._C.DisableTorchFunction():
                kernels.unpack_nf4(packed, value_table(VALUES["nf4"], packed.device), out, ROWS.block)
        else:
            super().unpack(packed, out)


class _NF4(FourBit):
    """The format in which weights are packed here."""

    @torch.no_grad()
    def pack(self, weight: Tensor) -> Tensor:
        """Return a weight (rows, columns) as uint8 (rows, bytes) on its device, each block by its largest magnitude."""
        if weight.is_meta:
            return super().pack(weight)
        half = weight.shape[1] // 2
        with torch._C.DisableTorchFunction():  # scales are of float32 also where a mode widens casts
            out = weight.new_empty((len(weight), self.rows.row_bytes(2 * half)), dtype=torch.uint8)
            values = value_table(VALUES["nf4"], weight.device)
            limits = (values[:-1] + values[1:]) / 2
            for piece, into in pair_pieces(weight, out):
                blocks = piece.float().unflatten(1, (-1, self.rows.block))
                scales = blocks.abs().amax(-1)
                # bitsandbytes multiplies by the reciprocal
                unit = (blocks * (1.0 / scales.clamp(min=_LEAST_SCALE)).unsqueeze(-1)).clamp(-1, 1)
                codes = torch.bucketize(unit, limits, out_int32=True).to(torch.uint8).flatten(1)
                into[:, :half] = codes[:, ::2] << 4 | codes[:, 1::2]
                into[:, half:] = scales.view(torch.uint8)
        return out


NF4 = _NF4(ROWS)
