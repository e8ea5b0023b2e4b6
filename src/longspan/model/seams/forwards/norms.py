"""How norms run: RMS norms in one pass over memory, long ones some rows at a time.

transformers writes such a norm in Python: to float32, square, mean, root, product, back, and the weight, each a pass
over memory, and more in backward. `torch.nn.functional.rms_norm` is one kernel each way on GPUs from torch 2.9 on
(pytorch/pytorch#153666); norms with 1 + weight, with a gate or over groups of features have a kernel of our own
(`norm_formula.py`). All compute in float32; in half precision these round once where transformers' round several times.

torch's kernels of `rms_norm` and `layer_norm` for GPUs multiply a row's number by its width in 32 bits (seen with torch
2.11 on an H200): beyond, rows are silently read from and written to others' places. Kernels of our own, and torch's
operations element by element, count in 64 bits; all of them are tried in `tests/kernels/long_rows.py`.
"""

import copy
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from longspan.errors import ModelError
from longspan.model.seams.forwards.norm_formula import NormFormula
from longspan.model.seams.refusals import has_instance_forward

MOST = 2**31 - 1  # elements of a call, which torch's kernels count in 32 bits


def run_in_pieces(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a norm over rows x (…, n), by calls of at most MOST elements each.

    >>> y = run_in_pieces(lambda rows: rms_norm(rows, (4096,), weight, 1e-6), x)
    """
    if x.numel() <= MOST:
        return norm(x)
    longest_dim = max(range(x.ndim - 1), key=lambda dim: x.shape[dim])
    at_once = max(1, MOST * x.shape[longest_dim] // x.numel())
    return torch.cat([norm(rows) for rows in x.split(at_once, longest_dim)], longest_dim)


def split_long_norms(model: nn.Module) -> None:
    """Let the layer norms and RMS norms of a model take any number of rows.

    Norms with a forward of their own stay as they are: `fuse_norms` sets such forwards, which split long inputs.
    """
    for norm in model.modules():
        if type(norm).__name__.endswith(("LayerNorm", "RMSNorm")) and "forward" not in vars(norm):
            norm.forward = partial(_norm_forward, norm.forward)


def _norm_forward(norm: Callable[..., Tensor], x: Tensor, *others: object, **named: object) -> Tensor:
    if others or named:
        return norm(x, *others, **named)
    return run_in_pieces(norm, x)


_EPS = ("variance_epsilon", "eps")
_CLOSE = 1e-5  # relative, in float32
_PLAIN = NormFormula()


def fuse_norms(model: nn.Module, *, required: bool = True) -> int:
    """Let every norm of a model that is weight · x / √(mean x² + eps), or alike, run in one pass; returns how many do.

    >>> fuse_norms(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"))  # doctest: +SKIP
    113

    Norms are alike with 1 + weight, over groups of features, with a gate before or after. What a norm computes is
    tried: a copy of one of each kind is compared with the formula on random numbers. Classes, names and weights stay as
    they are. Calls in float64, and on inputs that the kernels do not take, run as before, and so do norms whose forward
    was set on them.

    Raises ModelError where the model has no such norm and one is required.
    """
    norms = [m for m in model.modules() if type(m).__name__.endswith(("RMSNorm", "RMSNormGated"))]
    weighted = [norm for norm in norms if _has_weight_and_eps(norm) and not has_instance_forward(norm)]
    first_norms = {_norm_kind(norm): norm for norm in reversed(weighted)}  # the first norm of each kind
    formulas = {kind: _find_formula(norm) for kind, norm in first_norms.items()}
    fused = [(norm, formula) for norm in weighted if (formula := formulas[_norm_kind(norm)]) is not None]
    if required and not fused:
        classes = ", ".join(dict.fromkeys(type(n).__name__ for n in norms)) or "no module whose name ends in RMSNorm"
        raise ModelError(
            f"fused_norms is 'on', and {type(model).__name__} has {classes}: none is weight · x / √(mean x² + eps) "
            "with an eps of its own, nor that with 1 + weight or a gate; use 'auto' or 'off' for this model"
        )
    for norm, formula in fused:
        norm.forward = partial(_run_torch_kernel if formula == _PLAIN else _run_own_kernel, norm, formula)
    return len(fused)


def use_class_norms(modules: Iterable[nn.Module]) -> None:
    """Remove the forwards that `fuse_norms` and `split_long_norms` set: a compiler fuses the class's own code."""
    for module in modules:
        if getattr(vars(module).get("forward"), "func", None) in (_run_torch_kernel, _run_own_kernel, _norm_forward):
            del module.forward


def runs_in_one_pass(module: nn.Module) -> bool:
    """Return whether a module is a norm that runs by our kernel where this can take its inputs."""
    return getattr(vars(module).get("forward"), "func", None) is _run_own_kernel


def _run_torch_kernel(norm: nn.Module, formula: NormFormula, x: Tensor) -> Tensor:
    """Compute the norm (…, n) of x (…, n), by torch's kernel; in mixed types or float64 by its class's own code.

    `formula`, which is the plain one here, is taken as `_run_own_kernel` takes it.
    """
    weight = norm.weight
    assert isinstance(weight, Tensor)
    if x.dtype != weight.dtype or x.dtype == torch.float64:
        return type(norm).forward(norm, x)
    eps = _find_eps(norm)
    if x.numel() <= MOST:  # nearly always: without a function for pieces, which costs the host time
        return rms_norm(x, weight.shape, weight, eps)
    return run_in_pieces(lambda rows: rms_norm(rows, weight.shape, weight, eps), x)


def _run_own_kernel(norm: nn.Module, formula: NormFormula, x: Tensor, gate: Tensor | None = None) -> Tensor:
    """Compute the norm (…, n) of x (…, n) and its gate, by our kernel, or by its class's code if that cannot."""
    weight, eps = norm.weight, _find_eps(norm)
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


def _has_weight_and_eps(norm: nn.Module) -> bool:
    weight = getattr(norm, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 1 and _find_eps(norm) is not None


def _count_groups(norm: nn.Module) -> int:
    size, groups = getattr(norm, "group_size", None), getattr(norm, "n_groups", None)
    return norm.weight.numel() // size if isinstance(size, int) else groups if isinstance(groups, int) else 1  # pyright: ignore


def _norm_kind(norm: nn.Module) -> Hashable:
    return type(norm), norm.weight.shape, _count_groups(norm), getattr(norm, "norm_before_gate", None)  # pyright: ignore


def _find_formula(norm: nn.Module) -> NormFormula | None:
    if not type(norm).__name__.endswith("Gated"):
        return next(
            (f for f in (_PLAIN, NormFormula(offset=1.0)) if _computes_formula(norm, f)),
            None,
        )
    variants = product(("first", "last"), ("silu", "sigmoid"))
    gated = (NormFormula(groups=_count_groups(norm), gate=gate, activation=act) for gate, act in variants)
    return next((formula for formula in gated if _computes_formula(norm, formula)), None)


@torch.no_grad()
def _computes_formula(norm: nn.Module, formula: NormFormula) -> bool:
    """Return whether a norm computes a formula, on rows of numbers near 100, 1 and √eps, where eps counts."""
    weight, eps = norm.weight, _find_eps(norm)
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
    except Exception:  # it takes other arguments, another shape of them, or a device that it is not on
        return False
    return normed.shape == expected.shape and bool((normed - expected).norm() <= _CLOSE * expected.norm())
