"""What experts compute from rows (tokens) that are sorted by expert: two linears around the model's gate.

One grouped product does all experts in bfloat16 on GPUs, else one for each; every expert gets a gradient. Gates of
`GateFormula`, with the biases before them, are Triton kernels.
"""

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longspan.model.experts.visits import ExpertBiases, Visits, find_row_kernels, spread_rows, sum_visits
from longspan.model.marks import find_float8_weight
from longspan.model.weights.local_tensors import local_tensor

# Experts have these attributes: peft's module of each adapted parameter by its name, how an adapter's matrix is read,
# and the slice of them that this rank has.
EXPERT_ADAPTERS = "adapters_of_experts"
ADAPTER_VIEW = "adapter_view"
LOCAL_EXPERTS = "local_experts"


# One program of a kernel computes so many columns of a row.
_COLUMNS = 1024
# Experts of a model have their gate's formula in this attribute, if it is one.
GATE_FORMULA = "gate_formula"
# Relative, in float32.
_CLOSE = 1e-5


@dataclass(frozen=True)
class GateFormula:
    """A gate g σ(slope · g) (v + `offset`) of a row's gates g, at most `limit`, and values v, within ±`limit`.

    The row has gates, then values; or they take turns. SiLU gates have the defaults.
    """

    slope: float = 1.0
    limit: float = math.inf
    offset: float = 0.0
    interleaved: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the gate of rows (S, 2 I) in torch's operations: (S, I)."""
        gate, value = x.unflatten(1, (-1, 2)).unbind(2) if self.interleaved else x.chunk(2, 1)
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(self.slope * gate) * (value.clamp(-self.limit, self.limit) + self.offset)

    def run_kernel(self, x: Tensor, biases: ExpertBiases | None = None) -> Tensor:
        """Compute the gate of rows (S, 2 I), to which biases are added, by the kernel: (S, I)."""
        return _Gate.apply(x, *(biases or (None, None)), self)  # pyright: ignore[reportReturnType]


def find_gate_formulas(modules: Iterable[nn.Module]) -> None:
    """Set the formula of each expert module's gate, which kernels compute: the one whose numbers its class's code has.

    The code is tried on rows of numbers near 1, 10 and 1,000. Numbers of the module are limits and slopes to try.
    """
    formulas = dict[Hashable, GateFormula | None]()
    for experts in modules:
        values = {x for x in vars(experts).values() if isinstance(x, int | float) and not isinstance(x, bool)}
        numbers = tuple(sorted(float(x) for x in values if x > 0))
        kind = type(experts), numbers, repr(getattr(experts, "act_fn", None))
        if kind not in formulas:
            formulas[kind] = _find_gate_formula(experts, numbers)
        vars(experts)[GATE_FORMULA] = formulas[kind]


@torch.no_grad()
def _find_gate_formula(experts: Any, numbers: Sequence[float]) -> GateFormula | None:
    x = torch.randn((3, 64), generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [10.0], [1000.0]])
    try:
        gated = experts._apply_gate(x)
    except Exception:
        # The class has no gate, or it wants more than rows.
        return None
    choices = itertools.product((1.0, *numbers), (math.inf, *numbers), (0.0, 1.0), (False, True))
    for formula in itertools.starmap(GateFormula, choices):
        expected = formula(x)
        if gated.shape == expected.shape and all((gated - expected).norm(dim=1) <= _CLOSE * expected.norm(dim=1)):
            return formula
    return None


def apply_gate(experts: nn.Module, x: Tensor, biases: ExpertBiases | None = None) -> Tensor:
    """Apply the model's gate to rows (S, 2 I) of gates and values, to which biases are added: (S, I)."""
    formula: GateFormula | None = vars(experts).get(GATE_FORMULA)
    if formula is not None and find_row_kernels(x, None if biases is None else biases.values) is not None:
        return formula.run_kernel(x, biases)
    module: Any = experts
    return module._apply_gate(x if biases is None else biases.add_to(x))


