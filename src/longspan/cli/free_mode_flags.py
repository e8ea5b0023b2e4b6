"""The closing micro-batch of free mode on the command line: `--weights`, `--dp-replicate`, and what has no price.

In free mode over sharded parameters a step gathers them before its first micro-batch and sums gradients after its last
one, in a micro-batch that all slots enter. Its seconds depend on the model's parameters, which lengths do not tell.
"""

import math
from dataclasses import dataclass

from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.plan import Cost

UNPRICED = (
    "free mode: gathering sharded parameters and summing their gradients, once a step, is not in these seconds;\n"
    "--weights N adds it for a model of N parameters (8.19e9 for Qwen3-8B)"
)


@dataclass(frozen=True, kw_only=True)
class ClosingFlags:
    """What the closing micro-batch of free mode is priced by."""

    weights: float = 0.0
    """With free mode: parameters that are sharded over the slots (8.19e9 for Qwen3-8B); their gathering before a step
    and the sum of their gradients after it are added to its seconds. 0: what the cost file says, else nothing."""
    dp_replicate: int = 1
    """With --weights: copies of them (HSDP), each sharded over slots / copies."""


def check_weights(flags: ClosingFlags, *, free: bool) -> None:
    """Raise ConfigError for a number that counts nothing, and in lockstep, where layers are gathered as they come."""
    if not 0 <= flags.weights < math.inf:
        raise ConfigError(f"--weights is {flags.weights:g}; give a model's number of parameters, such as 8.19e9")
    if flags.weights and not free:
        raise ConfigError(
            f"--weights {flags.weights:g} prices the closing micro-batch of free mode, and --mode is lockstep; add "
            "--mode free, or leave --weights out"
        )
    if flags.dp_replicate != 1 and not flags.weights:
        raise ConfigError(
            f"--dp-replicate {flags.dp_replicate} is how the weights of --weights are copied, and there are none; add "
            "--weights, or leave it out"
        )


def with_weights(cost: Cost, flags: ClosingFlags, *, slots: int, node_size: int, tp: int = 1) -> Cost:
    """The cost with the closing micro-batch of these weights, of which each of `tp` ranks of a slot holds a part."""
    if not flags.weights:
        return cost
    home = Layout(slots, dp_replicate=flags.dp_replicate)
    return cost.with_closing(flags.weights / tp, home, node_size=node_size)
