"""nf4 and fp4 as bitsandbytes writes them, also with their scales quantised again (double quantisation)."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from longspan.errors import ModelError
from longspan.model.frozen.formats.stored_format import (
    StoredFormat,
    StoredWeight,
    Tensors,
    check_shape,
    tensor_shape,
)
from longspan.model.frozen.nf4 import BLOCK, NF4, VALUES
from longspan.plan.shape.packed import NF4 as ROWS, PackedRows

_WRITER = "bitsandbytes "
_STATE = ".quant_state.bitsandbytes__"
_KINDS = {
    "nf4": VALUES,
    "fp4": (
        *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
        *(0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204),
        -0.25,
    ),
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class FourBit(StoredFormat):
    """A product is rounded to `dtype`, and then to the weight's."""

    rows: PackedRows  # "bitsandbytes nf4" or "bitsandbytes fp4"
    dtype: torch.dtype

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        if packed.is_cuda and (self.name, self.rows.block, self.dtype) == (f"{_WRITER}nf4", BLOCK, out.dtype):
            NF4.unpack(packed, out)  # its rows are the same, and it has a kernel
        else:
            super().unpack(packed, out)

    def values(self, packed: Tensor, columns: int) -> Tensor:
        codes = packed[:, : columns // 2]
        pairs = torch.stack((codes >> 4, codes & 15), -1).flatten(1)
        scales = packed[:, columns // 2 :].contiguous().view(torch.float32)
        numbers = _values(self.name.removeprefix(_WRITER), packed.device)[pairs.int()].unflatten(
            1, (-1, self.rows.block)
        )
        return (numbers * scales.unsqueeze(-1)).flatten(1).to(self.dtype)


@cache
def _values(kind: str, device: torch.device) -> Tensor:
    return torch.tensor(_KINDS[kind], dtype=torch.float32, device=device)


def four_bit_weight(name: str, tensors: Tensors) -> StoredWeight:
    """Return a weight of codes that lie in a row, in a dtype of any size, its scales, and its state as JSON."""
    (state_name,) = (key for key in tensors if key.startswith(f"{name}{_STATE}"))
    try:
        state: dict[str, Any] = json.loads(bytes(tensors[state_name][...].tolist()))
        kind, block, dtype = state["quant_type"], state["blocksize"], _DTYPES[state["dtype"]]
        rows, columns = state["shape"]
        values = torch.tensor(_KINDS[kind], dtype=torch.float32)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{state_name} is damaged: {type(error).__name__}: {error}") from error
    layout = FourBit(ROWS._replace(name=f"{_WRITER}{kind}", block=block), dtype)
    if reason := layout.rows.reason_against(columns):
        raise ModelError(
            f"{name} of {rows} × {columns} in {kind} is not read: {reason}; load the folder without it"
        )
    table = f"{name}.quant_map"
    if table in tensors and not torch.allclose(tensors[table][...].cpu(), values, atol=1e-3):
        raise ModelError(f"{table} has other values than {kind}: {tensors[table][...].tolist()[:4]}…")
    codes = tensors[name]
    unit = codes[:1].element_size()  # codes may lie in bfloat16, say (bnb_4bit_quant_storage)
    size = math.prod(tensor_shape(codes)) * unit
    if size * 2 != rows * columns:
        raise ModelError(
            f"{name} has {size} bytes in the files, and {rows} × {columns} numbers of 4 bits are expected; the folder "
            "is damaged"
        )
    check_shape(f"{name}.absmax", tensors[f"{name}.absmax"], (rows * columns // block,))

    def read_codes(part: slice) -> Tensor:
        start, stop, _ = part.indices(rows)
        units = columns // 2 // unit
        return codes[start * units : stop * units].view(torch.uint8).view(stop - start, columns // 2)

    def read_scales(part: slice) -> Tensor:
        return _whole_scales(name, tensors, state).view(rows, -1)[part]

    return StoredWeight(name, (rows, columns), layout, read_codes, read_scales)


def _whole_scales(name: str, tensors: Tensors, state: Mapping[str, Any]) -> Tensor:
    """Of all blocks in float32; quantised ones are codes of values, with a maximum for each nested block."""
    scales = tensors[f"{name}.absmax"][...]
    if "nested_offset" not in state:
        return scales.float()
    if missing := [key for key in (f"{name}.nested_absmax", f"{name}.nested_quant_map") if key not in tensors]:
        raise ModelError(
            f"{name} lacks {' and '.join(missing)}, which its scales are made of; the folder is damaged"
        )
    maxima = tensors[f"{name}.nested_absmax"][...].repeat_interleave(state["nested_blocksize"])[: len(scales)]
    return tensors[f"{name}.nested_quant_map"][...][scales.int()] * maxima + state["nested_offset"]
