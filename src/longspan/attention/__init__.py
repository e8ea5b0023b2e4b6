"""Exact attention over a sharded sequence: one function, the table of kernels, and the choice of communication."""

from longspan.attention.attend import PATTERNS, attend
from longspan.attention.call import AttendCall
from longspan.attention.kernels import KERNELS, HeadSizes, Kernel, choose_kernel
from longspan.attention.masks import Mask, SpanMask

__all__ = [
    "KERNELS",
    "PATTERNS",
    "AttendCall",
    "HeadSizes",
    "Kernel",
    "Mask",
    "SpanMask",
    "attend",
    "choose_kernel",
]
