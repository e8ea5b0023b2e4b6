"""Fill a prepared model whose parameters were on the meta device: this rank's part of each, and no more."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from longspan.comm import World, result_or_first_error
from longspan.errors import ModelError
from longspan.model.adapters import plain_name
from longspan.model.local_tensors import local_tensor
from longspan.model.weights.empty import allocate, stored_buffers
from longspan.model.weights.held import HeldPart


class WeightSource(Protocol):
    """Where weights come from: parts of a model's parameters, one after another."""

    def read(self, wanted: Mapping[str, HeldPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """The wanted part of each parameter and stored buffer that it has, by name; it may work on the device."""
        ...


class _LeftToCheckpoint:
    """In place of weights that a checkpoint overwrites: not a number, which no step takes for a weight."""

    def read(self, wanted: Mapping[str, HeldPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """One number for each."""
        for name, part in wanted.items():
            value = math.nan if part.dtype.is_floating_point else 0
            yield name, torch.full((), value, dtype=part.dtype, device=device)


class WeightsToCome:
    """What fills a model once it is prepared, and which of its parameter's names mean one parameter."""

    def __init__(self, model: nn.Module, source: WeightSource) -> None:
        self.source = source
        names = defaultdict[int, list[str]](list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        self._first_name = {name: same[0] for same in names.values() for name in same}

    def of(self, part: nn.Module) -> "WeightsToCome":
        """The same source for a part of the model, whose parameters have the names that they have in the whole."""
        return WeightsToCome(part, self.source)

    def fill(self, models: Sequence[nn.Module], world: World) -> None:
        """Allocate the parameters of a model, or of its stages that are here, on the world's device, and fill them.

        All ranks call it together; each reads for itself. Raises ModelError on every rank where one cannot be filled.
        """
        result_or_first_error(world, lambda: self._fill(models, world.device), _told)

    @torch.no_grad()
    def _fill(self, models: Sequence[nn.Module], device: torch.device) -> None:
        tensors = defaultdict[str, list[Tensor]](list)
        for model in models:
            allocate(model, device)
            for adapted_name, tensor in (*model.named_parameters(), *stored_buffers(model)):
                name = plain_name(adapted_name)
                tensors[self._first_name.get(name, name)].append(tensor)
        wanted = {name: HeldPart.of(copies[0]) for name, copies in tensors.items()}
        missing = {name for name, part in wanted.items() if all(side.stop > side.start for side in part.block)}
        for name, part in self.source.read(wanted, device):
            for copy in tensors[name]:
                local_tensor(copy).copy_(part)
            del part  # before the next is read
            missing.discard(name)
        if missing:
            raise ModelError(
                f"{self.source} lacks {len(missing)} weights that its config.json asks for, which would be random: "
                f"{', '.join(sorted(missing)[:4])}; complete the folder, or correct config.json"
            )


def _told(error: Exception) -> ModelError:
    return error if isinstance(error, ModelError) else ModelError(f"{type(error).__name__}: {error}")


def fill_when_prepared(model: nn.Module, source: WeightSource) -> None:
    """Have `prepare` fill this model, whose parameters are on the meta device."""
    model.weights_to_come = WeightsToCome(model, source)  # pyright: ignore[reportArgumentType]


def leave_to_checkpoint(model: nn.Module) -> None:
    """Have `prepare` read or draw nothing: every weight is not a number until a checkpoint is loaded."""
    if (weights := vars(model).get("weights_to_come")) is not None:
        weights.source = _LeftToCheckpoint()


def weights_to_come_of(model: nn.Module) -> WeightsToCome | None:
    """What will fill the model; None where its parameters have values."""
    return vars(model).get("weights_to_come")


def take_weights_to_come(model: nn.Module) -> WeightsToCome | None:
    """What fills the model once it is prepared, which is asked for once; None where its parameters have values."""
    return vars(model).pop("weights_to_come", None)
