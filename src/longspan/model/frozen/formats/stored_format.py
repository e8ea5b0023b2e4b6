"""What formats of published folders share: packed rows that are only read, and weights that several tensors make."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.errors import ModelError
from longspan.model.frozen.packed_format import PackedFormat, pair_pieces

# Of the files, by name: each a Tensor, or a slice of safetensors, which is read when it is indexed.
Tensors = Mapping[str, Any]


class StoredFormat(PackedFormat):
    """A format of folders, which is only read: a row is its codes, then its scales."""

    @abstractmethod
    def values(self, packed: Tensor, columns: int) -> Tensor:
        """Return packed rows as numbers (rows, columns), as the package that wrote them dequantises them."""

    def pack(self, weight: Tensor) -> Tensor:
        if weight.is_meta:
            return weight.new_empty((len(weight), self.rows.row_bytes(weight.shape[1])), dtype=torch.uint8)
        raise ModelError(
            f"weights are not converted to {self.name}, which is read from folders that have it; use frozen nf4"
        )

    @torch.no_grad()
    def unpack(self, packed: Tensor, out: Tensor) -> None:
        with torch._C.DisableTorchFunction():  # a mode may turn float32 into float64
            for piece, into in pair_pieces(packed, out):
                into.copy_(self.values(piece, out.shape[1]))


@dataclass(frozen=True)
class StoredWeight:
    """A weight that several tensors of a folder's files make: packed rows by `read`, numbers where it is indexed.

    `shape` (…, rows, columns) is that of the packed rows, `codes` and `scales` read them of a part of dim 0, (…, rows,
    bytes) and (…, rows, scales).
    """

    name: str
    shape: tuple[int, ...]
    format: PackedFormat
    codes: Callable[[slice], Tensor]
    scales: Callable[[slice], Tensor]

    def read(self, part: slice | None = None) -> Tensor:
        """Return packed rows, uint8 (…, rows, row_bytes), of a part of dim 0: of rows, or of experts.

        ModelError for scales that are no finite numbers.
        """
        part = part or slice(None)
        with torch._C.DisableTorchFunction():
            scales = self.scales(part)
            if bad := int(scales.float().isfinite().logical_not().sum()):
                raise ModelError(
                    f"{bad} of {scales.numel()} scales of {self.name} are not finite: the folder is damaged, so copy "
                    "or download it again"
                )
            return torch.cat((self.codes(part).view(torch.uint8), scales.contiguous().view(torch.uint8)), -1)

    def get_shape(self) -> list[int]:
        """Return the shape of the model's weight, as a slice of safetensors does."""
        *others, rows, columns = self.shape
        return [*others, columns, rows] if self.format.transposed else [*self.shape]

    def get_dtype(self) -> str:
        """Return the dtype of what indexing gives, by the name that it has in safetensors."""
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        first, *others = index if isinstance(index, tuple) else (index,)
        packed = self.read(None if first is ... else first)
        with torch._C.DisableTorchFunction():
            values = torch.empty((*packed.shape[:-1], self.shape[-1]), dtype=torch.float32, device=packed.device)
        for matrix, into in zip(packed, values, strict=True) if packed.ndim > 2 else [(packed, values)]:
            self.format.unpack(matrix, into)
        return (values.mT if self.format.transposed else values)[(slice(None), *others)]


def tensor_shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)


def tensor_dtype(tensor: Any) -> str:
    """Return a tensor's dtype by its name in safetensors files, such as F8_E4M3."""
    return tensor.get_dtype() if hasattr(tensor, "get_dtype") else _NAMES.get(tensor.dtype, str(tensor.dtype))


_NAMES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


def check_dtype(name: str, tensor: Any, *dtypes: str) -> None:
    """Raise ModelError for a tensor of another dtype than these."""
    if (dtype := tensor_dtype(tensor)) not in dtypes:
        raise ModelError(
            f"{name} is {dtype} in the files, and {' or '.join(dtypes)} is expected; the folder is damaged"
        )


def check_shape(name: str, tensor: Any, *shapes: tuple[int, ...]) -> None:
    """Raise ModelError for a tensor of another shape than these."""
    if (shape := tensor_shape(tensor)) not in shapes:
        expected = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ModelError(f"{name} is {shape} in the files, and {expected} is expected; the folder is damaged")
