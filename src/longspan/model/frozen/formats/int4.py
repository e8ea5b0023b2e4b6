"""int4 of compressed-tensors, in the format of files `pack-quantized`: symmetric, with scales of groups or rows."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from longspan.errors import ModelError
from longspan.model.frozen.formats.stored_weight import (
    StorageMethod,
    StoredWeight,
    Tensors,
    checked_tensor,
    shared_scales,
)
from longspan.model.frozen.packed_format import PackedFormat
from longspan.plan.shape.quantization import INT4, PackedForm, PackedRows


@dataclass(frozen=True)
class Int4(PackedFormat):
    """A row of C numbers is C / 2 bytes of codes, the earlier number in the lower half, then its float32 scales.

    A code less 8 is a number. Its product with a scale is rounded to `dtype`, and then to the weight's dtype.
    """

    rows: PackedRows
    dtype: torch.dtype

    def values(self, packed: Tensor, columns: int) -> Tensor:
        codes = packed[:, : columns // 2]
        scales = self.read_scales(packed, columns)
        numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(1).float() - 8
        products = numbers.unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(-1)
        return products.flatten(1).to(self.dtype)


def stored_int4_weight(name: str, tensors: Tensors, *, blocks: tuple[tuple[int, int], ...]) -> StoredWeight:
    """Return a weight of codes, eight in an int32, of scales, and of its shape, which the files have as a tensor.

    Raises ModelError where the files have the whole weight too, and for rows that groups do not divide.
    """
    if name in tensors:
        raise ModelError(f"the files hold {name} and {name}_packed, which is the same in 4 bits; keep one of them")
    rows, columns = checked_tensor(f"{name}_shape", tensors, shape=(2,))[...].tolist()
    codes = checked_tensor(f"{name}_packed", tensors, "I32", shape=(rows, -(-columns // 8)))
    scales = checked_tensor(f"{name}_scale", tensors, "F32", "BF16", "F16")
    block, read_scales = shared_scales(f"{name}_scale", scales, (rows, columns), blocks)
    layout = Int4(INT4._replace(block=block), scales[:1].dtype)
    if reason := layout.rows.reason_against(columns):
        raise ModelError(
            f"{name} of {rows} × {columns} in int4 is not read: {reason}; the folder is damaged, or dequantize it"
        )

    def read_codes(part: slice) -> Tensor:
        # The last int32 of a row may have fewer codes.
        return codes[part].view(torch.uint8)[:, : columns // 2]

    return StoredWeight(name, (rows, columns), layout, read_codes, read_scales)


def store_compressed_int4(form: PackedForm) -> StorageMethod:
    """Packed codes, scales of rows or groups, and a shape."""
    needed = (".weight_packed", ".weight_scale", ".weight_shape")
    return StorageMethod(
        form.description,
        endings=dict.fromkeys(needed, ".weight"),
        needed=tuple((ending,) for ending in needed),
        make=partial(stored_int4_weight, blocks=form.blocks),
    )
