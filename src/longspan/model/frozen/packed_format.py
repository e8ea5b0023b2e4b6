"""How the rows of a frozen weight lie as bytes, which `packed_weight.py` describes and FSDP2 shards.

In 4 bits there are codes of 16 values, and a float32 scale for each block of numbers of a row, as in bitsandbytes. NF4
(Dettmers et al. 2023) in blocks of 64 is also made here, without double quantisation, bit for bit as there.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from longspan.errors import ModelError
from longspan.lazy import import_triton_kernels
from longspan.plan.shape.quantization import NF4 as ROWS, PackedRows

_PIECE = 1 << 22  # numbers that are converted at once by torch


def pair_pieces(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair rows of two matrices, so many at once as bound the memory of a conversion."""
    rows = max(1, _PIECE // max(1, target.shape[1], source.shape[1]))
    return zip(source.split(rows), target.split(rows), strict=True)


@cache
def value_table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the numbers that codes stand for, float32, on a device."""
    return torch.tensor(values, dtype=torch.float32, device=device)


class PackedFormat(ABC):
    """How the rows of a frozen weight (rows, columns) lie as bytes.

    Codes and scales of a row are one row of uint8, so that a shard of rows is a shard of bytes. What several rows share
    is repeated in each, or is a value of the format. All but NF4 are of folders, and only read.
    """

    rows: PackedRows
    transposed: bool = False  # rows are columns of the model's matrices, as in gpt-oss

    @property
    def name(self) -> str:
        return self.rows.name

    def cut(self, packed: Tensor, whole_columns: int, first: int, columns: int) -> Tensor:
        """Return packed rows of `columns` numbers, from column `first` on, of packed rows uint8 (…, bytes) of all.

        Scales of blocks are cut too; `first` begins a block. A scale of the whole row stays as it is.
        """
        if columns == whole_columns:
            return packed
        rows = self.rows
        codes = packed[..., int(first * rows.number_bytes) : int((first + columns) * rows.number_bytes)]
        scales = packed[..., int(whole_columns * rows.number_bytes) :]
        if rows.block:
            start = first // rows.block * rows.scale_bytes
            scales = scales[..., start : start - (-columns // rows.block) * rows.scale_bytes]  # rounded up
        return torch.cat((codes, scales), -1)

    def read_scales(self, packed: Tensor, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the scales (rows, scales of a row) of packed rows of `columns` numbers, in their bytes' dtype."""
        scales = packed[:, int(columns * self.rows.number_bytes) :]
        # A copy begins at an address that float32 may have; the scales of a single row need not.
        return scales.clone(memory_format=torch.contiguous_format).view(dtype)

    def pack(self, weight: Tensor) -> Tensor:
        """Return a weight (rows, columns), of any float dtype, as uint8 (rows, bytes).

        Raises ModelError for a format that is only read from folders.
        """
        if weight.is_meta:
            return weight.new_empty((len(weight), self.rows.row_bytes(weight.shape[1])), dtype=torch.uint8)
        raise ModelError(
            f"weights are not converted to {self.name}, which is read from folders that have it; use frozen nf4"
        )

    @torch.no_grad()
    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Write uint8 (rows, bytes) as a weight into `out` (rows, columns), in its dtype."""
        with torch._C.DisableTorchFunction():  # a mode may turn float32 into float64, as in proofs
            for piece, into in pair_pieces(packed, out):
                into.copy_(self.values(piece, out.shape[1]))

    @abstractmethod
    def values(self, packed: Tensor, columns: int) -> Tensor:
        """Return packed rows as numbers (rows, columns), as the package that wrote them dequantises them."""


# ---- 4 bits

_KERNELS = "longspan.model.frozen.nf4_kernels"
# One program reads so many bytes of codes.
_KERNEL_BYTES = 1024
# A block of zeros is divided by this scale.
_LEAST_SCALE = 1e-38
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

    The product of a code and its scale is rounded to `dtype`, and then to the weight's dtype.
    """

    rows: PackedRows
    kind: str = "nf4"
    dtype: torch.dtype = torch.float32

    def values(self, packed: Tensor, columns: int) -> Tensor:
        codes = packed[:, : columns // 2]
        scales = self.read_scales(packed, columns)
        pairs = torch.stack((codes >> 4, codes & 15), -1).flatten(1)
        numbers = value_table(VALUES[self.kind], packed.device)[pairs.int()]
        return (numbers.unflatten(1, (-1, self.rows.block)) * scales.unsqueeze(-1)).flatten(1).to(self.dtype)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Write numbers into `out`: by the kernel on GPUs for nf4 in blocks of 64, else by torch."""
        has_kernel = (
            self.kind == "nf4" and self.rows.block == ROWS.block and self.dtype in (torch.float32, out.dtype)
        )
        if has_kernel and packed.is_cuda and (kernels := import_triton_kernels(_KERNELS)) is not None:
            rows, columns = out.shape
            blocks = rows, -(-columns // 2 // _KERNEL_BYTES)
            with torch._C.DisableTorchFunction():
                tensors = packed, packed.view(torch.float32), value_table(VALUES["nf4"], packed.device), out
                if out.numel():
                    kernels.unpack_kernel[blocks](
                        *tensors, columns, packed.stride(0), BLOCK=ROWS.block, BYTES=_KERNEL_BYTES
                    )
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
