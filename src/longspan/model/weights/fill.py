"""Models that are on the meta device until `prepare` has decided what this rank keeps of them, and their filling.

Sources are a folder's files (`folder.py`), random weights, or nothing where a checkpoint follows.
"""

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature
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
from longspan.model.adapted_modules import name_without_adapter
from longspan.model.layers import decoder_layers, towers_beside_text_model
from longspan.model.marks import packed_weights
from longspan.model.weights.local_tensors import LocalPart, local_tensor, tied_names

# what is drawn whole: its name, a module of its names and shapes, and the function that initialises it
Unit = tuple[str, nn.Module, Callable[[nn.Module], None]]


class DrawnWeights:
    """Weights that are a function of names, shapes, the seed and the device's kind: the same under every layout.

    Each unit is drawn whole in float32, from a seed of `seed` and its name; `values` are given, as those of buffers.
    """

    def __init__(self, values: Mapping[str, Tensor], units: Iterable[Unit] = (), seed: int = 0) -> None:
        self._values = values
        self._units = [*units]
        self._seed = seed

    def __str__(self) -> str:
        return "the drawn model"

    def read(self, parts: Mapping[str, LocalPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, values) of these parts of parameters."""
        for name in self._values.keys() & parts.keys():
            yield name, self._values[name][parts[name].block].to(parts[name].dtype)
        for path, module, initialise in self._units:
            names = {f"{path}.{name}".lstrip("."): name for name, _ in module.named_parameters()}
            if not names.keys().isdisjoint(parts):
                drawn = draw_copy(path, module, device, seed=self._seed, initialise=initialise)
                for name, inside in names.items():
                    if part := parts.get(name):
                        yield name, drawn.get_parameter(inside).detach()[part.block].to(part.dtype)


class RandomWeights(DrawnWeights):
    """All weights of a model, on the meta device, as it is: later it may be cut into stages and sharded."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        model = deepcopy(model)
        super().__init__(dict(persistent_buffers(model)), _units_to_draw(model), seed)


def _units_to_draw(model: PreTrainedModel) -> Iterator[Unit]:
    """Each decoder layer as a whole, since its modules may scale each other's weights.

    Each other tower, which has an initialisation of its own; each remaining module, without its children.
    """
    layers = decoder_layers(model)
    towers = {module for module in towers_beside_text_model(model) if isinstance(module, PreTrainedModel)}
    yield from ((path, layer, model._init_weights) for path, layer in layers.items())
    yield from ((path, module, module._init_weights) for path, module in model.named_modules() if module in towers)
    inside = {module for unit in (*layers.values(), *towers) for module in unit.modules()}
    for path, module in model.named_modules():
        if module not in inside and any(True for _ in module.parameters(recurse=False)):
            bare = deepcopy(module)
            bare._modules.clear()
            yield path, bare, model._init_weights


@torch.no_grad()
def draw_copy(
    path: str, module: nn.Module, device: torch.device, *, seed: int, initialise: Callable[[nn.Module], None]
) -> nn.Module:
    """Draw a copy of a module with random float32 weights, a function of `seed` and its name; buffers begin at 0.

    ModelError for parameters that a model's own `initialise` leaves as they were in memory.
    """
    drawn = deepcopy(module).to_empty(device=device).float()
    for parameter in drawn.parameters():
        parameter.fill_(math.nan)
    for buffer in drawn.buffers():
        buffer.zero_()
    # The CPU's generator is always forked; these are others, and the type is theirs: without any it has no effect.
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(zlib.crc32(path.encode()) ^ (seed * 0x9E3779B1 % 2**32))
        drawn.apply(initialise)  # children before parents, as transformers does
    if _unset_parameters(drawn):  # parameters that the model's function leaves to their module's constructor
        for inner in drawn.modules():
            _fill_class_defaults(inner)
        if unset := _unset_parameters(drawn):
            raise ModelError(
                f"{path}: {', '.join(unset[:4])} ({type(module).__name__}) get no random values by the model's own "
                "_init_weights; read weights from a folder"
            )
    return drawn


def _unset_parameters(module: nn.Module, *, recurse: bool = True) -> list[str]:
    parameters = dict(module.named_parameters(recurse=recurse))
    flags = torch.stack([p.isnan().any() for p in parameters.values()]).tolist() if parameters else []
    return [name for name, is_unset in zip(parameters, flags, strict=True) if is_unset]


def _fill_class_defaults(module: nn.Module) -> None:
    """With those of a new module, if the class takes no arguments, as Apertus' activations."""
    unset = _unset_parameters(module, recurse=False)
    arguments = signature(type(module)).parameters.values() if unset else ()
    if not unset or any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in arguments):
        return
    new_module = type(module)(**({"dtype": torch.float32} if any(p.name == "dtype" for p in arguments) else {}))
    for name in unset:
        module.get_parameter(name).copy_(new_module.get_parameter(name))


