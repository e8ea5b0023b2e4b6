"""Kernels: attention of some query rows to some key rows: forward to (out, lse), backward from the global out and lse.

Kernels do not depend on ranks and communication.
"""

from longspan.attention.call import HeadSizes, Kernel
from longspan.attention.kernels.table import FEATURES, KERNELS, choose_kernel, find_kernel

__all__ = ["FEATURES", "KERNELS", "HeadSizes", "Kernel", "choose_kernel", "find_kernel"]
