"""Models whose parameters are on the meta device until `prepare` has decided which part of each this rank keeps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model of this configuration with parameters of the meta device, and buffers with values, on the CPU."""
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(_dtype_of(model, name, dtype))
    return model


def _dtype_of(model: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or what the architecture asks for: some keep a router or a norm in float32."""
    plan = model._get_dtype_plan(dtype)
    return next((kind for pattern, kind in plan.items() if pattern.strip("*.") in name), dtype)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, a module that registers a parameter gets one without memory; ties between parameters stay."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def is_empty(model: nn.Module) -> bool:
    """Whether some parameter of the model is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give every parameter of the meta device memory on `device`, with any values; buffers move there.

    Parameters stay the same objects, so that ties and what FSDP2 knows of them hold.
    """
    for parameter in model.parameters():
        if parameter.is_meta:
            memory = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            _keep_attributes(memory, parameter)
            swap_tensors(parameter, memory)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def _keep_attributes(new: Any, old: Any) -> None:
    for name, value in vars(old).items():
        setattr(new, name, value)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` on the device; one of the meta device stays there."""
    return x if x.is_meta else x.to(device)
