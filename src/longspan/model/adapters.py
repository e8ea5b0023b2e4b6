"""The LoRA adapter that peft has put into a model, and which of the model's parameters belong to it.

peft is not imported: its layers are recognised by attributes. They stand in place of the linears that they adapt, so
that a prepared model's names are those of the model inside a PeftModel.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.errors import ModelError

_OF_ADAPTER = re.compile(r"(^|\.)(lora_\w+|modules_to_save)\.")
_STANDS_FOR = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Adapter:
    """The adapter of a model: its name in peft, its configuration (LoraConfig), and its modules' largest dropout.

    Trainers of preferences set dropout to 0 in the modules, so that it may differ from the configuration's.
    """

    name: str
    config: Any
    dropout: float = 0.0


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is one of peft's that adapts the module in its `base_layer`."""
    return hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names")


def has_trained_copy(module: nn.Module) -> bool:
    """Return whether a module is one of peft's that trains a copy of the module in its `original_module`."""
    return hasattr(module, "original_module") and hasattr(module, "adapter_layer_names")


def peft_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that peft has put in place of the model's own, by name."""
    return {name: module for name, module in model.named_modules() if is_adapted(module) or has_trained_copy(module)}


def base_module(module: nn.Module) -> nn.Module:
    """Return the model's own module inside an adapted one; a module that is not adapted is returned as it is."""
    return module.base_layer if is_adapted(module) else module  # pyright: ignore[reportReturnType]


def unwrap_peft_model(model: nn.Module) -> nn.Module:
    """Take the transformers model out of a PeftModel; another model is returned. ModelError for no LoRA around one."""
    if type(model).__module__.partition(".")[0] != "peft":
        return model
    inside = model.get_base_model() if hasattr(model, "get_base_model") else None  # pyright: ignore[reportCallIssue]
    if not isinstance(inside, PreTrainedModel):
        raise ModelError(
            f"prepare takes a PeftModel with a LoRA adapter around a transformers model, got {type(model).__name__}; "
            "use peft.get_peft_model(model, peft.LoraConfig(…))"
        )
    return inside


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
    rates = (m.p for path, m in model.named_modules() if isinstance(m, nn.Dropout) and ".lora_dropout." in f".{path}.")
    return Adapter(name, config, max(rates, default=0.0))


def adapter_of_prepared_model(model: nn.Module) -> Adapter | None:
    """Return the adapter of a prepared model; None if it has none."""
    return getattr(model, "adapter", None)


def belongs_to_adapter(name: str) -> bool:
    """Return whether a parameter of this name is an adapter's: a matrix of it, or a module's copy that is trained.

    >>> belongs_to_adapter("layers.0.q_proj.lora_A.default.weight"), belongs_to_adapter("q_proj.base_layer.weight")
    (True, False)
    """
    return bool(_OF_ADAPTER.search(name))


def name_without_adapter(name: str) -> str:
    """Return a parameter's name in the model without an adapter; a trained copy of a module has the original's.

    >>> name_without_adapter("layers.0.q_proj.base_layer.weight")
    'layers.0.q_proj.weight'
    >>> name_without_adapter("lm_head.modules_to_save.default.weight")
    'lm_head.weight'
    """
    return _STANDS_FOR.sub("", name)


def entries_trained_with_adapter(model: nn.Module, entries: Mapping[str, Value]) -> dict[str, Value]:
    """Select the values of what is trained with an adapter, by weight name; all of them without an adapter."""
    if adapter_of_prepared_model(model) is None:
        return dict(entries)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in entries.items() if belongs_to_adapter(name) or name in trained}


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapter's parameters by name."""
    return ((name, p) for name, p in model.named_parameters() if belongs_to_adapter(name))
