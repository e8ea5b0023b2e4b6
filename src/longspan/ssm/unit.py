"""Rows divided by their norms, as delta rules take queries and keys."""

import torch
from torch import Tensor

from longspan.ssm.kernels import fla


def unit(x: Tensor, epsilon: float) -> Tensor:
    """x / √(Σ x² + epsilon) over the last dimension; float32 of half precision, which kernels of GPUs round again."""
    if not fla.lacks(x.dtype, x.device):
        return fla.function("modules.norm.l2norm", "l2norm")(x, epsilon)
    x = x if x.dtype == torch.float64 else x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + epsilon)
