"""State-space layers over a sharded sequence: scans whose state passes from rank to rank, and causal convolutions."""

from longspan.ssm.conv import causal_conv
from longspan.ssm.state_pass import kernel_of, linear_scan
from longspan.ssm.unit import unit
from longspan.ssm.volume import state_bytes

__all__ = ["causal_conv", "kernel_of", "linear_scan", "state_bytes", "unit"]
