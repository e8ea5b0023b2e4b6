"""All that an evaluation may not change, as one rank has it: copies to compare, bit by bit."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from longspan.comm import World
from longspan.model.weights.local_tensors import local_tensor

State = dict[str, Any]


def local_weights(model: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: local_tensor(tensor.detach()).clone() for name, tensor in tensors.items()}


def state_of(model: nn.Module, optimizer: Optimizer, world: World) -> State:
    """Parameters, buffers, gradients, optimizer states, modes and hooks of modules, and random generators.

    Which parameters FSDP2 has gathered is in it too: gathered ones would be stale after the next update.
    """
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {
        "weights": local_weights(model),
        "gradients": {n: None if g is None else local_tensor(g).clone() for n, g in gradients.items()},
        "optimizer": _copied(optimizer.state_dict()),
        "modes": {name: module.training for name, module in model.named_modules()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "hooks": {name: hooks_of(module) for name, module in model.named_modules()},
        "gathered": [_is_gathered(module) for module in model.modules() if isinstance(module, FSDPModule)],
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "step": world.step,
        "seed": world.seed,
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
    }


def hooks_of(module: nn.Module) -> tuple[int, ...]:
    return tuple(len(vars(module)[name]) for name in sorted(vars(module)) if name.endswith("_hooks"))


def differences(before: Any, after: Any, at: str = "") -> list[str]:
    if isinstance(before, Tensor):
        alike = isinstance(after, Tensor) and before.dtype == after.dtype and torch.equal(before, after)
        return [] if alike else [at]
    if isinstance(before, np.ndarray):
        return [] if np.array_equal(before, after) else [at]
    if isinstance(before, dict):
        if before.keys() != after.keys():
            return [f"{at}: {sorted(map(str, before.keys() ^ after.keys()))}"]
        return [path for key in before for path in differences(before[key], after[key], f"{at}/{key}")]
    if isinstance(before, list | tuple):
        if len(before) != len(after):
            return [at]
        pairs = enumerate(zip(before, after, strict=True))
        return [path for i, (x, y) in pairs for path in differences(x, y, f"{at}/{i}")]
    return [] if before == after else [at]


def _is_gathered(module: FSDPModule) -> bool:
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return any(group is not None and group.is_unsharded for group in groups)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return local_tensor(value).clone()
    if isinstance(value, dict):
        return {key: _copied(x) for key, x in value.items()}
    return [_copied(x) for x in value] if isinstance(value, list | tuple) else value
