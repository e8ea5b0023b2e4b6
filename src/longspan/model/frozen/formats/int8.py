"""int8 of bitsandbytes (LLM.int8 of 2022)."""

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
from longspan.model.frozen.packed_format import PackedFormat
from longspan.plan.shape.quantization import INT8, PackedForm, PackedRows

_PER_CODE = 7.874015718698502e-3  # 1 / 127, rounded as bitsandbytes has it


@dataclass(frozen=True)
class Int8(PackedFormat):
    """A row of C numbers is C codes, then the row's largest magnitude."""

    rows: PackedRows = INT8

    def values(self, packed: Tensor, columns: int) -> Tensor:
        scales = self.read_scales(packed, columns)
        return packed[:, :columns].view(torch.int8) * scales * _PER_CODE


def stored_int8_weight(name: str, tensors: Tensors) -> StoredWeight:
    """Return a weight of int8 codes and its maxima, SCB. Raises ModelError for codes in the layout of a GPU."""
    prefix = name.removesuffix("weight")
    codes = checked_tensor(name, tensors, "I8")
    rows, columns = tensor_shape(codes)
    scales = checked_tensor(f"{prefix}SCB", tensors, "F32", shape=(rows,))
    layout = tensors.get(f"{prefix}weight_format")
    if layout is not None and int(layout[...]):
        raise ModelError(
            f"{name} lies in layout {int(layout[...])} of a GPU's (weight_format), and 0, by rows, is read; load the "
            "folder in transformers with a newer bitsandbytes, and save it again"
        )
    return StoredWeight(name, (rows, columns), Int8(), lambda part: codes[part], lambda part: scales[part][:, None])


def store_int8(form: PackedForm) -> StorageMethod:
    """Codes, and the largest magnitude of each row."""
    return StorageMethod(
        form.description,
        endings={".SCB": ".weight", ".weight_format": ".weight"},
        needed=(("",), (".SCB",)),
        make=stored_int8_weight,
    )
