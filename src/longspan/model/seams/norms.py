"""How norms run: RMS norms in one pass over memory, long inputs some rows at a time.

Plain ones take `torch.nn.functional.rms_norm` (pytorch/pytorch#153666), those with 1 + weight, gates or groups a Triton
kernel (`norm_kernels.py`): float32, rounded once where transformers' code rounds between operations.
"""

import copy
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.lazy import import_triton_kernels
from longspan.model.feature import Call, Feature
from longspan.model.seams.set_forwards import has_forward_of_others

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 16384  # features of a group, which a program holds
_TILE = 4096  # features that a program of four warps has at a time
_KERNELS = "longspan.model.seams.norm_kernels"
# Backward has at most so many programs, each with its own sum of the weight's gradient.
_PROGRAMS = 512


@dataclass(frozen=True)
class NormFormula:
    """A norm: x / √(mean x² + eps) · (`offset` + weight); `offset` is 1 in Gemma's norms.

    The mean is over each of `groups` groups of features. A gate, through its `activation`, multiplies features before
    the norm ("first"), after it ("last"), or is none ("").
    """

    offset: float = 0.0
    groups: int = 1
    gate: Literal["", "first", "last"] = ""
    activation: Literal["silu", "sigmoid"] = "silu"

    def __call__(self, x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None) -> Tensor:
        """Compute the norm (…, n) of features (…, n), in torch's operations."""
        gates = getattr(torch.nn.functional, self.activation)(gate) if gate is not None else 1.0
        y = x * gates if self.gate == "first" else x
        in_groups = y.unflatten(-1, (self.groups, -1))
        normed = in_groups * torch.rsqrt(in_groups.square().mean(-1, keepdim=True) + eps)
        y = normed.flatten(-2) * (self.offset + weight)
        return y * gates if self.gate == "last" else y

    def run_kernel(self, x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None) -> Tensor | None:
        """Compute the norm by the kernel; None if it cannot take these tensors, by type, device or width."""
        tensors = (x, weight) if gate is None else (x, weight, gate)
        if any(not t.is_cuda or t.dtype not in _DTYPES for t in tensors) or import_triton_kernels(_KERNELS) is None:
            return None
        if weight.numel() // self.groups > _WIDEST or bool(self.gate) != (gate is not None) or not x.numel():
            return None
        return _FusedNorm.apply(x, weight, gate, eps, self)  # pyright: ignore[reportReturnType]


class _FusedNorm(torch.autograd.Function):
    """A norm by the Triton kernels: one pass over memory forward, one backward. `formula` decides what is compiled."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, formula: NormFormula
    ) -> Tensor:
        """Norm rows (…, n); the inverse root of each row and group is kept for backward."""
        rows = _flatten_rows(x)
        gates = None if gate is None else _flatten_rows(gate)
        out = rows.new_empty(rows.shape)
        inverse = rows.new_empty((len(rows), formula.groups), dtype=torch.float32)  # 1 / root
        width, blocks, constants = _launch_sizes(rows, formula)
        import_triton_kernels(_KERNELS).norm_rows_kernel[blocks, formula.groups](
            *(rows, gates, weight, out, inverse, len(rows), width, rows.stride(0), _row_stride(gates), eps),
            **constants,
        )
        ctx.save_for_backward(x, weight, gate, inverse)
        ctx.formula = formula
        ctx.gate_shape = None if gate is None else gate.shape
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of x, the weight and the gate; the weight's is summed over the programs' parts."""
        x, weight, gate, inverse = ctx.saved_tensors
        formula = ctx.formula
        rows = _flatten_rows(x)
        gates = None if gate is None else _flatten_rows(gate)
        dout = _flatten_rows(gradients[0])
        dx = rows.new_empty(rows.shape)
        dgate = None if gates is None else gates.new_empty(gates.shape)
        width, blocks, constants = _launch_sizes(rows, formula)
        programs = min(blocks, _PROGRAMS)
        parts = rows.new_empty((programs, rows.shape[1]), dtype=torch.float32)
        import_triton_kernels(_KERNELS).norm_rows_backward_kernel[programs, formula.groups](
            *(rows, gates, weight, inverse, dout, dx, dgate, parts, len(rows), width),
            *(rows.stride(0), _row_stride(gates), dout.stride(0)),
            **constants,
        )
        dweight = parts.sum(0).to(weight.dtype).view(weight.shape)
        return dx.view(x.shape), dweight, None if dgate is None else dgate.view(ctx.gate_shape), None, None


