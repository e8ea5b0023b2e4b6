"""nf4 and fp4 of bitsandbytes, also with scales that are quantised again."""

import json
import math
from collections.abc import Mapping
from typing import Any

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
from longspan.model.frozen.packed_format import VALUES, FourBit
from longspan.plan.shape.quantization import NF4, PackedForm

_STATE = ".quant_state.bitsandbytes__"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def stored_four_bit_weight(name: str, tensors: Tensors) -> StoredWeight:
    """Return a weight in nf4 or fp4 from its tensors: codes, scales, and a state as JSON.

    Codes lie end to end in a tensor whose dtype has any size. Raises ModelError for a kind that is not read, and for
    damaged codes or states.
    """
    (state_name,) = (key for key in tensors if key.startswith(f"{name}{_STATE}"))
    try:
        state: dict[str, Any] = json.loads(bytes(tensors[state_name][...].tolist()))
        kind, block, dtype = state["quant_type"], state["blocksize"], _DTYPES[state["dtype"]]
        rows, columns = state["shape"]
        values = torch.tensor(VALUES[kind], dtype=torch.float32)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{state_name} is damaged: {type(error).__name__}: {error}") from error
    layout = FourBit(NF4._replace(name=f"bitsandbytes {kind}", block=block), kind, dtype)
    if reason := layout.rows.reason_against(columns):
        raise ModelError(
            f"{name} of {rows} × {columns} in {kind} is not read: {reason}; load the folder without it"
        )
    table_name = f"{name}.quant_map"
    if table_name in tensors and not torch.allclose(tensors[table_name][...].cpu(), values, atol=1e-3):
        raise ModelError(f"{table_name} has other values than {kind}: {tensors[table_name][...].tolist()[:4]}…")
    codes = tensors[name]
    # Codes lie one after another in elements of `unit` bytes: of bfloat16, say (bnb_4bit_quant_storage).
    unit = codes[:1].element_size()
    size = math.prod(tensor_shape(codes)) * unit
    if size * 2 != rows * columns:
        raise ModelError(
            f"{name} has {size} bytes in the files, and {rows} × {columns} numbers of 4 bits are expected; the folder "
            "is damaged"
        )
    checked_tensor(f"{name}.absmax", tensors, shape=(rows * columns // block,))

    def read_codes(part: slice) -> Tensor:
        start, stop, _ = part.indices(rows)
        # A row has so many units.
        units = columns // 2 // unit
        return codes[start * units : stop * units].view(torch.uint8).view(stop - start, columns // 2)

    def read_scales(part: slice) -> Tensor:
        return _whole_scales(name, tensors, state).view(rows, -1)[part]

    return StoredWeight(name, (rows, columns), layout, read_codes, read_scales)


def _whole_scales(name: str, tensors: Tensors, state: Mapping[str, Any]) -> Tensor:
    """Scales that are quantised again are codes of values in a table, times the maximum of their nested block, plus
    an offset."""
    scales = tensors[f"{name}.absmax"][...]
    if "nested_offset" not in state:
        return scales.float()
    if missing := [key for key in (f"{name}.nested_absmax", f"{name}.nested_quant_map") if key not in tensors]:
        raise ModelError(
            f"{name} lacks {' and '.join(missing)}, which its scales are made of; the folder is damaged"
        )
    maxima = tensors[f"{name}.nested_absmax"][...].repeat_interleave(state["nested_blocksize"])[: len(scales)]
    return tensors[f"{name}.nested_quant_map"][...][scales.int()] * maxima + state["nested_offset"]


def store_four_bit(form: PackedForm) -> StorageMethod:
    """Codes, a state as JSON, and scales that may be quantised too."""
    states = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
    beside = [f".weight.{name}" for name in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")]
    return StorageMethod(
        form.description,
        endings=dict.fromkeys((*states, *beside), ".weight"),
        needed=(("",), states, (".weight.absmax",)),
        make=stored_four_bit_weight,
    )
