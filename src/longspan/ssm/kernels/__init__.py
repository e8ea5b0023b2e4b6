"""Kernels of linear recurrences over a rank's own runs of rows."""

from longspan.ssm.kernels.call import Inputs, Kernel, Recurrence
from longspan.ssm.kernels.runs import LocalRuns
from longspan.ssm.kernels.table import TORCH, check_asked, choose, kernels_here

__all__ = ["TORCH", "Inputs", "Kernel", "LocalRuns", "Recurrence", "check_asked", "choose", "kernels_here"]
