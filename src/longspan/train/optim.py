"""Optimizers by name, the learning rate as a function of the step, and the norm of gradients that live on meshes."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import SGD, AdamW, Optimizer

from longspan.errors import ConfigError

OPTIMIZERS = ("adamw", "sgd")


def build_optimizer(
    model: nn.Module,
    name: str = "adamw",
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
) -> Optimizer:
    """An optimizer over the model's trainable parameters; call it after `prepare`, which may replace them.

    "adamw", or "sgd" (plain: no momentum). Weight decay applies to matrices alone, not to norms and biases. Raises
    ConfigError for another name.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"unknown optimizer {name!r}; use {' or '.join(OPTIMIZERS)}")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if name == "sgd":
        return SGD(groups, lr=lr)
    return AdamW(groups, lr=lr, betas=betas, fused=True)


def lr_at(step: int, steps: int, warmup: int, lr: float, min_ratio: float = 0.1) -> float:
    """The learning rate of step 0, 1, …, steps − 1: linear warm-up to `lr`, then a cosine down to `lr · min_ratio`.

    Step i of the warm-up has lr · (i + 1) / warmup, so that no step has rate 0; the last step has the least rate.

    >>> [round(lr_at(i, 5, 2, 1.0, 0.0), 3) for i in range(5)]
    [0.5, 1.0, 0.75, 0.25, 0.0]
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup + 1) / max(1, steps - warmup))
    return lr * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, a scalar tensor equal on every rank. Parameters without one are skipped.

    Sharded gradients (DTensor) may live on different meshes: torch takes the norm of one mesh at a time.
    """
    norms = [_whole(get_total_norm(group)) for group in _by_mesh(parameters)]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def clip_gradients(parameters: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale all gradients by max_norm / norm where their `norm` exceeds `max_norm`."""
    for mesh in _by_mesh(parameters, gradients=False):
        clip_grads_with_norm_(mesh, max_norm, norm)


def _by_mesh(parameters: Iterable[Tensor], *, gradients: bool = True) -> list[list[Tensor]]:
    """Gradients (or their parameters) grouped by the mesh that they are sharded on, plain tensors together."""
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            groups[mesh].append(gradient if gradients else parameter)
    return list(groups.values())


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
