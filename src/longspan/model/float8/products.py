"""Products in float8 (e4m3) with one scale a row, its largest absolute value / 448: a row depends on no neighbour.

Weights are made from the gathered weight in each pass, or kept for passes between which none changes. Gradients of rows
are products in float8 too, those of weights are not.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longspan.lazy import import_triton_kernels
from longspan.model.marks import FLOAT8_WEIGHTS
from longspan.model.weights.local_tensors import local_tensor

FLOAT8 = torch.float8_e4m3fn
# torch's operations below repeat these as digits: torch.compile treats a number with a name as one that may change.
LARGEST = 448.0  # number of e4m3
# Where a row's largest number is smaller, the row becomes zeros, and the factor stays finite.
_LEAST = 1e-30
# A program holds at most so many columns of a row at once.
_MOST_COLUMNS = 16384
_TILE = 64  # rows and columns of a block of a matrix
# At most so many parts of a matrix's rows look for the largest numbers of columns at the same time.
_PARTS = 32


class ScaledRows(NamedTuple):
    """Rows in float8, `values` (…, R, C), and the factor of each row, `scales` (…, R) in float32."""

    values: Tensor
    scales: Tensor

    def dequantise(self) -> Tensor:
        """Return the rows in float64."""
        return self.values.double() * self.scales.double().unsqueeze(-1)


def quantise_rows(x: Tensor) -> ScaledRows:
    """Convert rows (…, R, C) to float8, each by its own scale.

    >>> quantise_rows(torch.tensor([[1.0, -896.0]])).scales
    tensor([2.])
    """
    if (kernels := _find_quantise_kernels(x)) is None:
        return quantise_by_torch(x)
    rows = x.reshape(-1, x.shape[-1])
    values = torch.empty(x.shape, dtype=FLOAT8, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if rows.numel():
        width = rows.shape[1]
        columns = min(_MOST_COLUMNS, 1 << (width - 1).bit_length())
        kernels.quantise_rows_kernel[(len(rows),)](
            *(rows, values, scales, width, rows.stride(0)),
            LARGEST=LARGEST,
            OF_LARGEST=1 / LARGEST,
            LEAST=_LEAST,
            COLUMNS=columns,
            IN_ONE=width <= columns,
            num_warps=min(16, max(1, columns // 1024)),  # a warp for every 1024 columns
        )
    return ScaledRows(values, scales)


def quantise_by_torch(x: Tensor) -> ScaledRows:
    """Convert rows (…, R, C) to float8 by torch's operations; a row of zeros stays zeros."""
    largest = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-30)  # so that factors stay finite
    return ScaledRows((x.float() * _scaling_factors(largest)).to(FLOAT8), (largest * (1 / 448.0)).squeeze(-1))


