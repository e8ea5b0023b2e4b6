"""Bytes that a rank has for gradients and activations, beside weights and the states of its optimizer."""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from longspan.config.sections import RunConfig
from longspan.model.local_tensors import local_tensor
from longspan.train.optim.optimizer import OptimizerChoice

CPU_BUDGET = 1 << 30


def budget_of(config: RunConfig, model: nn.Module, optimizer: Optimizer, device: torch.device) -> float:
    """Bytes for gradients and activations, beside weights and moments."""
    if config.train.memory_bytes:
        return float(config.train.memory_bytes)
    if device.type != "cuda":
        return float(CPU_BUDGET)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    states = 0 if optimizer.state else states_to_come(OptimizerChoice.of(config.train), model)
    return config.train.memory_fraction * free - states


def states_to_come(choice: OptimizerChoice, model: nn.Module) -> int:
    """Bytes that an optimizer's first step will take for its states, measured on one parameter of each shape here."""
    local = [local_tensor(p.detach()) for p in model.parameters() if p.requires_grad]
    shapes = Counter((tuple(p.shape), p.dtype, p.device) for p in local)
    return sum(count * _bytes_of_states(choice, *shape) for shape, count in shapes.items())


def _bytes_of_states(choice: OptimizerChoice, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = choice.over([parameter])
    optimizer.step()
    return sum(x.numel() * x.element_size() for x in tree_leaves(optimizer.state[parameter]) if isinstance(x, Tensor))
