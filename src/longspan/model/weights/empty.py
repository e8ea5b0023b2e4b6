"""Models whose parameters are on the meta device until `prepare` has decided which part of each this rank keeps."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import build_glob_alternation

from longspan.errors import ModelError


def empty_model(
    config: PreTrainedConfig, dtype: torch.dtype, architecture: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """A model of this configuration with parameters of the meta device, and buffers with values, on the CPU.

    Its class is `architecture`, or else the causal language model that the configuration stands for.
    """
    config = deepcopy(config)  # transformers writes the dtype into it
    with _parameters_on_meta():
        if architecture is None:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        else:
            model = architecture._from_config(config, dtype=dtype)
    apart = _dtypes_apart(model, dtype)
    for name, tensor in (*model.named_parameters(), *stored_buffers(model)):
        tensor.data = tensor.data.to(apart.get(name, dtype if tensor.is_floating_point() else tensor.dtype))
    return model


def images_class(config: PreTrainedConfig, images: bool = True) -> Any:
    """The class from images and text to text of a configuration; None where the causal language model is meant.

    That is: without `images`, where there is one.
    """
    mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not images and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    if type(config) in mapping:
        return mapping[type(config)]
    if images:
        raise ModelError(
            f"{type(config).__name__} stands for no model from images and text to text (AutoModelForImageTextToText); "
            "load it without images=True"
        )
    return None


def named_images_class(config: PreTrainedConfig) -> Any:
    """The class from images and text to text that a configuration names among its architectures; None for others."""
    mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    named = mapping.get(type(config), None)
    return named if named is not None and named.__name__ in (config.architectures or ()) else None


def _dtypes_apart(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """What the architecture keeps in another type, a router or a norm in float32 say; names as transformers matches."""
    if not (plan := model._get_dtype_plan(dtype)):
        return {}
    pattern, globs, _ = build_glob_alternation(list(plan))
    matches = {name: pattern.search(name) for name in model.state_dict()}
    return {name: plan[globs[str(match.lastgroup)]] for name, match in matches.items() if match}


def stored_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a model's `state_dict` holds, and so a folder of it, by name."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip("."), buffer


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


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """A contiguous copy on the device; of a tensor of the meta device, on that one."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device if x.is_meta else device).copy_(x)
