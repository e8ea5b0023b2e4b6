"""A weight that several tensors of a published folder make, in 4 or 8 bits: float8, int8, MXFP4, nf4 and fp4.

float8 (e4m3) is as transformers (`fp8`: Qwen3-FP8, DeepSeek, Ministral) and compressed-tensors have it. int8 (LLM.int8
of 2022), nf4 and fp4 are bitsandbytes', also with scales quantised again; MXFP4 (OCP) is gpt-oss's.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.errors import ModelError
from longspan.model.frozen.packed_format import VALUES, FourBit, PackedFormat, value_table
from longspan.plan.shape.packed import FLOAT8, INT8, MXFP4 as MXFP4_ROWS, NF4 as NF4_ROWS, PackedRows

# Of the files, by name: each a Tensor, or a slice of safetensors, which is read when it is indexed.
Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class StoredWeight:
    """A weight that several tensors of a folder's files make: packed rows by `read`, numbers where it is indexed.

    `shape` (…, rows, columns) is that of the numbers in packed rows. `codes` and `scales` are functions that read those
    of a slice of dim 0: (…, rows, bytes) and (…, rows, scales).
    """

    name: str
    shape: tuple[int, ...]
    format: PackedFormat
    codes: Callable[[slice], Tensor]
    scales: Callable[[slice], Tensor]

    def read(self, part: slice | None = None) -> Tensor:
        """Return packed rows, uint8 (…, rows, row_bytes), of a part of dim 0: of rows, or of experts.

        ModelError for scales that are no finite numbers.
        """
        part = part or slice(None)
        with torch._C.DisableTorchFunction():
            scales = self.scales(part)
            if bad := int(scales.float().isfinite().logical_not().sum()):
                raise ModelError(
                    f"{bad} of {scales.numel()} scales of {self.name} are not finite: the folder is damaged, so copy "
                    "or download it again"
                )
            return torch.cat((self.codes(part).view(torch.uint8), scales.contiguous().view(torch.uint8)), -1)

    def get_shape(self) -> list[int]:
        """Return the shape of the model's weight, as a slice of safetensors does."""
        *others, rows, columns = self.shape
        return [*others, columns, rows] if self.format.transposed else [*self.shape]

    def get_dtype(self) -> str:
        """Return the dtype of what indexing gives, by the name that it has in safetensors."""
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        """Return the numbers of a part of the model's weight, float32: a slice of dim 0, and then of the others.

        Only the rows (of experts) of the first slice are read and unpacked.
        """
        first, *others = index if isinstance(index, tuple) else (index,)
        packed = self.read(None if first is ... else first)
        with torch._C.DisableTorchFunction():
            values = torch.empty((*packed.shape[:-1], self.shape[-1]), dtype=torch.float32, device=packed.device)
        # one matrix, or one for each expert
        matrices = zip(packed, values, strict=True) if packed.ndim > 2 else [(packed, values)]
        for packed_matrix, matrix in matrices:
            self.format.unpack(packed_matrix, matrix)
        return (values.mT if self.format.transposed else values)[(slice(None), *others)]


def tensor_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor or a slice of safetensors."""
    return tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)


def tensor_dtype(tensor: Any) -> str:
    """Return a tensor's dtype by its name in safetensors files, such as F8_E4M3."""
    if hasattr(tensor, "get_dtype"):
        return tensor.get_dtype()
    return _NAMES.get(tensor.dtype, str(tensor.dtype))


_NAMES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


def _checked_tensor(name: str, tensors: Tensors, *dtypes: str, shape: tuple[int, ...] | None = None) -> Any:
    """Return a tensor, by name; ModelError if it has none of these dtypes (none: any), or another shape (None: any)."""
    tensor = tensors[name]
    dtype = tensor_dtype(tensor)
    wrong = f"{dtype} in the files, and {' or '.join(dtypes)}" if dtypes and dtype not in dtypes else ""
    if not wrong and shape not in (None, tensor_shape(tensor)):
        wrong = f"{tensor_shape(tensor)} in the files, and {shape}"
    if wrong:
        raise ModelError(f"{name} is {wrong} is expected; the folder is damaged")
    return tensor


# ---- float8


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
    codes = _checked_tensor(name, tensors, "F8_E4M3")
    (scales_name,) = tensors.keys() - {name}
    *others, rows, columns = shape = tensor_shape(codes)
    scales = _checked_tensor(scales_name, tensors, "F32", "BF16", "F16", "F8_E8M0", "U8")
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


# ---- int8

_PER_CODE = 7.874015718698502e-3  # 1 / 127, rounded as bitsandbytes has it


