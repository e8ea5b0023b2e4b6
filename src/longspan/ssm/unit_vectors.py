"""Vectors of length 1, as delta rules want queries and keys."""

import torch
from torch import Tensor

from longspan.ssm.kernels.fla import fla_function, fla_unsupported_call_reason


def unit_vectors(x: Tensor, epsilon: float) -> Tensor:
    """Compute x / √(Σ x² + epsilon) over the last dimension.

    fla's kernel, where it can be used, leaves half precision as it is; torch's operations make it float32.
    """
    if not fla_unsupported_call_reason(x.dtype, x.device):
        return fla_function("modules.norm.l2norm", "l2norm")(x, epsilon)
    x = x if x.dtype == torch.float64 else x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + epsilon)
