"""int8 as bitsandbytes writes it (LLM.int8, Dettmers et al. 2022): a float32 maximum for each row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.errors import ModelError
from longspan.model.frozen.formats.stored_format import (
    StoredFormat,
    StoredWeight,
    Tensors,
    check_dtype,
    check_shape,
    tensor_shape,
)
from longspan.plan.shape.packed import INT8, PackedRows

_PER_CODE = 7.874015718698502e-3  # 1 / 127, rounded as bitsandbytes has it


@dataclass(frozen=True)
class Int8(StoredFormat):
    """A row of C numbers is C codes, then the row's largest magnitude."""

    rows: PackedRows = INT8

    def values(self, packed: Tensor, columns: int) -> Tensor:
        scales = packed[:, columns:].contiguous().view(torch.float32)
        return packed[:, :columns].view(torch.int8) * scales * _PER_CODE


def int8_weight(name: str, tensors: Tensors) -> StoredWeight:
    """Return a weight of int8 codes and its maxima, SCB."""
    prefix = name.removesuffix("weight")
    check_dtype(name, tensors[name], "I8")
    rows, columns = tensor_shape(tensors[name])
    scales = tensors[f"{prefix}SCB"]
    check_dtype(f"{prefix}SCB", scales, "F32")
    check_shape(f"{prefix}SCB", scales, (rows,))
    layout = tensors.get(f"{prefix}weight_format")
    if layout is not None and int(layout[...]):
        raise ModelError(
            f"{name} lies in layout {int(layout[...])} of a GPU's (weight_format), and 0, by rows, is read; load the "
            "folder in transformers with a newer bitsandbytes, and save it again"
        )
    return StoredWeight(
        name, (rows, columns), Int8(), lambda part: tensors[name][part], lambda part: scales[part][:, None]
    )