def empty_model(
    config: PreTrainedConfig, dtype: torch.dtype, architecture: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """Make a model of this configuration with parameters on the meta device, and buffers with values on the CPU."""
    with _register_on_meta():
        model = new_model(config, dtype, architecture)
    other_dtypes = _exception_dtypes(model, dtype)
    for name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
        tensor.data = tensor.data.to(other_dtypes.get(name, dtype if tensor.is_floating_point() else tensor.dtype))
    return model


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

    With `images` it must have one, ModelError otherwise; else only configurations without a causal model take it.
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
    return image_class if getattr(image_class, "__name__", None) in (config.architectures or ()) else None


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


def has_meta_parameters(model: nn.Module) -> bool:
    """Return whether some parameter of the model is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def allocate_model(model: nn.Module, device: torch.device) -> None:
    """Give every parameter on the meta device undefined memory on `device`, the same objects as before.

    Move buffers.
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
        """Yield (name, values) for each part that the source has, on the device or the CPU."""
        ...


class JoinedWeights:
    """A model's source, and one of what was added to it."""

    def __init__(self, model: WeightSource, added: WeightSource) -> None:
        self.base: WeightSource = model
        self.added = added

    def __str__(self) -> str:
        return str(self.base)

    def read(self, parts: Mapping[str, LocalPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        yield from self.base.read(parts, device)
        yield from self.added.read(parts, device)


class _LeftToCheckpoint:
    """A source of NaN for weights that a checkpoint overwrites: one that it misses does not pass for a weight."""

    def read(self, parts: Mapping[str, LocalPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        for name, part in parts.items():
            value = math.nan if part.dtype.is_floating_point else 0
            yield name, torch.full((), value, dtype=part.dtype, device=device)


class DeferredWeights:
    """What fills a model once it is prepared, and which names of the model mean one tied parameter."""

    def __init__(self, model: nn.Module, source: WeightSource) -> None:
        self.source = source
        self._first_name = tied_names(model)

    def fill_weights(self, models: Sequence[nn.Module], world: World) -> None:
        """Allocate and fill the parameters of a model, or this rank's stages.

        All ranks raise ModelError if one fails.
        """

        def as_model_error(error: Exception) -> ModelError:
            return error if isinstance(error, ModelError) else ModelError(f"{type(error).__name__}: {error}")

        result_or_first_error(world, lambda: self._fill_models(models, world.device), as_model_error)

    @torch.no_grad()
    def _fill_models(self, models: Sequence[nn.Module], device: torch.device) -> None:
        tensors = defaultdict[str, list[Tensor]](list)
        packed = dict[str, Any]()  # whose tensors are bytes
        for model in models:
            allocate_model(model, device)
            for adapted_name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
                tensors[self._stock_name(adapted_name)].append(tensor)
            packed |= {self._stock_name(name): record for name, record in packed_weights(model).items()}
        parts = {name: LocalPart.from_parameter(copies[0]) for name, copies in tensors.items()}
        # a rank may hold an empty block of a parameter, which no source need have
        missing = {name for name, part in parts.items() if all(side.stop > side.start for side in part.block)}
        read = parts | {name: record.source_part(parts[name]) for name, record in packed.items()}
        for name, part in self.source.read(read, device):
            if (record := packed.get(name)) is not None:
                part = record.pack_part(part.to(device), parts[name])
            for copy in tensors[name]:
                local_tensor(copy).copy_(part)
            del part  # before the next is read
            missing.discard(name)
        assert not missing, f"{self.source} lacks {', '.join(sorted(missing)[:4])}, and was not checked"

    def _stock_name(self, adapted_name: str) -> str:
        name = name_without_adapter(adapted_name)
        return self._first_name.get(name, name)


def fill_when_prepared(model: nn.Module, source: WeightSource) -> None:
    """Have `prepare` fill this model, whose parameters are on the meta device."""
    model.weights_to_come = DeferredWeights(model, source)  # pyright: ignore[reportArgumentType]


def fill_now(model: nn.Module) -> None:
    """Read or draw the weights of a model that `prepare` would fill, all of them, on the CPU."""
    if (weights := pop_deferred_weights(model)) is not None:
        weights._fill_models([model], torch.device("cpu"))


def defer_to_checkpoint(model: nn.Module) -> None:
    """Have `prepare` read or draw nothing: every weight is NaN until a checkpoint is loaded."""
    if (weights := find_deferred_weights(model)) is not None:
        weights.source = _LeftToCheckpoint()


def find_deferred_weights(model: nn.Module) -> DeferredWeights | None:
    """Return the record of what will fill the model; None if its parameters have values."""
    return vars(model).get("weights_to_come")


def stored_formats(model: nn.Module) -> dict[str, Any]:
    """Return the PackedFormats of weights, by name, if the folder that will fill the model has them in 4 or 8 bits."""
    deferred = find_deferred_weights(model)
    source: Any = None if deferred is None else deferred.source
    while hasattr(source, "base"):
        source = source.base
    return source.packed_formats() if hasattr(source, "packed_formats") else {}


def pop_deferred_weights(model: nn.Module) -> DeferredWeights | None:
    """Take from the model the record of what fills it once it is prepared; None if its parameters have values."""
    return vars(model).pop("weights_to_come", None)
