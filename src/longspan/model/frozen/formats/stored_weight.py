"""A weight that several tensors of a published folder make, in 4 or 8 bits, and which tensors these are.

The files beside this one have a format each.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.errors import ModelError
from longspan.model.frozen.packed_format import PackedFormat

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

    @property
    def device(self) -> torch.device:
        """Where the codes lie."""
        return self.codes(slice(0, 0)).device

    @property
    def packed_bytes(self) -> int:
        """The bytes of all packed rows."""
        return math.prod(self.shape[:-1]) * self.format.rows.row_bytes(self.shape[-1])

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
    torch.int32: "I32",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


def checked_tensor(name: str, tensors: Tensors, *dtypes: str, shape: tuple[int, ...] | None = None) -> Any:
    """Return a tensor, by name; ModelError if it has none of these dtypes (none: any), or another shape (None: any)."""
    tensor = tensors[name]
    dtype = tensor_dtype(tensor)
    wrong = f"{dtype} in the files, and {' or '.join(dtypes)}" if dtypes and dtype not in dtypes else ""
    if not wrong and shape not in (None, tensor_shape(tensor)):
        wrong = f"{tensor_shape(tensor)} in the files, and {shape}"
    if wrong:
        raise ModelError(f"{name} is {wrong} is expected; the folder is damaged")
    return tensor


def shared_scales(
    name: str, scales: Any, shape: tuple[int, ...], blocks: tuple[tuple[int, int], ...]
) -> tuple[int, Callable[[slice], Tensor]]:
    """Return how many columns (0: all) of a weight of this shape share a scale, and what reads the scales of rows.

    `blocks` lists how many rows and columns may share one (0: all). Raises ModelError for scales of another shape.
    """
    *others, rows, columns = shape
    grid = tensor_shape(scales) if tensor_shape(scales) not in ((), (1,)) else (1, 1)
    # the shapes of scales that are expected, each with the rows and columns (0: all) that share one
    grids: dict[tuple[int, ...], tuple[int, int]] = {
        (*others, -(-rows // (m or rows)), -(-columns // (n or columns))): (m or rows, n) for m, n in blocks
    }
    if grid not in grids:
        raise ModelError(
            f"{name} is {tensor_shape(scales)} in the files, and {' or '.join(map(str, grids))} is expected of "
            f"a weight of {shape} by quantization_config in config.json: scales of another form beside these are not "
            "read (transformers reads the folder, and save_pretrained writes it whole), or the folder is damaged"
        )
    block_rows, block_columns = grids[grid]

    def read(part: slice) -> Tensor:
        values = scales[...]
        if values.dtype == torch.uint8:  # exponents, as MXFP8 has them
            values = values.view(torch.float8_e8m0fnu)
        return values.float().reshape(grid).repeat_interleave(block_rows, -2)[..., :rows, :][part]

    return block_columns, read


# Scales of activations and of caches, which say nothing of the weights.
_ACTIVATION_SCALES = re.compile(r".*\.(activation|input|output|[qkv])_(scale|zero_point|global_scale)(_inv)?")


@dataclass(frozen=True)
class StorageMethod:
    """How a folder holds its weights in 4 or 8 bits: a weight is codes, and tensors beside them, such as scales.

    `endings` has the names: "_scale_inv" to "" says that `weight_scale_inv` is beside `weight`, ".weight_scale" to
    ".weight" that `x.weight_scale` is beside `x.weight`. A weight has just one tensor of each tuple in `needed`, whose
    "" is the weight's own name. `make(name, tensors)` makes it.
    """

    description: str
    endings: Mapping[str, str]
    needed: tuple[tuple[str, ...], ...]
    make: Callable[[str, Tensors], StoredWeight]

    def make_weight(self, weight_name: str, tensors: Tensors) -> StoredWeight:
        """Make the weight of this name from its tensors, which are by their names in the folder.

        ModelError for a needed tensor that is missing or there under two names, and for what `make` refuses, such as
        tensors of another shape or dtype.
        """
        for alternatives in self.needed:
            names = [weight_name.removesuffix(self.endings.get(end, "")) + end for end in alternatives]
            if not (present := [name for name in names if name in tensors]):
                raise ModelError(
                    f"{weight_name} lacks {' or '.join(names)}, and has {', '.join(sorted(tensors))}; the folder is "
                    f"damaged, or not in {self.description} as its config.json says"
                )
            if len(present) > 1:
                raise ModelError(f"{weight_name} has its scales twice, {' and '.join(present)}; keep one of them")
        return self.make(weight_name, tensors)

    def join_weights(self, tensors: Tensors) -> dict[str, Any]:
        """Return the tensors of a folder by name, with those that make one weight as a StoredWeight.

        Scales of activations are left out. ModelError for codes without scales, and for what `make_weight` refuses.
        """
        joined = dict[str, Any]()
        # Each weight's name has the tensors that make it, by their own names.
        groups = defaultdict[str, dict[str, Any]](dict)
        for name, tensor in tensors.items():
            if _ACTIVATION_SCALES.fullmatch(name):
                continue
            if end := next((end for end in self.endings if name.endswith(end)), ""):
                groups[name.removesuffix(end) + self.endings[end]][name] = tensor
            else:
                joined[name] = tensor
        for name, group in groups.items():
            if name in joined:
                group[name] = joined[name]
            joined[name] = self.make_weight(name, group)
        for name in joined.keys() - groups.keys():
            if tensor_dtype(joined[name]) in ("F8_E4M3", "F8_E5M2", "I8", "U8", "I32") and name.endswith("weight"):
                self.make_weight(name, {name: joined[name]})  # raises: codes with nothing beside them
        return joined
