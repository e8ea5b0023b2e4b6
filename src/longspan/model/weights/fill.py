"""Fill a prepared model whose parameters were on the meta device: this rank's part of each, and no more."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from longspan.comm import World
from longspan.errors import ModelError
from longspan.model.weights.empty import allocate, local_tensor
from longspan.model.weights.held import HeldPart


class WeightSource(Protocol):
    """Where weights come from: parts of a model's parameters, one after another."""

    def read(self, wanted: Mapping[str, HeldPart]) -> Iterator[tuple[str, Tensor]]:
        """The wanted part of each parameter that it has, by name."""
        ...


class WeightsToCome:
    """What fills a model once it is prepared, and which of its parameter's names mean one parameter."""

    def __init__(self, model: nn.Module, source: WeightSource) -> None:
        self.source = source
        names = defaultdict[int, list[str]](list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        self._first_name = {name: same[0] for same in names.values() for name in same}

    @torch.no_grad()
    def fill(self, models: Sequence[nn.Module], world: World) -> None:
        """Allocate the parameters of a model, or of its stages that are here, on the world's device, and fill them.

        No rank waits for another. Raises ModelError for parameters that the source does not have.
        """
        parameters = defaultdict[str, list[Tensor]](list)
        for model in models:
            allocate(model, world.device)
            for name, parameter in model.named_parameters():
                parameters[self._first_name.get(name, name)].append(parameter)
        wanted = {name: HeldPart.of(copies[0]) for name, copies in parameters.items()}
        missing = {name for name, part in wanted.items() if all(side.stop > side.start for side in part.block)}
        for name, tensor in self.source.read(wanted):
            for parameter in parameters[name]:
                local_tensor(parameter).copy_(tensor)
            missing.discard(name)
        if missing:
            raise ModelError(
                f"{self.source} lacks {len(missing)} weights that its config.json asks for, which would be random: "
                f"{', '.join(sorted(missing)[:4])}; complete the folder, or correct config.json"
            )


def fill_when_prepared(model: nn.Module, source: WeightSource) -> None:
    """Have `prepare` fill this model, whose parameters are on the meta device."""
    model.weights_to_come = WeightsToCome(model, source)  # pyright: ignore[reportArgumentType]


def weights_to_come(model: nn.Module) -> WeightsToCome | None:
    """What fills the model once it is prepared; None where its parameters have values."""
    return getattr(model, "weights_to_come", None)
