"""A frozen weight that FSDP2 shards and gathers as bytes, and that a gathered layer finds as a weight.

The bytes of a row, codes and scales, are one row of a uint8 parameter: FSDP2 takes one tensor of a parameter. Its
groups may hold parameters of other types beside it; it gathers such a group as bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.model.frozen.formats.stored_weight import StoredWeight
from longspan.model.frozen.packed_format import PackedFormat
from longspan.model.fsdp_params import fsdp_modules, fsdp_param_groups, hook_parameter, owner_of
from longspan.model.marks import PACKED_WEIGHTS, find_packed_weight
from longspan.model.weights.local_tensors import LocalPart, local_tensor


@dataclass(frozen=True)
class PackedWeight:
    """A frozen weight (…, rows, columns) whose parameter is uint8 (…, rows, bytes).

    `columns` are those of this rank, of `whole_columns`; `dtype` is what a layer computes with. Values of `read_dtype`
    are packed as they are read; None: the source of weights has the bytes.
    """

    format: PackedFormat
    columns: int
    whole_columns: int
    dtype: torch.dtype
    read_dtype: torch.dtype | None

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row."""
        return self.format.rows.row_bytes(self.columns)

    def unpack(self, packed: Tensor, weight: Tensor) -> None:
        """Write bytes (…, rows, bytes) as the model's weight."""
        if not self.format.transposed:
            self.format.unpack(packed.view(-1, self.row_bytes), weight.view(-1, self.columns))
            return
        for matrix, out in zip(packed, weight, strict=True):  # an expert after another
            self.format.unpack(matrix, out.mT)

    def count_numbers(self, packed: Tensor) -> int:
        """Return how many numbers bytes of this weight stand for."""
        return packed.numel() // self.row_bytes * self.columns

    def whole_shape(self, packed: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the weight of bytes of this shape; those of several ranks lie side by side in a row."""
        *others, rows, held_bytes = packed
        columns = held_bytes // self.row_bytes * self.columns
        if self.format.transposed:
            return (*others, columns, rows)
        return (*others, rows, columns)

    def unpack_whole(self, packed: Tensor) -> Tensor:
        """Return the weight of the bytes of all ranks."""
        values = torch.empty(self.whole_shape(packed.shape), dtype=self.dtype, device=packed.device)
        self.unpack(packed.contiguous(), values)
        return values

    def source_part(self, part: LocalPart) -> LocalPart:
        """Return which part of the weight's source `pack_part` makes the bytes of `part` from.

        Where the source has the bytes, it is whole rows of these; else this rank's columns as numbers.
        """
        *rows, held_bytes = part.block
        if self.read_dtype is None:
            return LocalPart((*rows, slice(0, self.format.rows.row_bytes(self.whole_columns))), torch.uint8)
        first = self._first_column(held_bytes)
        return LocalPart((*rows, slice(first, first + self.columns)), self.read_dtype)

    def _first_column(self, held_bytes: slice) -> int:
        """A row of all ranks' bytes has their parts side by side, each of `columns` numbers."""
        return held_bytes.start // self.row_bytes * self.columns

    def pack_part(self, values: Tensor, part: LocalPart) -> Tensor:
        """Return the bytes of `part`, from the numbers or codes of its `source_part`."""
        held_bytes = part.block[-1]
        if self.read_dtype is not None:
            packed = self.format.pack(values.flatten(0, -2)).unflatten(0, values.shape[:-1])
        else:
            packed = self.format.cut(values, self.whole_columns, self._first_column(held_bytes), self.columns)
        # The byte counts in the part.
        first_byte = held_bytes.start % self.row_bytes
        return packed[..., first_byte : first_byte + held_bytes.stop - held_bytes.start]


def pack_parameter(
    modules: Sequence[nn.Module],
    name: str,
    packed_weight: PackedWeight,
    device: torch.device,
    codes: StoredWeight | None,
) -> None:
    """Replace a weight, which these modules share, by its bytes, made on `device`; one on the meta device stays there.

    A slice of tensor parallelism is packed by its own rows. `codes` are the weight's bytes, if they are there.
    """
    parameter = getattr(modules[0], name)
    local = parameter.detach()
    if isinstance(parameter, DTensor):
        local = parameter._local_tensor.detach()
    # (…, rows, columns) of the format
    local = local.mT if packed_weight.format.transposed else local
    rows = local.flatten(0, -2)
    if codes is not None:
        rows_here, columns_here = LocalPart.from_parameter(parameter).block
        whole = codes.read(rows_here).to(device)
        packed = packed_weight.format.cut(
            whole, packed_weight.whole_columns, columns_here.start, packed_weight.columns
        )
    else:
        packed = packed_weight.format.pack(rows if local.is_meta else rows.to(device)).to(local.device)
    packed = packed.unflatten(0, local.shape[:-1])
    if isinstance(parameter, DTensor):
        packed = DTensor.from_local(packed, parameter.device_mesh, parameter.placements, run_check=False)
    replaced = nn.Parameter(packed, requires_grad=False)
    for module in modules:
        module.register_parameter(name, replaced)
        vars(module).setdefault(PACKED_WEIGHTS, {})[name] = packed_weight


def copy_codes(module: nn.Module, name: str, codes: StoredWeight, device: torch.device) -> None:
    """Write a weight's bytes, made of `codes` on `device`, to the memory of its packed parameter."""
    parameter = module.get_parameter(name)
    packed_weight = find_packed_weight(module, name)
    assert packed_weight is not None
    part = LocalPart.from_parameter(parameter)
    rows = codes.read(part.block[0]).to(device)
    local_tensor(parameter).copy_(packed_weight.pack_part(rows, part))


def unpack_when_gathered(model: nn.Module) -> None:
    """Have FSDP2, which has sharded a model already, make weights of the bytes that it gathers of packed parameters."""
    for group in fsdp_param_groups(fsdp_modules(model)):
        for parameter in group.fsdp_params:
            if (packed_weight := find_packed_weight(*owner_of(parameter))) is not None:
                hook_parameter(parameter).unpacking = packed_weight
