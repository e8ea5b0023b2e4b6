"""float8 (e4m3) as transformers (`fp8`: Qwen3-FP8, DeepSeek, Ministral) and compressed-tensors have it."""

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
    tensor_shape,
)
from longspan.model.frozen.packed_format import PackedFormat
from longspan.plan.shape.quantization import FLOAT8, PackedForm, PackedRows


@dataclass(frozen=True)
class Float8(PackedFormat):
    """A row of C numbers is C codes, then the float32 scales of its blocks.

    The product of a code and its scale is rounded to `dtype`, and then to the weight's dtype.
    """

    rows: PackedRows
    dtype: torch.dtype

    def values(self, packed: Tensor, columns: int) -> Tensor:
        codes = packed[:, :columns].view(torch.float8_e4m3fn).float()
        scales = packed[:, columns:].contiguous().view(torch.float32)
        if self.rows.block:
            scales = scales.repeat_interleave(self.rows.block, 1)[:, :columns]
        return (codes * scales).to(self.dtype)


def stored_float8_weight(
    name: str, tensors: Tensors, *, blocks: tuple[tuple[int, int], ...], scale_dtype: bool = False
) -> StoredWeight:
    """Return a weight of float8 codes and one tensor of scales, of the weight, of rows, or of blocks.

    `blocks` lists how many rows and columns may share a scale (0: all); with `scale_dtype` products have the scales'
    dtype, and float32 without. Raises ModelError for scales of another shape.
    """
    codes = checked_tensor(name, tensors, "F8_E4M3")
    (scales_name,) = tensors.keys() - {name}
    *others, rows, columns = shape = tensor_shape(codes)
    scales = checked_tensor(scales_name, tensors, "F32", "BF16", "F16", "F8_E8M0", "U8")
    grid = tensor_shape(scales) if tensor_shape(scales) not in ((), (1,)) else (1, 1)
    # the shapes of scales that are expected, each with the rows and columns (0: all) that share one
    grids: dict[tuple[int, ...], tuple[int, int]] = {
        (*others, -(-rows // (m or rows)), -(-columns // (n or columns))): (m or rows, n) for m, n in blocks
    }
    if grid not in grids:
        raise ModelError(
            f"{scales_name} is {tensor_shape(scales)} in the files, and {' or '.join(map(str, grids))} is expected of "
            f"a weight of {shape} by quantization_config in config.json: scales of another form beside these are not "
            "read (transformers reads the folder, and save_pretrained writes it whole), or the folder is damaged"
        )
    block_rows, block = grids[grid]

    def read_scales(part: slice) -> Tensor:
        values = scales[...]
        if values.dtype == torch.uint8:  # exponents, as MXFP8 has them
            values = values.view(torch.float8_e8m0fnu)
        return values.float().reshape(grid).repeat_interleave(block_rows, -2)[..., :rows, :][part]

    layout = Float8(FLOAT8._replace(block=block), scales[...].dtype if scale_dtype else torch.float32)
    return StoredWeight(name, shape, layout, lambda part: codes[part], read_scales)


def store_fine_grained_float8(form: PackedForm) -> StorageMethod:
    """Codes, and inverse scales of blocks or of a weight."""
    return StorageMethod(
        form.description,
        endings={"_scale_inv": "", ".weight_scale": ".weight"},
        needed=(("",), ("_scale_inv", ".weight_scale")),
        make=partial(stored_float8_weight, blocks=_blocks(form)),
    )


def store_compressed_float8(form: PackedForm) -> StorageMethod:
    """Codes, and scales of weights, rows or blocks."""
    return StorageMethod(
        form.description,
        endings={".weight_scale": ".weight"},
        needed=(("",), (".weight_scale",)),
        make=partial(stored_float8_weight, blocks=_blocks(form), scale_dtype=True),
    )


def _blocks(form: PackedForm) -> tuple[tuple[int, int], ...]:
    return tuple((group.shared_rows, group.rows.block) for group in form.groups)
