"""MXFP4 (OCP microscaling formats, version 1.0) as gpt-oss has it: 4-bit floats, an exponent for each 32 of a row."""

from dataclasses import dataclass
from functools import cache

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
from longspan.plan.shape.packed import MXFP4 as ROWS, PackedRows

_BLOCK = ROWS.block  # numbers that share an exponent
_BYTES = _BLOCK // 2
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class MXFP4(StoredFormat):
    """A row of C numbers is C / 2 bytes of codes, the earlier number in the lower half, then C / 32 exponents."""

    rows: PackedRows = ROWS
    transposed: bool = True

    def values(self, packed: Tensor, columns: int) -> Tensor:
        codes = packed[:, : columns // 2]
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        scales = packed[:, columns // 2 :].contiguous().view(torch.float8_e8m0fnu).float()
        numbers = _values(packed.device)[pairs.int()].unflatten(1, (-1, _BLOCK))
        return (numbers * scales.unsqueeze(-1)).flatten(1)


@cache
def _values(device: torch.device) -> Tensor:
    return torch.tensor((*_MAGNITUDES, *(-x for x in _MAGNITUDES)), dtype=torch.float32, device=device)


def mxfp4_weight(name: str, tensors: Tensors) -> StoredWeight:
    """Return experts' weights of blocks (experts, outputs, blocks, 16) and scales, which the model has transposed."""
    if name in tensors:
        raise ModelError(f"the files hold {name} and {name}_blocks, which is the same in 4 bits; keep one of them")
    blocks = tensors[f"{name}_blocks"]
    scales = tensors[f"{name}_scales"]
    check_dtype(f"{name}_blocks", blocks, "U8")
    check_dtype(f"{name}_scales", scales, "U8")
    experts, rows, count, _ = shape = tensor_shape(blocks)
    check_shape(f"{name}_blocks", blocks, (*shape[:-1], _BYTES))
    check_shape(f"{name}_scales", scales, shape[:-1])
    return StoredWeight(
        name,
        (experts, rows, count * _BLOCK),
        MXFP4(),
        lambda part: blocks[part].flatten(2),
        lambda part: scales[part].view(torch.float8_e8m0fnu),
    )
