"""The product of rows in float8: `torch._scaled_mm` on GPUs; elsewhere in float64, for tests of its formula."""

import torch
from torch import Tensor

from longspan.model.float8.quantise import Scaled

FAST_SUMS = True
"""Whether tensor cores sum products in their own precision, without moving sums to float32 after every 128 products.

The difference is far smaller than the rounding of float8, and does not depend on neighbouring rows."""


def multiply(x: Scaled, w: Scaled, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
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
