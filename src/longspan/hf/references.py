"""References of TRL's trainers: models, and the adapter that training began with."""

from typing import Any

import torch
from torch import nn

from longspan.errors import ConfigError
from longspan.model.adapters.adapter import adapter_parameters
from longspan.model.weights.local_tensors import local_tensor

REFERENCE = "ref"  # TRL's name of the copy of a trained adapter that it keeps for the reference


def clear_device_map(args: Any) -> None:
    """Have TRL load models without a device_map: it sees one process, and would spread a model over all GPUs.

    Raises ConfigError for a device_map of the user's.
    """
    if not hasattr(args, "model_init_kwargs"):
        return
    keywords = dict(args.model_init_kwargs or {})
    if keywords.get("device_map") is not None:
        raise ConfigError(
            f"args.model_init_kwargs has device_map {keywords['device_map']!r}: a longspan trainer places parameters "
            "itself; leave it out"
        )
    args.model_init_kwargs = {**keywords, "device_map": None}


def remove_reference_adapter(model: Any) -> Any:
    """Remove TRL's copy of a model's adapter, before `prepare`; return its configuration, or None without a copy.

    An only adapter of this name is no copy, but the one that is trained.
    """
    configs = getattr(model, "peft_config", {})
    if REFERENCE not in configs or len(configs) == 1:
        return None
    config = configs[REFERENCE]
    model.delete_adapter(REFERENCE)
    return config


class ReferenceAdapter:
    """The adapter that training began with, in place of TRL's copy: the trained one has its values for a while.

    Made after `prepare`, of the values that the adapter has then; it takes over `set_adapter` of the PeftModel. TRL
    finds the copy's `config` in `peft_config`, and calls `set_adapter("ref")` for the reference.
    """

    def __init__(self, peft_model: Any, prepared: nn.Module, config: Any) -> None:
        """Take the place of TRL's copy, whose `config` it was, on a PeftModel whose model has been prepared."""
        (self._trained,) = peft_model.peft_config
        self._active_adapter = self._trained
        self._refuse = peft_model.set_adapter  # `prepare` made it refuse all but the trained adapter
        self._parameters = [parameter for _, parameter in adapter_parameters(prepared)]
        # These are the values of the inactive adapter.
        self._other_values = [local_tensor(parameter).clone() for parameter in self._parameters]
        peft_model.base_model.peft_config = {**peft_model.peft_config, REFERENCE: config}
        peft_model.set_adapter = self.set_adapter

    @torch.no_grad()
    def set_adapter(self, name: str, *args: Any, **keywords: Any) -> None:
        """Exchange the values of the trained adapter and of the reference's; `prepare` refuses other names."""
        if name not in (self._trained, REFERENCE):
            self._refuse(name, *args, **keywords)
        if name == self._active_adapter:
            return
        self._active_adapter = name
        for parameter, other_values in zip(self._parameters, self._other_values, strict=True):
            values = local_tensor(parameter)
            earlier_values = values.clone()
            values.copy_(other_values)
            other_values.copy_(earlier_values)
