"""What a run may fill, what its optimizer keeps, and what its layers keep by the keys: known before the model is made.

The settings of a plan of memory are in `memory_settings.py`; what fits is decided in `longspan.plan.memory`.
"""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from longspan.comm import World
from longspan.config.memory_keys import checkpointing_by_hand
from longspan.config.sections import RunConfig
from longspan.model.host_arena import free_host_bytes
from longspan.plan import MemoryBudget
from longspan.plan.memory.memory_plan import MemoryNeeds
from longspan.plan.memory.step_peak import CONTEXT_BYTES
from longspan.train.memory.model_fits import ranks_on_host
from longspan.train.optim.optimizer import OptimizerChoice

HOST_SHARE = 0.85  # of the host's free memory: the rest is for reading documents, and for saving
_SIDE = 128  # of the matrix by which an optimizer's states are counted


def count_states(choice: OptimizerChoice, dtype: torch.dtype) -> float:
    """Numbers of state that an optimizer keeps of each number of a matrix, counted on one.

    >>> count_states(OptimizerChoice.of(TrainConfig()), torch.float32)
    2.0
    """
    parameter = nn.Parameter(torch.zeros(_SIDE, _SIDE, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = choice.build([parameter])
    optimizer.step()
    states = [x for x in tree_leaves(optimizer.state[parameter]) if isinstance(x, Tensor) and x.numel() > 1]
    return sum(x.numel() * x.element_size() for x in states) / (parameter.numel() * dtype.itemsize)


def memory_budget(config: RunConfig, world: World) -> MemoryBudget:
    """The bytes that a rank may fill of its device and of its host: the least of all ranks, which call it together."""
    device, host = _budget_here(config, world)
    least = world.control.largest_of([-float(device), -float(host)], "the least free memory")
    return MemoryBudget(device=int(-least[0]), host=int(-least[1]))


def _budget_here(config: RunConfig, world: World) -> tuple[int, int]:
    host = int(HOST_SHARE * (free_host_bytes() or 0) / ranks_on_host(world))
    if config.train.memory_bytes:
        return config.train.memory_bytes, host
    free, all_bytes = torch.cuda.mem_get_info(world.device)
    return int(config.train.memory_fraction * min(all_bytes, free + CONTEXT_BYTES)), host


def measures_by_hand(config: RunConfig, needs: MemoryNeeds) -> tuple[str, ...]:
    """What each layer keeps by the keys: the first `recompute_layers` of a stage (0: each) are recomputed."""
    train, kind = config.train, checkpointing_by_hand(config.train) or "none"
    word = f"{kind}+host" if train.offload_activations and kind != "none" else kind
    words = ["none"] * needs.layers
    for place in needs.places:
        for layer in place.stage.layers[: train.recompute_layers or None]:
            words[layer] = word
    return tuple(words)
