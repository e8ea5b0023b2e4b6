"""Exact attention over a sharded sequence: one function, the table of kernels, and the choice of communication."""

from longspan.attention.attend import PATTERNS, attend
from longspan.attention.auto import TYPES, Choice, Estimate, Machine, choose_type, estimates_of
from longspan.attention.call import AttentionCall
from longspan.attention.kernels import KERNELS, HeadSizes, Kernel, choose
from longspan.attention.tiles_between import Mask

__all__ = [
    "KERNELS",
    "PATTERNS",
    "TYPES",
    "AttentionCall",
    "Choice",
    "Estimate",
    "HeadSizes",
    "Kernel",
    "Machine",
    "Mask",
    "attend",
    "choose",
    "choose_type",
    "estimates_of",
]