@dataclass(frozen=True)
class Int8(PackedFormat):
    """A row of C numbers is C codes, then the row's largest magnitude."""

    rows: PackedRows = INT8

    def values(self, packed: Tensor, columns: int) -> Tensor:
        scales = packed[:, columns:].contiguous().view(torch.float32)
        return packed[:, :columns].view(torch.int8) * scales * _PER_CODE


def stored_int8_weight(name: str, tensors: Tensors) -> StoredWeight:
    """Return a weight of int8 codes and its maxima, SCB. Raises ModelError for codes in the layout of a GPU."""
    prefix = name.removesuffix("weight")
    codes = _checked_tensor(name, tensors, "I8")
    rows, columns = tensor_shape(codes)
    scales = _checked_tensor(f"{prefix}SCB", tensors, "F32", shape=(rows,))
    layout = tensors.get(f"{prefix}weight_format")
    if layout is not None and int(layout[...]):
        raise ModelError(
            f"{name} lies in layout {int(layout[...])} of a GPU's (weight_format), and 0, by rows, is read; load the "
            "folder in transformers with a newer bitsandbytes, and save it again"
        )
    return StoredWeight(name, (rows, columns), Int8(), lambda part: codes[part], lambda part: scales[part][:, None])


# ---- MXFP4

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class MXFP4(PackedFormat):
    """A row of C numbers is C / 2 bytes of codes, the earlier number in the lower half, then C / 32 exponents."""

    rows: PackedRows = MXFP4_ROWS
    transposed: bool = True

    def values(self, packed: Tensor, columns: int) -> Tensor:
        codes = packed[:, : columns // 2]
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        scales = packed[:, columns // 2 :].contiguous().view(torch.float8_e8m0fnu).float()
        table = value_table((*_MAGNITUDES, *(-x for x in _MAGNITUDES)), packed.device)
        return (table[pairs.int()].unflatten(1, (-1, self.rows.block)) * scales.unsqueeze(-1)).flatten(1)


def stored_mxfp4_weight(name: str, tensors: Tensors) -> StoredWeight:
    """Return experts' weights of blocks (experts, outputs, blocks, 16) and scales, which the model has transposed.

    Raises ModelError where the files have the whole weight too.
    """
    if name in tensors:
        raise ModelError(f"the files hold {name} and {name}_blocks, which is the same in 4 bits; keep one of them")
    block = MXFP4_ROWS.block
    experts, rows, count, _ = tensor_shape(tensors[f"{name}_blocks"])
    codes = _checked_tensor(f"{name}_blocks", tensors, "U8", shape=(experts, rows, count, block // 2))
    scales = _checked_tensor(f"{name}_scales", tensors, "U8", shape=(experts, rows, count))
    return StoredWeight(
        name,
        (experts, rows, count * block),
        MXFP4(),
        lambda part: codes[part].flatten(2),
        lambda part: scales[part].view(torch.float8_e8m0fnu),
    )


# ---- nf4 and fp4

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
    layout = FourBit(NF4_ROWS._replace(name=f"bitsandbytes {kind}", block=block), kind, dtype)
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
    _checked_tensor(f"{name}.absmax", tensors, shape=(rows * columns // block,))

    def read_codes(part: slice) -> Tensor:
        start, stop, _ = part.indices(rows)
        units = columns // 2 // unit  # of a row
        return codes[start * units : stop * units].view(torch.uint8).view(stop - start, columns // 2)

    def read_scales(part: slice) -> Tensor:
        return _whole_scales(name, tensors, state).view(rows, -1)[part]

    return StoredWeight(name, (rows, columns), layout, read_codes, read_scales)


def _whole_scales(name: str, tensors: Tensors, state: Mapping[str, Any]) -> Tensor:
    """Return the scales of all blocks in float32.

    Those that are quantised again are codes of values in a table, times the maximum of their nested block, plus an
    offset. Raises ModelError for tensors that are missing.
    """
    scales = tensors[f"{name}.absmax"][...]
    if "nested_offset" not in state:
        return scales.float()
    if missing := [key for key in (f"{name}.nested_absmax", f"{name}.nested_quant_map") if key not in tensors]:
        raise ModelError(
            f"{name} lacks {' and '.join(missing)}, which its scales are made of; the folder is damaged"
        )
    maxima = tensors[f"{name}.nested_absmax"][...].repeat_interleave(state["nested_blocksize"])[: len(scales)]
    return tensors[f"{name}.nested_quant_map"][...][scales.int()] * maxima + state["nested_offset"]
