"""A model without its adapter for a while: reference log-probabilities, and evaluation of the base model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from longspan.errors import ModelError
from longspan.model.adapters import adapter_of, peft_modules


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Inside, a model computes what its base model does; all ranks enter it together.

    >>> with without_adapter(model):
    ...     reference = run_step(model, plan, documents, world, backward=False).loss

    `model` is what `prepare` returned, under any home. Nothing is trained inside: `run_step` with a backward pass
    raises ModelError there. `peft_model.disable_adapter()` of a PeftModel that was prepared is this one. Which
    parameters require gradients does not change, as it does in peft's own: FSDP2 reads that when it first gathers them.
    Raises ModelError for a model that has no adapter.
    """
    modules: list[Any] = [*peft_modules(model).values()]
    if not modules and adapter_of(model) is None:
        raise ModelError(
            f"{type(model).__name__} has no adapter to leave out; call without_adapter with the model that prepare "
            "returned"
        )
    before = [module._disable_adapters for module in modules]
    for module in modules:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module, disabled in zip(modules, before, strict=True):
            module._disable_adapters = disabled


def refuse_adapter_left_out(model: nn.Module) -> None:
    """Raise ModelError where a model would be trained without the adapter that alone is to be trained."""
    if adapter_of(model) is None:
        return
    modules: list[Any] = [*peft_modules(model).values()]
    if any(module._disable_adapters for module in modules):
        raise ModelError(
            "the model's adapter is left out (without_adapter), and nothing else of it is trained; use backward=False "
            "there, or train outside of it"
        )
