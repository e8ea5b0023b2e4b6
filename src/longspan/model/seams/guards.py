"""Methods that a prepared model refuses by name: to be saved by transformers, wrapped in DDP, or generated from."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from longspan.errors import ModelError

# All ranks call it; a Trainer has its own.
SAVES = "longspan.save_model(model, folder, world)"


def guard_prepared_model(prepared: nn.Module, name: str, saves: str = SAVES) -> None:
    """Have a prepared model, and every model inside it, refuse to be saved by transformers, wrapped or generated from.

    `name` is the model's in messages, `saves` the call that saves it.
    """
    reasons = {
        method: f"{name}.{method} would write what this rank holds of a prepared model; call {saves} on all ranks, "
        "which writes a folder that transformers loads"
        for method in ("save_pretrained", "push_to_hub")
    }
    reasons["generate"] = (
        f"{name}.generate would need caches, which a prepared model has none of; {saves} on all ranks writes a folder "
        "that transformers loads and generates from"
    )
    modules = [module for module in prepared.modules() if isinstance(module, PreTrainedModel)]
    for module in (prepared, *modules):
        target: Any = module
        for method, reason in reasons.items():
            if method != "generate" or hasattr(target, method):  # not every module can generate
                setattr(target, method, partial(refuse_call, reason))
        # DistributedDataParallel fails as it reads this
        target._ddp_params_and_buffers_to_ignore = _RefusesDDP(name)


def refuse_call(message: str, *args: object, **kwargs: object) -> NoReturn:
    """Raise ModelError with this message, in place of a method that is refused."""
    raise ModelError(message)


@dataclass(eq=False)
class _RefusesDDP:
    """A list of names that DistributedDataParallel reads first of all (torch 2.11 to 2.15); to read it raises
    ModelError.
    """

    _name: str

    def __iter__(self) -> Iterator[str]:
        raise ModelError(
            f"{self._name} was prepared: its gradients are summed over the slots by run_step; do not wrap it in "
            "DistributedDataParallel, nor give it to accelerator.prepare or a Trainer, which do that; "
            "longspan.hf.with_longspan(Trainer) takes the model before prepare, and what takes their place in a loop "
            'is in docs/own-loop.md, "From a Trainer script"'
        )
