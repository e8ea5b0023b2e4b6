"""The LoRA adapter that peft has put into a model, and which of the model's parameters belong to it.

peft is not imported: its layers are recognised by attributes. They stand in place of the linears that they adapt, so
that a prepared model's names are those of the model inside a PeftModel.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from longspan.errors import ModelError
from longspan.model.adapted_modules import adapter_dropout, belongs_to_adapter, peft_modules
from longspan.model.marks import adapter_of_prepared_model

Value = TypeVar("Value")


@dataclass(frozen=True)
class Adapter:
    """The adapter of a model: its name in peft, its configuration (LoraConfig), and its modules' largest dropout.

    Trainers of preferences set dropout to 0 in the modules, so that it may differ from the configuration's.
    """

    name: str
    config: Any
    dropout: float = 0.0


def find_adapter(model: nn.Module) -> Adapter | None:
    """Find the adapter in a model; None without peft's modules. ModelError for several, and without a configuration."""
    if not peft_modules(model):
        return None
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    if len(configs) != 1:
        raise ModelError(
            f"{type(model).__name__} has {len(configs)} adapters ({', '.join(configs) or 'none is configured'}), and "
            "one is trained; keep one: peft_model.delete_adapter(name)"
        )
    ((name, config),) = configs.items()
    return Adapter(name, config, adapter_dropout(model))


def entries_trained_with_adapter(model: nn.Module, entries: Mapping[str, Value]) -> dict[str, Value]:
    """Select the values of what is trained with an adapter, by weight name; all of them without an adapter."""
    if adapter_of_prepared_model(model) is None:
        return dict(entries)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in entries.items() if belongs_to_adapter(name) or name in trained}


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapter's parameters by name."""
    return ((name, p) for name, p in model.named_parameters() if belongs_to_adapter(name))
