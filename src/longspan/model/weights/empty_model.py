"""Models whose parameters are on the meta device: how one is made, of which class, and how it gets memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
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
    """Make a model of this configuration with parameters on the meta device, and buffers with values on the CPU."""
    with _register_on_meta():
        model = new_model(config, dtype, architecture)
    set_dtypes(model, dtype)
    return model


def set_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give parameters and saved buffers the types that they have when transformers reads a folder in `dtype`.

    A class keeps some in float32 where `dtype` is of 16 bits.
    """
    other_dtypes = dict[str, torch.dtype]()
    if plan := model._get_dtype_plan(dtype):
        # The plan's keys are globs of names. Each is a named group of the pattern, and `globs` has the glob of a group.
        pattern, globs, _ = build_glob_alternation(list(plan))
        matches = {name: pattern.search(name) for name in model.state_dict()}
        other_dtypes = {name: plan[globs[str(match.lastgroup)]] for name, match in matches.items() if match}
    for name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
        tensor.data = tensor.data.to(other_dtypes.get(name, dtype if tensor.is_floating_point() else tensor.dtype))


def new_model(
    config: PreTrainedConfig, dtype: torch.dtype, architecture: type[PreTrainedModel] | None
) -> PreTrainedModel:
    """Make a model of this class (None: the causal language model), with what its own initialisation draws."""
    config = deepcopy(config)  # transformers writes the dtype into it
    if architecture is None:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return architecture._from_config(config, dtype=dtype)


def choose_image_text_class(config: PreTrainedConfig, images: bool = True) -> Any:
    """Return the image-text-to-text class to load a configuration with, or None to load its causal language model.

    With `images` the configuration must have such a class (ModelError); else it is for those without a causal model.
    """
    mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not images and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    if images and type(config) not in mapping:
        raise ModelError(
            f"{type(config).__name__} stands for no model from images and text to text (AutoModelForImageTextToText); "
            "load it without images=True"
        )
    return mapping.get(type(config), None)


def image_text_class_of_architectures(config: PreTrainedConfig) -> Any:
    """Return the image-text-to-text class of a configuration if its `architectures` name it; else None."""
    mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    image_class = mapping.get(type(config), None)
    if image_class is None or image_class.__name__ not in (config.architectures or ()):
        return None
    return image_class


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer) of the buffers that a model's `state_dict`, and so its saved folder, holds."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip("."), buffer


@contextmanager
def _register_on_meta() -> Iterator[None]:
    """torch.device("meta") is not used: buffers would be there too, without values."""
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter on the meta device, with its requires_grad."""
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_empty
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def has_meta_parameters(model: nn.Module) -> bool:
    """Return whether some parameter of the model is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device, contiguous; a tensor of the meta device stays on that one."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device if x.is_meta else device).copy_(x)
