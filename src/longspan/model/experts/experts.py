"""What experts compute from rows that lie expert after expert: two linear layers around the model's own gate.

On GPUs in bfloat16 one grouped matrix product does all experts of a layer; everything else (CPUs, other dtypes, sizes
that the kernel cannot align) takes one matrix product for each expert. Both give every expert a gradient, zeros where
it got no row. Which rows go to which expert is in `moe.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.model.experts.gate import gated
from longspan.model.local_tensors import local_tensor

# torch 2.10 made the private name public.
_grouped_mm: Callable[..., Tensor] | None = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_ALIGNED_ELEMENTS = 8  # rows of bfloat16 operands begin at multiples of 16 bytes


@dataclass(frozen=True)
class Loads:
    """How many rows each local expert got: on the device, and on the host where the host knows."""

    device: Tensor  # (e,) int64
    host: Sequence[int] | None = None

    def sizes(self) -> Sequence[int]:
        """The counts on the host; waits for the device where the host does not know them yet."""
        return self.device.tolist() if self.host is None else self.host


def run_experts(experts: nn.Module, x: Tensor, loads: Loads) -> Tensor:
    """Rows (S, D) sorted by local expert, `loads` of them for each, to (S, D), not yet weighted."""
    module: Any = experts
    first = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = _weights(module, first), _weights(module, "down_proj")
    if expert_kernel(x, up[0], down[0]) == "loop":
        loads = Loads(loads.device, loads.sizes())
        linear = _looped
    else:
        linear = _grouped
    inner = linear(x, *up, loads, module.is_transposed)  # (S, 2 I), or (S, I) without a gate
    inner = gated(module, inner) if module.has_gate else module.act_fn(inner)
    return linear(inner, *down, loads, module.is_transposed)


def expert_kernel(x: Tensor, *weights: Tensor) -> Literal["grouped_mm", "loop"]:
    """How `run_experts` multiplies these rows (S, D) and weights (e, …, …)."""
    here = _grouped_mm is not None and x.is_cuda and x.shape[0] > 0
    low = all(tensor.dtype == torch.bfloat16 for tensor in (x, *weights))
    aligned = all(size % _ALIGNED_ELEMENTS == 0 for weight in weights for size in weight.shape[1:])
    return "grouped_mm" if here and low and aligned else "loop"


def _weights(module: Any, name: str) -> tuple[Tensor, Tensor | None]:
    bias = local_tensor(getattr(module, f"{name}_bias")) if module.has_bias else None
    return local_tensor(getattr(module, name)), bias


def _looped(x: Tensor, weight: Tensor, bias: Tensor | None, loads: Loads, transposed: bool) -> Tensor:
    biases = [None] * weight.shape[0] if bias is None else bias.unbind()
    pieces: list[Tensor] = []
    for rows, matrix, offset in zip(x.split(list(loads.sizes())), weight.unbind(), biases, strict=True):
        piece = rows @ (matrix if transposed else matrix.T)
        pieces.append(piece if offset is None else piece + offset)
    return torch.cat(pieces)


def _grouped(x: Tensor, weight: Tensor, bias: Tensor | None, loads: Loads, transposed: bool) -> Tensor:
    assert _grouped_mm is not None
    ends = loads.device.cumsum(0).to(torch.int32)
    y = _grouped_mm(x, weight if transposed else weight.transpose(-2, -1), offs=ends)
    if bias is None:
        return y
    owners = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device, dtype=torch.int32), right=True)
    return y + bias[owners]
