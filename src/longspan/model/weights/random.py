"""Random weights of a configuration, drawn module after module as transformers initialises them."""

import zlib
from collections.abc import Iterator, Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.model.weights.held import HeldPart


class RandomWeights:
    """Weights that are a function of the configuration, the seed and the device's kind: the same under every home.

    Every module that has parameters is drawn whole, in float32, from a seed of its own: `seed` and its name.
    """

    def __init__(self, model: PreTrainedModel, seed: int, device: torch.device) -> None:
        self._model, self._seed, self._device = deepcopy(model), seed, device

    def __str__(self) -> str:
        return "the drawn model"

    def read(self, wanted: Mapping[str, HeldPart]) -> Iterator[tuple[str, Tensor]]:
        """The wanted part of each parameter, by name."""
        for path, module in self._model.named_modules():
            names = {f"{path}.{name}".lstrip("."): name for name, _ in module.named_parameters(recurse=False)}
            if not names.keys().isdisjoint(wanted):
                drawn = self._draw(path, module)
                for name, key in names.items():
                    if part := wanted.get(name):
                        yield name, drawn.get_parameter(key).detach()[part.block].to(part.dtype)

    def _draw(self, path: str, module: nn.Module) -> nn.Module:
        drawn = deepcopy(module).to_empty(device=self._device, recurse=False).float()
        devices = [] if self._device.type == "cpu" else [self._device]
        with torch.random.fork_rng(devices=devices, device_type=self._device.type if devices else "cuda"):
            torch.manual_seed(self._seed << 32 | zlib.crc32(path.encode()))
            self._model._init_weights(drawn)
        return drawn
