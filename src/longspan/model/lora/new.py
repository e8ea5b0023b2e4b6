"""A new LoRA adapter in a model, drawn from a seed: the same under every home, also over weights that are yet to come.

peft makes the layers and their configuration. Matrices A are uniform and B zero, as peft draws them by default, but
each from a seed of its own, `seed` and its name, so that no rank needs another's numbers.
"""

import math
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.adapters import adapter_in, adapter_parameters
from longspan.model.layers import decoder_layers
from longspan.model.weights.empty import is_empty
from longspan.model.weights.fill import WeightSource
from longspan.model.weights.held import HeldPart


def add_lora(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float = 0.0,
    dropout: float = 0.0,
    targets: Sequence[str] = (),
    seed: int = 0,
    base: str = "",
) -> Any:
    """The model with a new adapter in it, as a PeftModel; `prepare` fills what has no memory yet.

    `alpha` 0 is twice the rank; `targets` are names of linears, none: every linear of the decoder layers. Adapters are
    float32, over a float64 model float64. `base` is where the base model is, for who loads the adapter. Raises
    ModelError where peft is missing, and for a target that no linear of the model has as its name.
    """
    names = _targets(model, targets)
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            f"adapters are made by peft, which cannot be imported ({error}); pip install 'longspan[hf]'"
        ) from error
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha or 2 * rank,  # pyright: ignore[reportArgumentType]
        lora_dropout=dropout,
        target_modules=names,
        task_type="CAUSAL_LM",
    )
    empty = is_empty(model)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of names in transformers that peft reads
        peft_model: Any = peft.get_peft_model(model, config, low_cpu_mem_usage=empty)
    config.base_model_name_or_path = base or None
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    for name, parameter in adapter_parameters(model):
        parameter.data = parameter.data.to(dtype) if empty else drawn(name, parameter.shape, seed).to(dtype)
    if empty:
        draw_when_prepared(model, seed)
    return peft_model


def _targets(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """The targets, each the end of some linear's name; those of the decoder layers where none is given."""
    layers = tuple(f"{name}." for name in decoder_layers(model))
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    inside = sorted({name.rpartition(".")[2] for name in linears if name.startswith(layers)})
    if not targets:
        if not inside:
            raise ModelError(
                f"{type(model).__name__} has no nn.Linear in its decoder layers for an adapter; name lora.targets"
            )
        return inside
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linears):
            known = sorted({name.rpartition(".")[2] for name in linears})
            close = get_close_matches(target.rpartition(".")[2], known, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]!r}? It has" if close else "it has"
            raise ModelError(
                f"lora.targets has {target!r}, which is no linear of {type(model).__name__}; {hint} {', '.join(known)}"
            )
    return list(dict.fromkeys(targets))


def drawn(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """The initial values of a parameter of an adapter, float32, on the CPU: those of A uniform, those of B zero."""
    if ".lora_A." not in name:
        return torch.zeros(tuple(shape))
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # a CPU's reads 32 bits
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


class AdapterOver:
    """The weights of a base model, and an adapter, of these names and shapes, that is drawn."""

    def __init__(self, base: WeightSource, shapes: Mapping[str, Sequence[int]], seed: int) -> None:
        self.base, self._shapes, self._seed = base, dict(shapes), seed

    def __str__(self) -> str:
        return str(self.base)

    def read(self, wanted: Mapping[str, HeldPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """The wanted part of each parameter, by name; the adapter's come first."""
        for name, shape in self._shapes.items():
            if part := wanted.get(name):
                yield name, drawn(name, shape, self._seed)[part.block].to(part.dtype)
        yield from self.base.read(wanted, device)


def draw_when_prepared(model: PreTrainedModel, seed: int) -> None:
    """Have `prepare` draw the adapter's matrices that have no memory, before it fills the base model.

    Raises ModelError for an adapter that does not begin as peft's do by default.
    """
    shapes = {name: tuple(p.shape) for name, p in adapter_parameters(model) if p.is_meta and ".lora_" in name}
    weights = vars(model).get("weights_to_come")
    if weights is None or not shapes or isinstance(weights.source, AdapterOver):
        return
    adapter = adapter_in(model)
    if adapter is not None and (adapter.config.init_lora_weights is not True or adapter.config.use_dora):
        raise ModelError(
            f"the adapter has no memory yet, as its base model has none, and init_lora_weights is "
            f"{adapter.config.init_lora_weights!r}, use_dora {adapter.config.use_dora}: both need weights; load the "
            "model with sharded=False, or leave them out"
        )
    weights.source = AdapterOver(weights.source, shapes, seed)
