"""float8 (e4m3) with float32 scales: of a weight, of each row, or of blocks of rows and columns.

As transformers (`fp8`: Qwen3-FP8, DeepSeek, Ministral) and compressed-tensors write it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.errors import ModelError
from longspan.model.frozen.formats.stored_format import (
    StoredFormat,
    StoredWeight,
    Tensors,
    check_dtype,
    tensor_shape,
)
from longspan.plan.shape.packed import FLOAT8, PackedRows


@dataclass(frozen=True)
class Float8(StoredFormat):
    """A product is rounded to `dtype`, and then to the weight's."""

    rows: PackedRows
    dtype: torch.dtype

    def values(self, packed: Tensor, columns: int) -> Tensor:
        codes = packed[:, :columns].view(torch.float8_e4m3fn).float()
        scales = packed[:, columns:].contiguous().view(torch.float32)
        if self.rows.block:
            scales = scales.repeat_interleave(self.rows.block, 1)[:, :columns]
        return (codes * scales).to(self.dtype)


def float8_weight(
    name: str, tensors: Tensors, *, blocks: tuple[tuple[int, int], ...], scale_dtype: bool = False
) -> StoredWeight:
    """Return a weight of float8 codes and one tensor of scales.

    `blocks` lists how many rows and columns may share a scale (0: all); with `scale_dtype` products have the scales'
    dtype, and float32 without.
    """
    check_dtype(name, tensors[name], "F8_E4M3")
    (scales_name,) = tensors.keys() - {name}
    *others, rows, columns = shape = tensor_shape(tensors[name])
    scales = tensors[scales_name]
    check_dtype(scales_name, scales, "F32", "BF16", "F16", "F8_E8M0", "U8")
    grid = tensor_shape(scales) if tensor_shape(scales) not in ((), (1,)) else (1, 1)
    grids: dict[tuple[int, ...], tuple[int, int]] = {
        (*others, -(-rows // (m or rows)), -(-columns // (n or columns))): (m or rows, n) for m, n in blocks
    }
    if grid not in grids:
        raise ModelError(
            f"{scales_name} is {tensor_shape(scales)} in the files, and {' or '.join(map(str, grids))} is expected of "
            f"a weight of {shape}; the folder is damaged, or its config.json is another's"
        )
    block_rows, block = grids[grid]

    def read_scales(part: slice) -> Tensor:
        values = scales[...]
        if values.dtype == torch.uint8:  # exponents, as MXFP8 has them
            values = values.view(torch.float8_e8m0fnu)
        return values.float().reshape(grid).repeat_interleave(block_rows, -2)[..., :rows, :][part]

    layout = Float8(FLOAT8._replace(block=block), scales[...].dtype if scale_dtype else torch.float32)
    return StoredWeight(name, shape, layout, lambda part: tensors[name][part], read_scales)
