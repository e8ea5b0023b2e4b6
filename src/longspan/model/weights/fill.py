"""How a model that is on the meta device gets its weights: what `prepare` fills it with, and the filling.

Sources are a folder's files (`folder_weights.py`), drawn weights (`drawn_weights.py`), or nothing, for a checkpoint.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from longspan.comm import World, result_or_first_error
from longspan.errors import ModelError
from longspan.model.adapted_modules import name_without_adapter
from longspan.model.marks import packed_weights
from longspan.model.weights.empty_model import persistent_buffers
from longspan.model.weights.local_tensors import LocalPart, local_tensor
from longspan.model.weights.tied_names import tied_names


class WeightSource(Protocol):
    """Where weights come from: parts of a model's parameters, one after another."""

    def read(self, parts: Mapping[str, LocalPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, values) for each part that the source has, on the device or the CPU."""
        ...


@dataclass(eq=False)
class JoinedWeights:
    """A model's source, and one of what was added to it."""

    base: WeightSource
    added: WeightSource

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
        """Note the names of tied parameters of the whole model, which stages do not know."""
        self.source = source
        self._first_name = tied_names(model)

    def fill_weights(self, models: Sequence[nn.Module], world: World) -> None:
        """Allocate and fill the parameters of a model, or this rank's stages.

        All ranks raise ModelError if one fails.
        """

        def as_model_error(error: Exception) -> ModelError:
            if isinstance(error, ModelError):
                return error
            return ModelError(f"{type(error).__name__}: {error}")

        result_or_first_error(world, lambda: self._fill_models(models, world.device), as_model_error)

    @torch.no_grad()
    def _fill_models(self, models: Sequence[nn.Module], device: torch.device) -> None:
        """A parameter that several stages hold is read once."""
        tensors = defaultdict[str, list[Tensor]](list)
        packed = dict[str, Any]()  # PackedWeights of frozen parameters in 4 or 8 bits, whose tensors are bytes
        for model in models:
            for parameter in model.parameters():
                if parameter.is_meta:  # the same objects get undefined memory
                    memory = nn.Parameter(
                        torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
                    )
                    for name, value in vars(parameter).items():
                        setattr(memory, name, value)
                    swap_tensors(parameter, memory)
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(device)
            for adapted_name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
                tensors[self._stock_name(adapted_name)].append(tensor)
            packed |= {self._stock_name(name): record for name, record in packed_weights(model).items()}
        parts = {name: LocalPart.from_parameter(copies[0]) for name, copies in tensors.items()}
        # a rank may hold an empty block of a parameter, which no source need have
        missing = {name for name, part in parts.items() if all(side.stop > side.start for side in part.block)}
        # a packed weight is read as numbers, or as packed rows, and packed here
        parts_to_read = parts | {name: record.source_part(parts[name]) for name, record in packed.items()}
        for name, values in self.source.read(parts_to_read, device):
            if (record := packed.get(name)) is not None:
                values = record.pack_part(values.to(device), parts[name])
            for copy in tensors[name]:
                local_tensor(copy).copy_(values)
            # The values are freed before the next are read.
            del values
            missing.discard(name)
        assert not missing, f"the source of weights lacks {', '.join(sorted(missing)[:4])}, and was not checked"

    def _stock_name(self, adapted_name: str) -> str:
        """The source has a parameter without its adapter, and the first of a tied one."""
        name = name_without_adapter(adapted_name)
        return self._first_name.get(name, name)


def fill_when_prepared(model: nn.Module, source: WeightSource) -> None:
    """Have `prepare` fill this model, whose parameters are on the meta device."""
    model.weights_to_come = DeferredWeights(model, source)  # pyright: ignore[reportArgumentType]


def fill_now(model: nn.Module) -> None:
    """Read or draw on the CPU all weights of a model that `prepare` would fill, and forget the source."""
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
    """Return the PackedFormats of weights, by name, if the folder that will fill the model has them in 4 or 8 bits;
    else {}.
    """
    source = _base_source(model)
    return source.packed_formats() if hasattr(source, "packed_formats") else {}


def find_folder(model: nn.Module) -> str:
    """Find the folder that will fill the model once it is prepared; "" where none will."""
    return str(getattr(_base_source(model), "folder", ""))


def _base_source(model: nn.Module) -> Any:
    """None: the model has its weights. What was added to a folder's is not of it."""
    deferred = find_deferred_weights(model)
    source: Any = None if deferred is None else deferred.source
    while isinstance(source, JoinedWeights):
        source = source.base
    return source


def pop_deferred_weights(model: nn.Module) -> DeferredWeights | None:
    """Take from the model the record of what fills it once it is prepared; None if its parameters have values."""
    return vars(model).pop("weights_to_come", None)