def _launch_sizes(rows: Tensor, formula: NormFormula) -> tuple[int, int, dict[str, Any]]:
    """A program has rows of one group at a time, in a power of two of columns; four warps for every _TILE features."""
    width = rows.shape[1] // formula.groups
    columns = max(16, 1 << (width - 1).bit_length())
    at_once = max(1, _TILE // 2 // columns)
    constants = {
        "ROWS": at_once,
        "COLUMNS": columns,
        "GROUPS": formula.groups,
        "OFFSET": formula.offset,
        "GATE_FIRST": formula.gate == "first",
        "GATE_LAST": formula.gate == "last",
        "SILU": formula.activation == "silu",
        "num_warps": min(16, 4 * max(1, at_once * columns // _TILE)),
    }
    return width, -(-len(rows) // at_once), constants


def _flatten_rows(x: Tensor) -> Tensor:
    """(rows, features), features one after another and rows at equal distances: a view where x lies so."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _row_stride(rows: Tensor | None) -> int:
    return 0 if rows is None else rows.stride(0)


MOST_ELEMENTS = 2**31 - 1  # elements of a call, which torch's kernels count in 32 bits


def run_norm_in_pieces(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a norm over rows x (…, n), by calls of at most MOST_ELEMENTS elements each."""
    if x.numel() <= MOST_ELEMENTS:
        return norm(x)
    longest_dim = max(range(x.ndim - 1), key=lambda dim: x.shape[dim])
    at_once = max(1, MOST_ELEMENTS * x.shape[longest_dim] // x.numel())
    return torch.cat([norm(rows) for rows in x.split(at_once, longest_dim)], longest_dim)


def split_long_norms(model: nn.Module) -> None:
    """Let layer norms and RMS norms take any number of rows; those that `fuse_norms` set a forward of do so already."""
    for norm in model.modules():
        if type(norm).__name__.endswith(("LayerNorm", "RMSNorm")) and "forward" not in vars(norm):
            norm.forward = partial(_forward_in_pieces, norm.forward)


def _forward_in_pieces(norm: Callable[..., Tensor], x: Tensor, *others: object, **named: object) -> Tensor:
    if others or named:
        return norm(x, *others, **named)
    return run_norm_in_pieces(norm, x)


class NormFeature(Feature):
    """Norms as one kernel, and on GPUs, whose kernels count elements in 32 bits, long inputs in pieces."""

    def __init__(self, call: Call) -> None:
        """Refuse a word for `fused_norms` that is not known."""
        super().__init__(call)
        if self.options.fused_norms not in ("auto", "on", "off"):
            raise ModelError(f"fused_norms is {self.options.fused_norms!r}; use 'auto', 'on' or 'off'")

    def connect(self, model: PreTrainedModel) -> None:
        """Set the forwards of fused norms, and then, on GPUs, of those that are left."""
        if self.options.fused_norms != "off":
            fuse_norms(model)
        if self.world.device.type == "cuda":
            split_long_norms(model)


_EPS = ("variance_epsilon", "eps")
_CLOSE = 1e-5  # relative, in float32
_PLAIN = NormFormula()


def fuse_norms(model: nn.Module) -> int:
    """Let every norm of a model that is weight · x / √(mean x² + eps), or alike, run in one pass; returns how many do.

    A copy of one of each kind is tried against formulas: 1 + weight, groups of features, gates before or after.
    Classes, names and weights stay; norms of another formula, float64, and inputs that kernels do not take, run as
    before.
    """
    norms = [m for m in model.modules() if type(m).__name__.endswith(("RMSNorm", "RMSNormGated"))]
    norms = [norm for norm in norms if getattr(getattr(norm, "weight", None), "ndim", 0) == 1]
    weighted = [norm for norm in norms if _find_eps(norm) is not None and not has_forward_of_others(norm)]
    first_norms = {_norm_kind(norm): norm for norm in reversed(weighted)}  # the first norm of each kind
    formulas = {kind: _find_formula(norm) for kind, norm in first_norms.items()}
    fused = [(norm, formula) for norm in weighted if (formula := formulas[_norm_kind(norm)]) is not None]
    for norm, formula in fused:
        norm.forward = partial(_run_torch_kernel if formula == _PLAIN else _run_triton_kernel, norm, formula)
    return len(fused)


def restore_class_norms(modules: Iterable[nn.Module]) -> None:
    """Remove the forwards that `fuse_norms` and `split_long_norms` set: a compiler fuses the class's own code."""
    for module in modules:
        if getattr(vars(module).get("forward"), "func", None) in (
            _run_torch_kernel,
            _run_triton_kernel,
            _forward_in_pieces,
        ):
            del module.forward


def _run_torch_kernel(norm: nn.Module, formula: NormFormula, x: Tensor) -> Tensor:
    """A class's own code runs in mixed types and float64. `fuse_norms` gives both functions the same arguments."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    if x.dtype != weight.dtype or x.dtype == torch.float64:
        return type(norm).forward(norm, x)
    return run_norm_in_pieces(lambda rows: rms_norm(rows, weight.shape, weight, _find_eps(norm)), x)


def _run_triton_kernel(norm: nn.Module, formula: NormFormula, x: Tensor, gate: Tensor | None = None) -> Tensor:
    weight = norm.weight
    eps = _find_eps(norm)
    assert isinstance(weight, Tensor) and eps is not None
    out = formula.run_kernel(x, weight, eps, gate)
    if out is None:
        return type(norm).forward(norm, x, *([] if gate is None else [gate]))
    return out


def _find_eps(norm: nn.Module) -> float | None:
    for name in _EPS:
        if isinstance(eps := getattr(norm, name, None), float):
            return eps
    return None


def count_groups(norm: nn.Module) -> int:
    """Count the groups of features over which a norm takes means: by the size of one, or their number; else 1."""
    size = getattr(norm, "group_size", None)
    if isinstance(size, int):
        return norm.weight.numel() // size  # pyright: ignore
    groups = getattr(norm, "n_groups", None)
    return groups if isinstance(groups, int) else 1


def _norm_kind(norm: nn.Module) -> Hashable:
    """Norms of one kind have the same formula: the first is tried for all."""
    return type(norm), norm.weight.shape, count_groups(norm), getattr(norm, "norm_before_gate", None)  # pyright: ignore


def _find_formula(norm: nn.Module) -> NormFormula | None:
    formulas = [_PLAIN, NormFormula(offset=1.0)]
    if type(norm).__name__.endswith("Gated"):
        variants = product(("first", "last"), ("silu", "sigmoid"))
        formulas = [NormFormula(groups=count_groups(norm), gate=gate, activation=act) for gate, act in variants]
    return next((formula for formula in formulas if _computes_formula(norm, formula)), None)


@torch.no_grad()
def _computes_formula(norm: nn.Module, formula: NormFormula) -> bool:
    """A float32 copy is tried on rows of numbers near 100, 1 and √eps, of which the last show where eps is added."""
    weight = norm.weight
    eps = _find_eps(norm)
    assert isinstance(weight, Tensor) and eps is not None
    generator = torch.Generator().manual_seed(0)
    trial_norm = copy.deepcopy(norm).to_empty(device="cpu").float()
    for parameter in trial_norm.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    sizes = torch.tensor([100.0, 1.0, eps**0.5])[:, None]
    x = torch.randn((1, 3, *weight.shape), generator=generator) * sizes
    gates = [torch.randn(x.shape, generator=generator)] if formula.gate else []
    try:
        normed = trial_norm(x, *gates)
        expected = formula(x, trial_norm.weight, eps, *gates)  # pyright: ignore[reportArgumentType]
    except Exception:
        # The norm takes other arguments, another shape of them, or a device that it is not on.
        return False
    return normed.shape == expected.shape and bool((normed - expected).norm() <= _CLOSE * expected.norm())
