"""State-space layers over a sharded sequence: scans whose state passes from rank to rank, and causal convolutions."""

from longspan.ssm.chains import state_bytes
from longspan.ssm.conv import causal_conv
from longspan.ssm.state_pass import kernel_of, linear_scan, unit

__all__ = ["causal_conv", "kernel_of", "linear_scan", "state_bytes", "unit"]