def quantise_columns(x: Tensor) -> ScaledRows:
    """Convert the columns of matrices (…, R, C) to float8, each by its own scale, as the rows of (…, C, R).

    >>> quantise_columns(torch.tensor([[1.0, 2.0], [-448.0, 3.0]])).values.shape
    torch.Size([2, 2])

    One kernel finds the largest absolute values of columns, in each of several parts of the rows; a column's is the
    largest over the parts. A second kernel scales.
    """
    if (kernels := _find_quantise_kernels(x)) is None:
        return quantise_rows(x.transpose(-2, -1).contiguous())
    rows, width = x.shape[-2:]
    matrices = x.reshape(-1, rows, width)
    count = len(matrices)
    values = torch.empty((*x.shape[:-2], width, rows), dtype=FLOAT8, device=x.device)
    if not matrices.numel():
        return ScaledRows(values, torch.zeros(values.shape[:-1], device=x.device))
    across = -(-width // _TILE)
    down = -(-rows // _TILE)  # tiles
    sizes = rows, width, matrices.stride(1), matrices.stride(0)
    parts = torch.empty((count, min(_PARTS, down), width), device=x.device)
    tile = {"ROWS": _TILE, "COLUMNS": _TILE}
    kernels.largest_of_columns_kernel[(across, parts.shape[1], count)](matrices, parts, *sizes, **tile)
    largest = parts.amax(1).clamp_min(_LEAST)  # so that factors stay finite
    kernels.quantise_columns_kernel[(down, across, count)](
        matrices, values, _scaling_factors(largest), *sizes, **tile
    )
    return ScaledRows(values, (largest * (1 / 448.0)).view(values.shape[:-1]))


def _scaling_factors(most: Tensor) -> Tensor:
    """A true quotient: `448.0 / most` is torch's rounded reciprocal times 448."""
    return torch.full_like(most, 448.0) / most


def _find_quantise_kernels(x: Tensor) -> Any:
    if not x.is_cuda or x.stride(-1) != 1:
        return None
    return import_triton_kernels("longspan.model.float8.quantise_kernels")


# ---- products of scaled values


FAST_SUMS = True
"""Whether tensor cores sum products in their own precision, without moving sums to float32 after every 128 products.

The difference is far smaller than the rounding of float8, and does not depend on neighbouring rows."""


def multiply_scaled_rows(x: ScaledRows, w: ScaledRows, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Multiply rows x (S, K) with the rows of w (N, K), and add a bias (N,): (S, N)."""
    if not x.values.is_cuda:
        y = x.dequantise() @ w.dequantise().t()
        return (y if bias is None else y + bias).to(dtype)
    if not x.values.numel():
        return x.scales.new_zeros((len(x.values), len(w.values)), dtype=dtype)
    y = torch._scaled_mm(
        x.values,
        w.values.t(),
        scale_a=x.scales.unsqueeze(1),
        scale_b=w.scales.unsqueeze(0),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=FAST_SUMS,
    )
    return y.to(dtype)


class Float8Weight:
    """A weight in float8: rows for forward, columns for backward, made when needed, kept after `set_keeping(True)`."""

    def __init__(self) -> None:
        self.keeps: bool = False
        self._rows: ScaledRows | None = None
        self._columns: ScaledRows | None = None

    def set_keeping(self, keeps: bool) -> None:
        """Begin (True) or end (False) keeping the float8 weight; what was kept before is dropped."""
        self.keeps = keeps
        self._rows = None
        self._columns = None

    def rows(self, weight: Tensor) -> ScaledRows:
        """Return the weight's rows in float8: those that are kept, or new ones."""
        rows = self._rows or quantise_rows(weight.detach())
        self._rows = rows if self.keeps else None
        return rows

    def columns(self, weight: Tensor) -> ScaledRows:
        """Return the weight's columns in float8, as rows: those that are kept, or new ones."""
        columns = self._columns or quantise_columns(weight.detach())
        self._columns = columns if self.keeps else None
        return columns

    @staticmethod
    def keep_all(model: nn.Module) -> AbstractContextManager[None]:
        """Return the context of `keep_quantised_weights`, for who has found a weight and does not import this file."""
        return keep_quantised_weights(model)


def add_float8_weights(module: nn.Module, names: Iterable[str]) -> None:
    """Mark a module's parameters of these names: the module computes with them in float8."""
    setattr(module, FLOAT8_WEIGHTS, {name: Float8Weight() for name in names})


_kept_at: dict[int, Float8Weight] = {}  # records that keep, by the memory address of the weight that they belong to


def find_or_make_float8_weight(weight: Tensor) -> Float8Weight:
    """Return the record of a weight in float8 by its address, as graphs know no modules; a new one if none is kept."""
    return _kept_at.get(weight.data_ptr()) or Float8Weight()


@contextmanager
def keep_quantised_weights(model: nn.Module) -> Iterator[None]:
    """Keep weights in float8 from their first product on, for passes between which no weight changes.

    A rank then holds one byte for each number (rows), after backward two. Graphs find only weights that are gathered
    now.
    """
    # These weights keep from here on.
    weights = list[Float8Weight]()
    # the gathered weights, referred to so that no other tensor gets their addresses
    weight_at = dict[int, Tensor]()
    for module in model.modules():
        for name, float8_weight in vars(module).get(FLOAT8_WEIGHTS, {}).items():
            # A weight that keeps already does so for an outer scope, which ends later.
            if not float8_weight.keeps:
                weights.append(float8_weight)
                float8_weight.set_keeping(True)
            local_weight = local_tensor(getattr(module, name).detach())
            # A weight without memory is not gathered by FSDP2; an inner scope may find it gathered.
            if local_weight.untyped_storage().nbytes() and local_weight.data_ptr() not in _kept_at:
                _kept_at[local_weight.data_ptr()] = float8_weight
                weight_at[local_weight.data_ptr()] = local_weight
    try:
        yield
    finally:
        for address in weight_at:
            del _kept_at[address]
        for float8_weight in weights:
            float8_weight.set_keeping(False)


@dataclass(frozen=True)
class ExpertRows:
    """Which rows belong to which of e experts, if rows are sorted by expert.

    `ends` (e,) in int32 is where each expert's rows end; with `counts` there is one product for each expert, else one
    grouped product. Matrices are (e, N, K), or (e, K, N) if `transposed`.
    """

    ends: Tensor
    counts: Sequence[int] | None
    transposed: bool


def linear_in_float8(x: Tensor, weight: Tensor, bias: Tensor | None, float8_weight: Float8Weight) -> Tensor:
    """Compute x W' + bias of rows x (…, K) and a weight (N, K), as torch's `linear`, in float8."""
    y = multiply_in_float8(x.reshape(-1, x.shape[-1]), weight, bias, float8_weight)
    return y.view(*x.shape[:-1], weight.shape[0])


def multiply_in_float8(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    float8_weight: Float8Weight,
    experts: ExpertRows | None = None,
) -> Tensor:
    """Multiply rows (S, K) with one matrix, or, sorted by expert, each with its expert's: (S, N).

    The graph gets two nodes: `_Product` takes the output of `_WeightGradients`, so that dy goes back to both. No one
    reads that output, `unread`: it has the shape (S, N) and the memory of one number.
    """
    gradients = None
    if torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad)):
        width = weight.shape[-1 if experts is not None and experts.transposed else -2]
        unread = rows.new_empty(()).expand(rows.shape[0], width)
        gradients = _WeightGradients.apply(rows.detach(), weight, bias, experts, unread)
    plain_bias = None if bias is None else bias.detach()
    return _Product.apply(rows, gradients, weight.detach(), plain_bias, experts, float8_weight)  # pyright: ignore[reportReturnType]


class _WeightGradients(torch.autograd.Function):
    """Computes nothing forward; backward, the gradients of weight and bias.

    A node of its own, so that a pipeline can compute them later than those of rows; it saves the rows before the
    product, where a recomputation stops.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, experts: ExpertRows | None, unread: Tensor
    ) -> Tensor:
        """Save the rows; `unread` is returned, so that the product's gradient dy comes back here."""
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.dtype = weight.dtype
        ctx.experts = experts
        return unread.view_as(unread)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of weight and bias; dy (S, N) comes from `_Product`."""
        (x,) = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        weight_gradient = _multiply_for_weight_gradient(x, dy, ctx.experts).to(ctx.dtype) if needs_weight else None
        bias_gradient = dy.sum(0) if needs_bias else None
        return None, weight_gradient, bias_gradient, None, None


class _Product(torch.autograd.Function):
    """The product of rows and a weight, both in float8; backward, the gradient of the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gradients: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        experts: ExpertRows | None,
        float8_weight: Float8Weight,
    ) -> Tensor:
        """Multiply; the weight is kept beside the graph, and its version is checked in backward."""
        # Not by save_for_backward: a recomputed layer would have to run this product too, to save the weight again.
        ctx.weight = weight
        ctx.version = weight._version
        ctx.float8_weight = float8_weight
        ctx.experts = experts
        # A transposed matrix has in its columns what another one has in its rows.
        w = (
            float8_weight.columns(weight)
            if experts is not None and experts.transposed
            else float8_weight.rows(weight)
        )
        return _multiply_by_matrices(quantise_rows(x), w, x.dtype, bias, experts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of the rows, and dy itself for `_WeightGradients`; RuntimeError for a weight that has
        changed.
        """
        row_gradients = None
        experts = ctx.experts
        if ctx.needs_input_grad[0]:
            weight = ctx.weight
            if weight._version != ctx.version:
                raise RuntimeError(
                    f"a weight {tuple(weight.shape)} that backward needs was changed in place since the forward pass: "
                    f"it is at version {weight._version}, and was at {ctx.version}; take the optimizer's step after "
                    "backward"
                )
            float8_weight = ctx.float8_weight
            # The rows of transposed experts are the columns of W.
            transposed = experts is not None and experts.transposed
            w = float8_weight.rows(weight) if transposed else float8_weight.columns(weight)
            row_gradients = _multiply_by_matrices(quantise_rows(dy.contiguous()), w, dy.dtype, None, experts)
        return row_gradients, dy if ctx.needs_input_grad[1] else None, None, None, None, None


def _multiply_by_matrices(
    x: ScaledRows, w: ScaledRows, dtype: torch.dtype, bias: Tensor | None, experts: ExpertRows | None
) -> Tensor:
    """Rows x (S, K) times the rows of w (N, K); of experts, w is (e, N, K), without bias."""
    if experts is None:
        return multiply_scaled_rows(x, w, dtype, bias)
    if experts.counts is None:
        sums = {"out_dtype": torch.bfloat16, "use_fast_accum": FAST_SUMS}
        columns = w.values.transpose(-2, -1)
        return torch._scaled_grouped_mm(x.values, columns, x.scales, w.scales, offs=experts.ends, **sums).to(dtype)
    counts = list(experts.counts)
    pieces = zip(x.values.split(counts), x.scales.split(counts), w.values, w.scales, strict=True)
    # Scales of rows are copied: cuBLAS needs them to begin at a multiple of 16 bytes, as those of a piece may not.
    return torch.cat(
        [
            multiply_scaled_rows(ScaledRows(rows, scales.clone()), ScaledRows(matrix, matrix_scales), dtype)
            for rows, scales, matrix, matrix_scales in pieces
        ]
    )


def _multiply_for_weight_gradient(x: Tensor, dy: Tensor, experts: ExpertRows | None) -> Tensor:
    """dyᵀ x over all rows, or over each expert's rows; for transposed weights (e, K, N) xᵀ dy."""
    if experts is None:
        return dy.t() @ x
    left, right = (x, dy.contiguous()) if experts.transposed else (dy.contiguous(), x)
    if experts.counts is None:
        return torch._grouped_mm(left.t(), right, offs=experts.ends)  # pyright: ignore[reportAttributeAccessIssue]
    pieces = zip(left.split(list(experts.counts)), right.split(list(experts.counts)), strict=True)
    return torch.stack([left_rows.t() @ right_rows for left_rows, right_rows in pieces])
