"""Which modules and parameters of a model are peft's, told by their attributes and names: peft is not imported.

peft's layers stand in place of the linears that they adapt, so that a prepared model's names are those of the model
inside a PeftModel.
"""

import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from longspan.errors import ModelError

# names of parameters that are trained: matrices of LoRA, and copies of whole modules
_TRAINED_NAME = re.compile(r"(^|\.)(lora_\w+|modules_to_save)\.")
# What peft puts into names of the model's own modules. Where two parameters of one module are adapted, peft nests its
# modules: the inner adapter's matrices have a `base_layer` before `.lora_` in their names, which belongs to them.
_INSERTED_NAME = re.compile(r"\.(base_layer(?!.*\.lora_)|original_module|modules_to_save\.[^.]+)(?=\.|$)")


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is one of peft's that adapts the module in its `base_layer`."""
    return hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names")


def is_expert_adapter(module: nn.Module) -> bool:
    """Return whether a module is one of peft's that adapts a parameter of experts (`target_parameters`)."""
    return is_adapted(module) and hasattr(module, "parameter_name")


def has_trained_copy(module: nn.Module) -> bool:
    """Return whether a module is one of peft's that trains a copy of the module in its `original_module`."""
    return hasattr(module, "original_module") and hasattr(module, "adapter_layer_names")


def is_peft_module(module: nn.Module) -> bool:
    """Return whether a module is one that peft has put in place of a model's own."""
    return hasattr(module, "adapter_layer_names") and (is_adapted(module) or has_trained_copy(module))


def peft_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that peft has put in place of the model's own, by name."""
    return {name: module for name, module in model.named_modules() if is_peft_module(module)}


def adapter_dropout(model: nn.Module) -> float:
    """Return the largest dropout of the modules of adapters in a model."""
    dropouts = ((f".{path}.", m) for path, m in model.named_modules() if isinstance(m, nn.Dropout))
    return max((m.p for path, m in dropouts if ".lora_dropout." in path), default=0.0)


def unadapted_module(module: nn.Module) -> nn.Module:
    """Return the model's own module inside an adapted one; a module that is not adapted is returned as it is."""
    return module.base_layer if is_adapted(module) else module  # pyright: ignore[reportReturnType]


def unwrap_peft_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside a PeftModel; any model that is not peft's is returned as it is.

    Raises ModelError for a model of peft's around anything else.
    """
    if type(model).__module__.partition(".")[0] != "peft":
        return model
    peft_model: Any = model
    wrapped_model = peft_model.get_base_model() if hasattr(model, "get_base_model") else None
    if not isinstance(wrapped_model, PreTrainedModel):
        raise ModelError(
            f"prepare takes a PeftModel with a LoRA adapter around a transformers model, got {type(model).__name__}; "
            "use peft.get_peft_model(model, peft.LoraConfig(…))"
        )
    return wrapped_model


def belongs_to_adapter(name: str) -> bool:
    """Return whether a parameter of this name is an adapter's: a matrix of it, or a module's copy that is trained.

    >>> belongs_to_adapter("layers.0.q_proj.lora_A.default.weight"), belongs_to_adapter("q_proj.base_layer.weight")
    (True, False)
    """
    return bool(_TRAINED_NAME.search(name))


def name_without_adapter(name: str) -> str:
    """Return a parameter's name in the model without an adapter; a trained copy of a module has the original's.

    >>> name_without_adapter("layers.0.q_proj.base_layer.weight")
    'layers.0.q_proj.weight'
    >>> name_without_adapter("lm_head.modules_to_save.default.weight")
    'lm_head.weight'
    """
    return _INSERTED_NAME.sub("", name)
