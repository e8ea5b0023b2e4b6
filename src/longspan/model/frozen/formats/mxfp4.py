"""MXFP4 (OCP): the experts of gpt-oss."""

from dataclasses import dataclass

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
from longspan.model.frozen.packed_format import PackedFormat, value_table
from longspan.plan.shape.quantization import MXFP4, PackedForm, PackedRows

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Mxfp4(PackedFormat):
    """A row of C numbers is C / 2 bytes of codes, the earlier number in the lower half, then C / 32 exponents."""

    rows: PackedRows = MXFP4
    transposed: bool = True

    def values(self, packed: Tensor, columns: int) -> Tensor:
        codes = packed[:, : columns // 2]
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        scales = self.read_scales(packed, columns, torch.float8_e8m0fnu).float()
        table = value_table((*_MAGNITUDES, *(-x for x in _MAGNITUDES)), packed.device)
        return (table[pairs.int()].unflatten(1, (-1, self.rows.block)) * scales.unsqueeze(-1)).flatten(1)


def stored_mxfp4_weight(name: str, tensors: Tensors) -> StoredWeight:
    """Return experts' weights of blocks (experts, outputs, blocks, 16) and scales, which the model has transposed.

    Raises ModelError where the files have the whole weight too.
    """
    if name in tensors:
        raise ModelError(f"the files hold {name} and {name}_blocks, which is the same in 4 bits; keep one of them")
    block = MXFP4.block
    experts, rows, count, _ = tensor_shape(tensors[f"{name}_blocks"])
    codes = checked_tensor(f"{name}_blocks", tensors, "U8", shape=(experts, rows, count, block // 2))
    scales = checked_tensor(f"{name}_scales", tensors, "U8", shape=(experts, rows, count))
    return StoredWeight(
        name,
        (experts, rows, count * block),
        Mxfp4(),
        lambda part: codes[part].flatten(2),
        lambda part: scales[part].view(torch.float8_e8m0fnu),
    )


def store_mxfp4(form: PackedForm) -> StorageMethod:
    """Blocks and scales of stacked experts."""
    return StorageMethod(
        form.description,
        endings={"_proj_blocks": "_proj", "_proj_scales": "_proj"},
        needed=(("_proj_blocks",), ("_proj_scales",)),
        make=stored_mxfp4_weight,
    )
