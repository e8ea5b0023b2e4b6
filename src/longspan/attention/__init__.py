"""Exact attention over a sharded sequence: one function, and the table of kernels that it chooses from."""

from longspan.attention.attend import PATTERNS, attend
from longspan.attention.kernels import KERNELS, Kernel, Need, choose

__all__ = ["KERNELS", "PATTERNS", "Kernel", "Need", "attend", "choose"]
