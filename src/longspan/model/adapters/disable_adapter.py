"""A prepared model without its adapter for a while, and what the PeftModel around it does from then on."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from longspan.errors import ModelError
from longspan.model.adapted_modules import peft_modules
from longspan.model.marks import adapter_of_prepared_model
from longspan.model.seams.guards import SAVES, refuse_call


@contextmanager
def disable_adapter(model: nn.Module) -> Iterator[None]:
    """Let a model compute what its base model does inside; all ranks enter it together.

    >>> with disable_adapter(model):
    ...     reference = run_step(model, plan, documents, world, backward=False).loss

    `model` is what `prepare` returned, under any home. Nothing is trained inside: `run_step` with a backward pass
    raises ModelError there. `peft_model.disable_adapter()` of a PeftModel that was prepared does the same. Unlike
    peft's own it leaves unchanged which parameters require gradients: FSDP2 reads that when it first gathers them.
    Raises ModelError for a model that has no adapter.
    """
    modules: list[Any] = [*peft_modules(model).values()]
    if not modules and adapter_of_prepared_model(model) is None:
        raise ModelError(
            f"{type(model).__name__} has no adapter to leave out; call disable_adapter with the model that prepare "
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
    if adapter_of_prepared_model(model) is None:
        return
    modules: list[Any] = [*peft_modules(model).values()]
    if any(module._disable_adapters for module in modules):
        raise ModelError(
            "the model's adapter is left out (disable_adapter), and nothing else of it is trained; use backward=False "
            "there, or train outside of it"
        )


_CHANGES = (
    "merge_and_unload",
    "unload",
    "merge_adapter",
    "add_adapter",
    "load_adapter",
    "delete_adapter",
    "set_adapter",
    "save_pretrained",
    "push_to_hub",
    "forward",
)


def redirect_peft_model(peft_model: Any, prepared: nn.Module, saves: str = SAVES) -> None:
    """Have a PeftModel's `disable_adapter` leave the adapter of `prepared` out, and refuse methods that change its
    parts.

    `saves` is what a message names for saving. Another model is left as it is.
    """
    if peft_model is prepared or not hasattr(peft_model, "get_base_model"):
        return
    peft_model.disable_adapter = partial(disable_adapter, prepared)
    for name in _CHANGES:
        if hasattr(peft_model, name) or hasattr(peft_model.base_model, name):
            text = (
                f"PeftModel.{name}: the model inside it was prepared, and lies on several ranks; call {saves} on all "
                "ranks, whose folder stock peft loads, merges and pushes (of a run longspan export RUN FOLDER --merge "
                "merges it); choose adapters before prepare, and run the model that it returned"
            )
            setattr(peft_model, name, partial(refuse_call, text))
