"""float8 (e4m3) as transformers (`fp8`: Qwen3-FP8, DeepSeek, Ministral) and compressed-tensors have it."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from longspan.model.frozen.formats.stored_weight import (
    StorageMethod,
    StoredWeight,
    Tensors,
    checked_tensor,
    shared_scales,
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
        scales = self.read_scales(packed, columns)
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
    scales = checked_tensor(scales_name, tensors, "F32", "BF16", "F16", "F8_E8M0", "U8")
    block, read_scales = shared_scales(scales_name, scales, tensor_shape(codes), blocks)
    layout = Float8(FLOAT8._replace(block=block), scales[...].dtype if scale_dtype else torch.float32)
    return StoredWeight(name, tensor_shape(codes), layout, lambda part: codes[part], read_scales)


def store_fine_grained_float8(form: PackedForm) -> StorageMethod:
    """Codes, and inverse scales of blocks or of a weight."""
    return StorageMethod(
        form.description,
        endings={"_scale_inv": "", ".weight_scale": ".weight"},
        needed=(("",), ("_scale_inv", ".weight_scale")),
        make=partial(stored_float8_weight, blocks=form.blocks),
    )


def store_compressed_float8(form: PackedForm) -> StorageMethod:
    """Codes, and scales of weights, rows or blocks."""
    return StorageMethod(
        form.description,
        endings={".weight_scale": ".weight"},
        needed=(("",), (".weight_scale",)),
        make=partial(stored_float8_weight, blocks=form.blocks, scale_dtype=True),
    )
