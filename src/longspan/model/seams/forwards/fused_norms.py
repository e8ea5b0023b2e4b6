"""Root-mean-square norms as one torch kernel, in place of a model's own half-dozen operations.

transformers writes such a norm in Python: to float32, square, mean, root, product, back, and the weight, each a pass
over memory, and more in backward. `torch.nn.functional.rms_norm` is one kernel each way on GPUs from torch 2.9 on
(pytorch/pytorch#153666). Both compute in float32; in half precision torch's rounds once where transformers' rounds
before and after the weight.
"""

import copy
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from longspan.errors import ModelError

_EPS = ("variance_epsilon", "eps")
_CLOSE = 1e-5  # relative, in float32


def fuse_norms(model: nn.Module, *, required: bool = True) -> int:
    """Let every norm of a model that is weight · x / √(mean x² + eps) run as one kernel; how many do.

    >>> fuse_norms(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"))  # doctest: +SKIP
    113

    Which norms are of that kind is tried: a copy of one of each class meets random numbers, beside torch's. Classes,
    names and weights stay as they are. Calls in float64, and on inputs of another dtype than the weight, run as before.

    Raises ModelError where the model has no such norm and one is required.
    """
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    weighted = [norm for norm in norms if _has_weight_and_eps(norm)]
    kinds = {
        kind: _is_plain(next(n for n in weighted if type(n) is kind)) for kind in dict.fromkeys(map(type, weighted))
    }
    plain = [norm for norm in weighted if kinds[type(norm)]]
    if required and not plain:
        classes = ", ".join(dict.fromkeys(type(n).__name__ for n in norms)) or "no module whose name ends in RMSNorm"
        raise ModelError(
            f"fused_norms is 'on', and {type(model).__name__} has {classes}: none is weight · x / √(mean x² + eps) "
            "with an eps of its own; use 'auto' or 'off' for this model"
        )
    for norm in plain:
        norm.forward = MethodType(_one_kernel, norm)
    return len(plain)


def _one_kernel(norm: nn.Module, x: Tensor) -> Tensor:
    """x (…, n) to its norm (…, n)."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    if x.dtype != weight.dtype or x.dtype == torch.float64:
        return type(norm).forward(norm, x)
    return rms_norm(x, weight.shape, weight, _eps_of(norm))


def _eps_of(norm: nn.Module) -> float | None:
    return next((float(getattr(norm, name)) for name in _EPS if isinstance(getattr(norm, name, None), float)), None)


def _has_weight_and_eps(norm: nn.Module) -> bool:
    weight = getattr(norm, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 1 and _eps_of(norm) is not None


@torch.no_grad()
def _is_plain(norm: nn.Module) -> bool:
    """Whether a norm does what torch's does, on rows of large, usual and tiny numbers."""
    weight, eps = norm.weight, _eps_of(norm)
    assert isinstance(weight, Tensor) and eps is not None
    generator = torch.Generator().manual_seed(0)
    tried = copy.deepcopy(norm).to_empty(device="cpu").float()
    for parameter in tried.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn((3, *weight.shape), generator=generator) * torch.tensor([[100.0], [1.0], [eps**0.5]])
    try:
        normed = tried(x)
    except Exception:  # it takes more than x, another shape of it, or a device that it is not on
        return False
    fused = rms_norm(x, weight.shape, tried.weight, eps)  # pyright: ignore[reportArgumentType]
    return normed.shape == fused.shape and bool((normed - fused).norm() <= _CLOSE * fused.norm())
