"""The section [parallel] of a configuration: where weights live. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from longspan.config.bounds import PositiveInt


@dataclass(frozen=True)
class ParallelConfig:
    """Where the weights live. Context parallelism is not here: it moves no weight."""

    tp: PositiveInt = 1
    """Tensor-parallel degree: neighbouring ranks that share out heads, widths and vocabulary."""
    pp: PositiveInt = 1
    """Pipeline stages: ranks that each hold a part of the layers."""
    vpp: PositiveInt = 1
    """Virtual pipeline stages a rank, each a part of the layers of its own; more than 1 interleaves them."""
    pipeline_schedule: Literal["1f1b", "gpipe", "zero_bubble", "zbv"] = "1f1b"
    """Order of forward and backward passes: 1f1b, gpipe, zero_bubble, or zbv (vpp = 2, folded like a V)."""
    ep: PositiveInt = 1
    """Expert-parallel degree: neighbouring slots that share out the experts of every layer."""
    dp_replicate: PositiveInt = 1
    """Copies of the sharded weights (HSDP): each copy is sharded over slots / copies."""
    sequence_parallel: bool = False
    """Split the rows of norms and residuals over the tensor-parallel ranks; needs tp above 1."""
    reshard_after_forward: bool = True
    """Free gathered weights after the forward pass: less memory, one more gather; never with pp above 1."""
