"""Optimizers by name, and the learning rate as a function of the step."""

import math
import re

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from longspan.errors import ConfigError

OPTIMIZERS = ("adamw", "sgd")
_BIAS_OR_NORM = re.compile(r"bias$|(norm\d*|ln_\w+)\.[^.]+$")  # the parameter itself, or the module that it is in


def build_optimizer(
    model: nn.Module,
    name: str = "adamw",
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
) -> Optimizer:
    """An optimizer over the model's trainable parameters; call it after `prepare`, which may replace them.

    "adamw", or "sgd" (plain: no momentum). Weight decay applies to what multiplies (`decays`), not to norms and biases.
    Where the model has nothing to train (a pipeline stage that is frozen, say) the optimizer has no parameters. Raises
    ConfigError for another name.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"unknown optimizer {name!r}; use {' or '.join(OPTIMIZERS)}")
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trainable if decays(name, p)], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if not decays(name, p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]] or groups[:1]
    if name == "sgd":
        return SGD(groups, lr=lr)
    return AdamW(groups, lr=lr, betas=betas, fused=True)


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices, one for each expert too, and to kernels of convolutions.

    Shapes alone do not tell: the biases of experts (E, D) and norms of single heads (N, H) have two dims as well.

    >>> decays("layers.0.mlp.experts.down_proj_bias", torch.zeros(8, 64))
    False
    """
    return parameter.ndim >= 2 and not _BIAS_OR_NORM.search(name.lower())


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
