"""What a prepared model's own class would do to weights that lie on several ranks, refused by name.

Calls of the model are checked in `attention_calls.py`; configurations and architectures in `refusals.py`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from longspan.errors import ModelError


def guard(prepared: nn.Module, name: str) -> None:
    """Have a prepared model of this architecture, and its base model, refuse to be saved or wrapped by others."""
    modules = [module for module in prepared.modules() if isinstance(module, PreTrainedModel)]
    for module in (prepared, *modules):
        target: Any = module
        for method in ("save_pretrained", "push_to_hub"):
            setattr(target, method, partial(_refuse_saving, name, method))
        target._ddp_params_and_buffers_to_ignore = _RefusesDDP(name)


def _refuse_saving(name: str, method: str, *args: object, **kwargs: object) -> NoReturn:
    raise ModelError(
        f"{name}.{method} would write what this rank holds of a prepared model; call "
        "longspan.save_model(model, folder, world) on all ranks, which writes a folder that transformers loads"
    )


class _RefusesDDP:
    """DistributedDataParallel reads this list of names first of all (torch 2.11 to 2.13)."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> Iterator[str]:
        raise ModelError(
            f"{self._name} was prepared: its gradients are summed over the slots by run_step; do not wrap it in "
            "DistributedDataParallel, nor give it to accelerator.prepare"
        )
