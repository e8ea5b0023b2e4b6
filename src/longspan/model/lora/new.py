"""A new LoRA adapter in a model, drawn from a seed: the same under every layout, even before weights are loaded.

peft makes the layers and their configuration. Matrices A are uniform and B zero, as peft draws them by default, but
each from a seed of its own, `seed` and its name, so that no rank needs another's numbers.
"""

import math
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.adapters import adapter_parameters
from longspan.model.lora.targets import LANGUAGE_MODEL, choose_targets
from longspan.model.mtp.depths import take_copied_depths
from longspan.model.weights.fill import WeightSource, is_empty
from longspan.model.weights.local_tensors import LocalPart


@dataclass(frozen=True, kw_only=True)
class NewAdapter:
    """What a new LoRA adapter is to be.

    `alpha` 0 is twice the rank. `targets` are names of linears; without any, every linear of the `parts` (`targets.py`)
    has an adapter, in the language model only those of decoder layers. `whole` are modules that are trained whole and
    have no adapter: depths of multi-token prediction. `base` is the path or name of the base model for the adapter's
    configuration.
    """

    rank: int
    alpha: float = 0.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    parts: tuple[str, ...] = (LANGUAGE_MODEL,)
    whole: tuple[str, ...] = ()
    seed: int = 0
    base: str = ""


def add_lora(model: PreTrainedModel, new: NewAdapter) -> Any:
    """Return the model with a new adapter in it, as a PeftModel; `prepare` fills an adapter on the meta device.

    Adapters are float32, or float64 in a float64 model. Raises ModelError where peft is missing, and for targets and
    parts that the model lacks.
    """
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            f"adapters are made by peft, which cannot be imported ({error}); pip install 'longspan[lora]'"
        ) from error
    targets = choose_targets(model, new.targets, new.parts)
    config = peft.LoraConfig(
        r=new.rank,
        lora_alpha=new.alpha or 2 * new.rank,  # pyright: ignore[reportArgumentType]
        lora_dropout=new.dropout,
        target_modules=targets.names,
        exclude_modules=targets.excluded,
        task_type="CAUSAL_LM",
        modules_to_save=[*new.whole] or None,
    )
    empty = is_empty(model)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of names in transformers that peft reads
        peft_model: Any = peft.get_peft_model(model, config, low_cpu_mem_usage=empty)
    config.base_model_name_or_path = new.base or None
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    take_copied_depths(model)  # depths among `new.whole`: peft has put copies beside them
    for name in new.whole:
        model.get_submodule(name).to(dtype)
    for name, parameter in adapter_parameters(model):
        parameter.data = (
            parameter.data.to(dtype) if empty else initial_values(name, parameter.shape, new.seed).to(dtype)
        )
    if empty:
        _defer_drawing(model, new.seed)
    return peft_model


def initial_values(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Draw an adapter's initial values, float32, on the CPU, as peft does: A uniform in ±1 / √inputs, B zero."""
    if ".lora_A." not in name:
        return torch.zeros(tuple(shape))
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # on CPUs seeds have 32 bits
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


class AdapterOver:
    """A source of weights: a base model's from `base`, and an adapter's, given by name and shape, drawn from a seed."""

    def __init__(self, base: WeightSource, shapes: Mapping[str, Sequence[int]], seed: int) -> None:
        self.base: WeightSource = base
        self._shapes, self._seed = dict(shapes), seed

    def __str__(self) -> str:
        return str(self.base)

    def read(self, parts: Mapping[str, LocalPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, values) of these parts of parameters; the adapter's come first."""
        for name, shape in self._shapes.items():
            if part := parts.get(name):
                yield name, initial_values(name, shape, self._seed)[part.block].to(part.dtype)
        yield from self.base.read(parts, device)


def is_drawn_when_prepared(model: nn.Module) -> bool:
    """Return whether `prepare` draws the adapter in a model: `add_lora` made it on the meta device."""
    weights = vars(model).get("weights_to_come")
    return weights is not None and isinstance(weights.source, AdapterOver)


def _defer_drawing(model: nn.Module, seed: int) -> None:
    if (weights := vars(model).get("weights_to_come")) is not None:
        shapes = {name: tuple(parameter.shape) for name, parameter in adapter_parameters(model)}
        weights.source = AdapterOver(weights.source, shapes, seed)