class _Gate(torch.autograd.Function):
    """A gate of rows (S, 2 I), forward and backward by one kernel each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, ends: Tensor | None, formula: GateFormula) -> Tensor:
        ctx.save_for_backward(x, bias, ends)
        ctx.formula = formula
        dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
        out = x.new_empty((len(x), x.shape[1] // 2), dtype=dtype)
        _launch_gate_kernel("gate_kernel", formula, x, bias, ends, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of rows and of biases."""
        x, bias, ends = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        parts = ExpertBiases(bias, ends).make_parts() if ctx.needs_input_grad[1] else None
        others = gradients[0].contiguous(), dx, parts
        _launch_gate_kernel(
            "gate_backward_kernel", ctx.formula, x, bias, ends, *others, SUMS_BIAS=parts is not None
        )
        return dx, None if parts is None else parts.sum(1).to(bias.dtype), None, None


def _launch_gate_kernel(
    name: str,
    formula: GateFormula,
    x: Tensor,
    bias: Tensor | None,
    ends: Tensor | None,
    *others: Tensor | None,
    **flags: bool,
) -> None:
    width = x.shape[1] // 2
    programs, splits = len(x), 1
    if bias is not None and ends is not None:
        bias = bias.contiguous()
        splits = ExpertBiases(bias, ends).splits
        programs = len(ends) * splits
    if programs and width:
        getattr(find_row_kernels(x), name)[programs, -(-width // _COLUMNS)](
            *(x, bias, ends, *others, x.stride(0), width, formula.slope, formula.limit, formula.offset),
            INTERLEAVED=formula.interleaved,
            BIASED=bias is not None,
            SPLITS=splits,
            COLUMNS=_COLUMNS,
            **flags,
        )


# the one compute capability for which torch 2.11 has grouped float8 products with row scales
_GROUPS_FLOAT8 = (9, 0)
_ALIGNED_ELEMENTS = 8  # rows of bfloat16 operands begin at multiples of 16 bytes


@dataclass(frozen=True)
class ExpertLoads:
    """How many rows each of e local experts got: on the device, and on the host if they have been read from it."""

    device: Tensor  # (e,) int64
    host: Sequence[int] | None = None

    def host_counts(self) -> Sequence[int]:
        """Return the counts on the host; waits for the device if they have not been read yet."""
        return self.device.tolist() if self.host is None else self.host


def run_experts(
    experts: nn.Module, x: Tensor, loads: ExpertLoads, visits: Visits, weights: Tensor | None = None
) -> Tensor:
    """Run experts over visits of rows x (R, D), and sum the outputs of each row's visits, with weights (R, k): (R, D).

    Visits are sorted by local expert, and `loads` are each one's; without a grouped product, which runs on the device
    alone, the host waits for them. Slots without rows give their weights gradients of zeros.
    """
    module: Any = experts
    first_name = "gate_up_proj" if module.has_gate else "up_proj"
    up, up_bias = _local_weight_and_bias(module, first_name)
    down, down_bias = _local_weight_and_bias(module, "down_proj")
    float8_up = find_float8_weight(module, first_name)
    float8_down = find_float8_weight(module, "down_proj")
    up_adapter = _find_expert_adapter(module, first_name, x)
    down_adapter = _find_expert_adapter(module, "down_proj", x)
    adapters = [matrix for adapter in (up_adapter, down_adapter) if adapter for matrix in adapter[:2]]
    expert_rows = spread_rows(x, visits)
    if not len(x):  # a slot of padding alone
        parameters = [weight for weight in (up, up_bias, down, down_bias, *adapters) if weight is not None]
        return sum_visits(_NoRows.apply(expert_rows, *parameters), weights, visits)  # pyright: ignore[reportArgumentType]
    grouped = can_group_products(x, up, down, *adapters, in_float8=float8_up is not None)
    # Both layers need the counts, so the device is read once.
    counts = None if grouped else loads.host_counts()
    ends = loads.device.cumsum(0)
    up_biases, down_biases = (None if bias is None else ExpertBiases(bias, ends) for bias in (up_bias, down_bias))
    multiply = partial(_multiply_by_experts, ends=ends.to(torch.int32), counts=counts)

    def multiply_and_adapt(x: Tensor, weight: Tensor, codes: Any, adapter: _Adapter | None) -> Tensor:
        """Multiply by one of the experts' two matrices, and add what an adapter adds."""
        y = multiply(x, weight, codes, transposed=module.is_transposed)
        if adapter is None:
            return y
        first, second, scaling = adapter
        inner = multiply(x, first, None, transposed=False)
        return y + scaling * multiply(inner, second, None, transposed=False)

    inner = multiply_and_adapt(expert_rows, up, float8_up, up_adapter)  # (S, 2 I), or (S, I) without a gate
    if module.has_gate:
        inner = apply_gate(module, inner, up_biases)
    else:
        inner = module.act_fn(inner if up_biases is None else up_biases.add_to(inner))
    outputs = multiply_and_adapt(inner, down, float8_down, down_adapter)
    return sum_visits(outputs, weights, visits, down_biases)


# Matrices A (e, rank, inputs) and B (e, outputs, rank) of this rank's experts, and the scaling of B A.
_Adapter = tuple[Tensor, Tensor, float]


def _find_expert_adapter(experts: nn.Module, name: str, x: Tensor) -> _Adapter | None:
    """In peft's matrices for all experts, rows of A are sorted by expert, columns of B by rank, then by expert."""
    wrapper = vars(experts).get(EXPERT_ADAPTERS, {}).get(name)
    if wrapper is None or wrapper.disable_adapters:
        return None
    (adapter,) = wrapper.lora_A
    count = wrapper.num_experts
    view = vars(experts).get(ADAPTER_VIEW, local_tensor)
    matrix_a = view(wrapper.lora_A[adapter].weight).unflatten(0, (count, -1))
    matrix_b = view(wrapper.lora_B[adapter].weight).unflatten(1, (-1, count)).permute(2, 0, 1)
    part = vars(experts).get(LOCAL_EXPERTS, slice(None))
    return matrix_a[part].to(x.dtype), matrix_b[part].to(x.dtype).contiguous(), wrapper.scaling[adapter]


class _NoRows(torch.autograd.Function):
    """The output of experts without rows, with gradients of zeros for each weight.

    Products with no rows, one for each expert, would keep the host busy while other slots wait for its messages.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        """Return a copy of x (0, D) in the type of products with rows; only shapes of the weights are kept."""
        ctx.weights = [(weight.shape, weight.dtype) for weight in weights]
        ctx.dtype = x.dtype
        kind = x.device.type
        # Products with rows are cast in the same way.
        is_cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
        return x.to(torch.get_autocast_dtype(kind) if is_cast else x.dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return gradients of zeros for each weight that needs one."""
        needed = zip(ctx.weights, ctx.needs_input_grad[1:], strict=True)
        zeros = (
            gradients[0].new_zeros(shape, dtype=dtype) if is_needed else None
            for (shape, dtype), is_needed in needed
        )
        return gradients[0].to(ctx.dtype), *zeros


def _multiply_by_experts(
    x: Tensor, weight: Tensor, float8_weight: Any, *, ends: Tensor, counts: Sequence[int] | None, transposed: bool
) -> Tensor:
    """Rows (S, inputs) are sorted by expert; matrices (e, outputs, inputs), or (e, inputs, outputs) if `transposed`.

    `ends` (e,) are the ends of experts' rows; without their counts on the host one product does all.
    """
    if float8_weight is not None:
        from longspan.model.float8.products import ExpertRows, multiply_in_float8

        return multiply_in_float8(x, weight, None, float8_weight, ExpertRows(ends, counts, transposed))
    if counts is None:
        return F.grouped_mm(x, weight if transposed else weight.transpose(-2, -1), offs=ends)
    pairs = zip(x.split(list(counts)), weight.unbind(), strict=True)
    return torch.cat([rows @ (matrix if transposed else matrix.T) for rows, matrix in pairs])


def can_group_products(x: Tensor, *weights: Tensor, in_float8: bool = False) -> bool:
    """Return whether one product does all experts for these rows (S, D) and weights (e, …, …), in float8 or not."""
    if not x.is_cuda or (in_float8 and torch.cuda.get_device_capability(x.device) != _GROUPS_FLOAT8):
        return False
    in_bfloat16 = all(tensor.dtype == torch.bfloat16 for tensor in (x, *weights))
    aligned = all(size % _ALIGNED_ELEMENTS == 0 for weight in weights for size in weight.shape[1:])
    return in_bfloat16 and aligned


def _local_weight_and_bias(module: Any, name: str) -> tuple[Tensor, Tensor | None]:
    bias = local_tensor(getattr(module, f"{name}_bias")) if module.has_bias else None
    return local_tensor(getattr(module, name)), bias
