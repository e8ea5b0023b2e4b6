"""Training and evaluation: one `run_step` for both, and around it configuration, data, checkpoints and the loop.

Names are imported on first use (PEP 562), so that reading a configuration needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan.train.gradients import grad_norm as grad_norm
    from longspan.train.loss import read_inputs_and_labels as read_inputs_and_labels
    from longspan.train.loss import summed_cross_entropy as summed_cross_entropy
    from longspan.train.optim import build_optimizer as build_optimizer
    from longspan.train.optim import lr_at as lr_at
    from longspan.train.step import StepResult as StepResult
    from longspan.train.step import run_step as run_step

_HOME_OF = {
    **dict.fromkeys(("run_step", "StepResult"), "longspan.train.step"),
    **dict.fromkeys(("read_inputs_and_labels", "summed_cross_entropy"), "longspan.train.loss"),
    **dict.fromkeys(("build_optimizer", "lr_at"), "longspan.train.optim"),
    "grad_norm": "longspan.train.gradients",
}

__all__ = list(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'longspan.train' has no attribute {name!r}; it has {', '.join(_HOME_OF)}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value
