"""Kernels of linear recurrences over a rank's own runs of rows."""

from longspan.ssm.kernels.call import Inputs, Recurrence, ScanKernel
from longspan.ssm.kernels.runs import LocalRuns
from longspan.ssm.kernels.table import TORCH, choose_scan_kernel, describe_kernels

__all__ = [
    "TORCH",
    "Inputs",
    "LocalRuns",
    "Recurrence",
    "ScanKernel",
    "choose_scan_kernel",
    "describe_kernels",
]
