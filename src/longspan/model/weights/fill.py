"""Models whose parameters are on the meta device until `prepare` has decided which part of each this rank keeps.

This rank's part of each parameter is then filled from a source: a folder's files (`folder.py`), random weights
(`random.py`), or nothing where a checkpoint follows.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Protocol

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

from longspan.comm import World, result_or_first_error
from longspan.errors import ModelError
from longspan.model.adapters import plain_name
from longspan.model.weights.local_tensors import LocalPart, local_tensor, tied_names


def empty_model(
    config: PreTrainedConfig, dtype: torch.dtype, architecture: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """Make a model of this configuration with parameters on the meta device, and buffers with values on the CPU.

    Its class is `architecture`, or else the causal language model that the configuration stands for.
    """
    config = deepcopy(config)  # transformers writes the dtype into it
    with _register_on_meta():
        if architecture is None:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        else:
            model = architecture._from_config(config, dtype=dtype)
    other_dtypes = _exception_dtypes(model, dtype)
    for name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
        tensor.data = tensor.data.to(other_dtypes.get(name, dtype if tensor.is_floating_point() else tensor.dtype))
    return model


def images_class(config: PreTrainedConfig, images: bool = True) -> Any:
    """Return the image-text-to-text class to load a configuration with, or None to load its causal language model.

    With `images` the model must read images: ModelError for a configuration without such a class. Otherwise the class
    is only for configurations without a causal language model. None for one that has neither: AutoModelForCausalLM then
    refuses it.
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


def find_images_class(config: PreTrainedConfig) -> Any:
    """Return the image-text-to-text class of a configuration if its `architectures` name it; else None."""
    mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    image_class = mapping.get(type(config), None)
    if image_class is None or image_class.__name__ not in (config.architectures or ()):
        return None
    return image_class


def _exception_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    if not (plan := model._get_dtype_plan(dtype)):
        return {}
    pattern, globs, _ = build_glob_alternation(list(plan))
    # Each glob of the plan is a group of the pattern, and `globs` has the glob of a group's name.
    matches = {name: pattern.search(name) for name in model.state_dict()}
    return {name: plan[globs[str(match.lastgroup)]] for name, match in matches.items() if match}


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
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_empty
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def is_empty(model: nn.Module) -> bool:
    """Return whether some parameter of the model is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def allocate_model(model: nn.Module, device: torch.device) -> None:
    """Give every parameter on the meta device memory on `device`, with undefined values; buffers move there.

    Parameters stay the same objects, so that ties, and what FSDP2 has recorded of them, stay valid.
    """
    for parameter in model.parameters():
        if parameter.is_meta:
            memory = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            for name, value in vars(parameter).items():
                setattr(memory, name, value)
            swap_tensors(parameter, memory)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device, contiguous; a tensor of the meta device stays on that one."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device if x.is_meta else device).copy_(x)


class WeightSource(Protocol):
    """Where weights come from: parts of a model's parameters, one after another."""

    def read(self, parts: Mapping[str, LocalPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, values) for each part of a parameter or persistent buffer that the source has.

        The source may compute on the device; values may lie on the CPU too, as their reader copies them.
        """
        ...


class _LeftToCheckpoint:
    """A source of NaN for weights that a checkpoint overwrites: one that it misses does not pass for a weight."""

    def read(self, parts: Mapping[str, LocalPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        for name, part in parts.items():
            value = math.nan if part.dtype.is_floating_point else 0
            yield name, torch.full((), value, dtype=part.dtype, device=device)


class DeferredWeights:
    """What fills a model once it is prepared, and which names of the model mean one tied parameter."""

    def __init__(self, model: nn.Module, source: WeightSource) -> None:
        """Note the first name of each parameter; `source` knows tied parameters by that name."""
        self.source, self._first_name = source, tied_names(model)

    def of(self, part: nn.Module) -> "DeferredWeights":
        """Return the same source for a part of the model, in which parameters have the same names as in the whole."""
        return DeferredWeights(part, self.source)

    def fill_weights(self, models: Sequence[nn.Module], world: World) -> None:
        """Allocate the parameters of a model, or of this rank's stages, on the world's device, and fill them.

        All ranks call it together; each reads for itself. Raises ModelError on every rank if one rank fails.
        """
        result_or_first_error(world, lambda: self._fill_models(models, world.device), _to_model_error)

    @torch.no_grad()
    def _fill_models(self, models: Sequence[nn.Module], device: torch.device) -> None:
        tensors = defaultdict[str, list[Tensor]](list)
        for model in models:
            allocate_model(model, device)
            for adapted_name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
                name = plain_name(adapted_name)
                tensors[self._first_name.get(name, name)].append(tensor)
        parts = {name: LocalPart.of(copies[0]) for name, copies in tensors.items()}
        # a rank may hold an empty block of a parameter, which no source need have
        missing = {name for name, part in parts.items() if all(side.stop > side.start for side in part.block)}
        for name, part in self.source.read(parts, device):
            for copy in tensors[name]:
                local_tensor(copy).copy_(part)
            del part  # before the next is read
            missing.discard(name)
        assert not missing, f"{self.source} lacks {', '.join(sorted(missing)[:4])}, and was not checked"


def _to_model_error(error: Exception) -> ModelError:
    return error if isinstance(error, ModelError) else ModelError(f"{type(error).__name__}: {error}")


def fill_when_prepared(model: nn.Module, source: WeightSource) -> None:
    """Have `prepare` fill this model, whose parameters are on the meta device."""
    model.weights_to_come = DeferredWeights(model, source)  # pyright: ignore[reportArgumentType]


def defer_to_checkpoint(model: nn.Module) -> None:
    """Have `prepare` read or draw nothing: every weight is NaN until a checkpoint is loaded."""
    if (weights := vars(model).get("weights_to_come")) is not None:
        weights.source = _LeftToCheckpoint()


def find_deferred_weights(model: nn.Module) -> DeferredWeights | None:
    """Return the record of what will fill the model; None if its parameters have values."""
    return vars(model).get("weights_to_come")


def pop_deferred_weights(model: nn.Module) -> DeferredWeights | None:
    """Take from the model the record of what fills it once it is prepared; None if its parameters have values."""
    return vars(model).pop("weights_to_come", None)
