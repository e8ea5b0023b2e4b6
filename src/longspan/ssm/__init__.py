"""State-space layers over a sharded sequence: scans whose state passes from rank to rank, and causal convolutions."""

from longspan.ssm.conv import causal_conv
from longspan.ssm.kernels import scan_kernel
from longspan.ssm.state_pass import linear_scan, unit_vectors

__all__ = ["causal_conv", "linear_scan", "scan_kernel", "unit_vectors"]
