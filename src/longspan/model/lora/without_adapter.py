"""A model without its adapter for a while: reference log-probabilities, and evaluation of the base model.

`redirect_peft_model` makes the PeftModel around a prepared model leave the adapter out in the same way, and refuse
calls that would change its parts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from torch import nn

from longspan.errors import ModelError
from longspan.model.adapters import model_adapter, peft_modules
from longspan.model.seams.refusals import SAVES


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Let a model compute what its base model does inside; all ranks enter it together.

    >>> with without_adapter(model):
    ...     reference = run_step(model, plan, documents, world, backward=False).loss

    `model` is what `prepare` returned, under any home. Nothing is trained inside: `run_step` with a backward pass
    raises ModelError there. `peft_model.disable_adapter()` of a PeftModel that was prepared does the same. Unlike
    peft's own it leaves unchanged which parameters require gradients: FSDP2 reads that when it first gathers them.
    Raises ModelError for a model that has no adapter.
    """
    modules: list[Any] = [*peft_modules(model).values()]
    if not modules and model_adapter(model) is None:
        raise ModelError(
            f"{type(model).__name__} has no adapter to leave out; call without_adapter with the model that prepare "
            "returned"
        )
    old_flags = [module._disable_adapters for module in modules]
    for module in modules:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module, disabled in zip(modules, old_flags, strict=True):
            module._disable_adapters = disabled


def refuse_adapter_left_out(model: nn.Module) -> None:
    """Raise ModelError before a model is trained while its adapter, the only part that is trained, is left out."""
    if model_adapter(model) is None:
        return
    modules: list[Any] = [*peft_modules(model).values()]
    if any(module._disable_adapters for module in modules):
        raise ModelError(
            "the model's adapter is left out (without_adapter), and nothing else of it is trained; use backward=False "
            "there, or train outside of it"
        )


_CHANGES = {
    "merge_and_unload": "longspan export RUN FOLDER --merge merges that of a run, or merge what {saves} saved",
    "unload": "load the base model again",
    "merge_adapter": "merge what {saves} saved, in one process",
    "add_adapter": "add adapters before prepare",
    "load_adapter": "load adapters before prepare",
    "delete_adapter": "delete adapters before prepare",
    "set_adapter": "choose the adapter before prepare",
    "save_pretrained": "call {saves} on all ranks, which stock peft loads",
    "push_to_hub": "call {saves} on all ranks, and push that folder",
    "forward": "call the model that prepare returned, with a shard, or longspan.run_step",
}


def redirect_peft_model(peft_model: Any, prepared: nn.Module, saves: str = SAVES) -> None:
    """Have a PeftModel's `disable_adapter` call `without_adapter(prepared)`, and refuse methods that change its parts.

    Another model than a PeftModel is left as it is. `saves` is the call that saves it.
    """
    if peft_model is prepared or not hasattr(peft_model, "get_base_model"):
        return
    peft_model.disable_adapter = partial(without_adapter, prepared)
    for name, instead in _CHANGES.items():
        if hasattr(peft_model, name) or hasattr(peft_model.base_model, name):
            setattr(peft_model, name, partial(_refuse_call, name, instead.format(saves=saves)))


def _refuse_call(name: str, instead: str, *args: object, **kwargs: object) -> NoReturn:
    raise ModelError(f"PeftModel.{name}: the model inside it was prepared, and lies on several ranks; {instead}")
