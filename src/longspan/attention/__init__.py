"""Exact attention over a sharded sequence: one function, the table of kernels, and the choice of communication."""

from longspan.attention.attend import PATTERNS, attend
from longspan.attention.auto import TYPES, Call, Choice, Estimate, Machine, choose_type, estimates_of
from longspan.attention.kernels import KERNELS, HeadSizes, Kernel, Need, choose

__all__ = [
    "KERNELS",
    "PATTERNS",
    "TYPES",
    "Call",
    "Choice",
    "Estimate",
    "HeadSizes",
    "Kernel",
    "Machine",
    "Need",
    "attend",
    "choose",
    "choose_type",
    "estimates_of",
]
