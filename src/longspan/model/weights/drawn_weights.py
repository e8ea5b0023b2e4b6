"""Random weights that are the same under every layout: each unit is drawn whole, from a seed of its own."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from inspect import signature

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.layers import decoder_layers, towers_beside_text_model
from longspan.model.weights.empty_model import persistent_buffers
from longspan.model.weights.local_tensors import LocalPart

# A unit is drawn whole: its name, a module of its names and shapes, and the function that initialises it.
Unit = tuple[str, nn.Module, Callable[[nn.Module], None]]


class DrawnWeights:
    """Weights that are a function of names, shapes, the seed and the device's kind: the same under every layout.

    Each unit is drawn whole in float32, from a seed of `seed` and its name; `values` are given, as those of buffers.
    """

    def __init__(self, values: Mapping[str, Tensor], units: Iterable[Unit] = (), seed: int = 0) -> None:
        self._values = values
        self._units = [*units]
        self._seed = seed

    def read(self, parts: Mapping[str, LocalPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, values) of those of these parts that are given or drawn here."""
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
        """Keep a copy of the model, from which units are drawn when they are read."""
        model = deepcopy(model)
        super().__init__(dict(persistent_buffers(model)), _units_to_draw(model), seed)


def _units_to_draw(model: PreTrainedModel) -> Iterator[Unit]:
    """A layer's modules may scale each other's weights, and a tower has an initialisation of its own. The remaining
    modules are copied without their children."""
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
    # fork_rng forks the CPU's generator always, and those of `devices`, of the type `device_type`, beside it.
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        # 2**32 over the golden ratio spreads small seeds over all bits
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
    """`draw_copy` fills parameters with NaN before it initialises."""
    parameters = dict(module.named_parameters(recurse=recurse))
    flags = torch.stack([p.isnan().any() for p in parameters.values()]).tolist() if parameters else []
    return [name for name, is_unset in zip(parameters, flags, strict=True) if is_unset]


def _fill_class_defaults(module: nn.Module) -> None:
    """Apertus' activations are such. A class that takes a dtype gets float32."""
    unset = _unset_parameters(module, recurse=False)
    if not unset:
        return
    arguments = signature(type(module)).parameters.values()
    if any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in arguments):
        return
    takes_dtype = any(p.name == "dtype" for p in arguments)
    new_module = type(module)(dtype=torch.float32) if takes_dtype else type(module)()
    for name in unset:
        module.get_parameter(name).copy_(new_module.get_parameter(name))
