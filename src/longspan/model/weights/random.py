"""Random weights of a configuration, drawn a decoder layer at a time as transformers initialises them."""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from inspect import signature

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.layers import decoder_layers, other_towers
from longspan.model.weights.fill import persistent_buffers
from longspan.model.weights.local_tensors import LocalPart


class RandomWeights:
    """Weights that are a function of the configuration, the seed and the device's kind: the same under every layout.

    Each decoder layer, and each other module with parameters, is drawn whole on the device, in float32, from a seed
    made of `seed` and the module's name.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        """Copy the model, on the meta device, as it is: later it may be cut into stages and sharded."""
        self._model, self._seed = deepcopy(model), seed

    def __str__(self) -> str:
        return "the drawn model"

    def read(self, parts: Mapping[str, LocalPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, values) of these parts of parameters; buffers have the values that their modules begin with."""
        yield from ((name, buffer) for name, buffer in persistent_buffers(self._model) if name in parts)
        for path, module, initialise in self._draw_units():
            names = {f"{path}.{name}".lstrip("."): name for name, _ in module.named_parameters()}
            if not names.keys().isdisjoint(parts):
                drawn = draw_copy(path, module, device, seed=self._seed, initialise=initialise)
                for name, inside in names.items():
                    if part := parts.get(name):
                        yield name, drawn.get_parameter(inside).detach()[part.block].to(part.dtype)

    def _draw_units(self) -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], None]]]:
        """Yield (path, module, function that draws its weights) of all that is drawn with one seed.

        That is each decoder layer as a whole, since its modules may scale each other's weights; each other tower of a
        multimodal model, which has an initialisation of its own; and each remaining module, without its children.
        """
        layers = decoder_layers(self._model)
        towers = {module for module in other_towers(self._model) if isinstance(module, PreTrainedModel)}
        draw = self._model._init_weights
        yield from ((path, layer, draw) for path, layer in layers.items())
        yield from ((n, module, module._init_weights) for n, module in self._model.named_modules() if module in towers)
        inside = {module for unit in (*layers.values(), *towers) for module in unit.modules()}
        for path, module in self._model.named_modules():
            if module not in inside and any(True for _ in module.parameters(recurse=False)):
                bare = deepcopy(module)
                bare._modules.clear()
                yield path, bare, draw


@torch.no_grad()
def draw_copy(
    path: str, module: nn.Module, device: torch.device, *, seed: int, initialise: Callable[[nn.Module], None]
) -> nn.Module:
    """Draw a copy of a module with random weights in float32, a function of `seed` and its name; buffers begin at 0.

    Raises ModelError for parameters that `initialise`, a model's own function, leaves as they were in memory.
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
    if _list_unset(drawn):  # parameters that the model's function leaves to their module's constructor
        for inner in drawn.modules():
            _fill_class_defaults(inner)
        if unset := _list_unset(drawn):
            raise ModelError(
                f"{path}: {', '.join(unset[:4])} ({type(module).__name__}) get no random values by the model's own "
                "_init_weights; read weights from a folder"
            )
    return drawn


def _list_unset(module: nn.Module, *, recurse: bool = True) -> list[str]:
    parameters = dict(module.named_parameters(recurse=recurse))
    flags = torch.stack([p.isnan().any() for p in parameters.values()]).tolist() if parameters else []
    return [name for name, is_unset in zip(parameters, flags, strict=True) if is_unset]


def _fill_class_defaults(module: nn.Module) -> None:
    """Fill a module's own parameters that were not drawn with the values of a new module of its class.

    Only if the class can be made without arguments, as Apertus' activations, whose parameters begin at constants.
    """
    unset = _list_unset(module, recurse=False)
    arguments = signature(type(module)).parameters.values() if unset else ()
    if not unset or any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in arguments):
        return
    new_module = type(module)(**({"dtype": torch.float32} if any(p.name == "dtype" for p in arguments) else {}))
    for name in unset:
        module.get_parameter(name).copy_(new_module.get_parameter(name))
