"""Which tensors the Triton kernels of this folder take, and the kernels."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # whose sums may be in float32


def kernels_for(*tensors: Tensor | None) -> Any:
    """The module of the kernels where they can take these tensors, rows of elements in order; else None."""
    for x in tensors:
        if x is not None and not (x.is_cuda and x.dtype in _DTYPES and x.stride(-1) == 1):
            return None
    return kernels()


@cache
def kernels() -> Any:
    """The module of the kernels; None without Triton."""
    return None if find_spec("triton") is None else import_module("longspan.model.experts.row_kernels")
