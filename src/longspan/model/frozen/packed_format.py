"""How the rows of a frozen weight lie as bytes, which `packed_param.py` shards and gathers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from longspan.errors import ModelError
from longspan.plan.shape.packed import PackedRows

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

    def cut(self, packed: Tensor, whole: int, first: int, columns: int) -> Tensor:
        """Return of rows of `whole` numbers, uint8 (…, bytes), so many columns from `first` on, with their scales."""
        rows = self.rows
        codes = packed[..., int(first * rows.number_bytes) : int((first + columns) * rows.number_bytes)]
        scales = packed[..., int(whole * rows.number_bytes) :]
        if rows.block:
            start = first // rows.block * rows.scale_bytes
            scales = scales[..., start : start - (-columns // rows.block) * rows.scale_bytes]
        return packed if columns == whole else torch.cat((codes, scales), -1)

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
