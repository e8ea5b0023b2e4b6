"""A new LoRA adapter in a model, drawn from a seed: the same under every home, also over weights that are yet to come.

peft makes the layers and their configuration. Matrices A are uniform and B zero, as peft draws them by default, but
each from a seed of its own, `seed` and its name, so that no rank needs another's numbers.
"""

import math
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.adapters import adapter_parameters
from longspan.model.layers import decoder_layers, other_towers
from longspan.model.mtp.trained_whole import take_copied_depths
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
    whole: Sequence[str] = (),
) -> Any:
    """The model with a new adapter in it, as a PeftModel; `prepare` fills what has no memory yet.

    `alpha` 0 is twice the rank; `targets` are names of linears, none: every linear of the decoder layers. Towers of
    other modalities and their projectors get none. Adapters are float32, over a float64 model float64. `base` is where
    the base model is, for who loads the adapter; `whole` are modules that are trained whole and have no adapter: depths
    of multi-token prediction. Raises ModelError where peft is missing, and for a target that no linear of the model has
    as its name.
    """
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            f"adapters are made by peft, which cannot be imported ({error}); pip install 'longspan[hf]'"
        ) from error
    names = _targets(model, targets) if targets else _default_targets(model)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha or 2 * rank,  # pyright: ignore[reportArgumentType]
        lora_dropout=dropout,
        target_modules=names,
        exclude_modules=_of_towers(model),
        task_type="CAUSAL_LM",
        modules_to_save=[*whole] or None,
    )
    empty = is_empty(model)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of names in transformers that peft reads
        peft_model: Any = peft.get_peft_model(model, config, low_cpu_mem_usage=empty)
    config.base_model_name_or_path = base or None
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    take_copied_depths(model)
    for name in whole:
        model.get_submodule(name).to(dtype)
    for name, parameter in adapter_parameters(model):
        parameter.data = parameter.data.to(dtype) if empty else drawn(name, parameter.shape, seed).to(dtype)
    if empty:
        _draw_when_prepared(model, seed)
    return peft_model


def _targets(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """The targets, each the end of some linear's name. Raises ModelError for others, and for names of experts."""
    linears = _linears(model)
    for target in targets:
        if not _named(target, linears):
            _refuse_of_tower(model, target)
            known = sorted({name.rpartition(".")[2] for name in linears})
            close = get_close_matches(target.rpartition(".")[2], known, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]!r}? It has" if close else "it has"
            raise ModelError(
                f"lora.targets has {target!r}, which is no linear of {type(model).__name__}; {hint} {', '.join(known)}"
            )
    if experts := _taken_for_experts(model, targets):
        raise ModelError(
            f"lora.targets has {', '.join(experts)}, which peft takes for the experts of a {type(model).__name__}, and "
            "adapters of experts are not supported; leave them out"
        )
    if refused := _refused_by_peft(model, targets):
        raise ModelError(
            f"lora.targets has {', '.join(refused)}, which peft refuses in a {type(model).__name__}; leave it out"
        )
    return list(dict.fromkeys(targets))


def _default_targets(model: PreTrainedModel) -> list[str]:
    """The names of the linears in the decoder layers, but for those that peft takes for experts."""
    layers = tuple(f"{name}." for name in decoder_layers(model))
    names = sorted({name.rpartition(".")[2] for name in _linears(model) if name.startswith(layers)})
    if experts := _taken_for_experts(model, names):
        warnings.warn(
            f"the adapter leaves out {', '.join(experts)}, which peft takes for the experts of a "
            f"{type(model).__name__}: dense layers and shared experts have no adapter there",
            stacklevel=3,
        )
    if refused := _refused_by_peft(model, names):
        warnings.warn(
            f"the adapter leaves out {', '.join(refused)}, which peft refuses in a {type(model).__name__}", stacklevel=3
        )
    if targets := [name for name in names if name not in (*experts, *refused)]:
        return targets
    raise ModelError(f"{type(model).__name__} has no nn.Linear in its decoder layers for an adapter; name lora.targets")


def _linears(model: PreTrainedModel) -> list[str]:
    """The names of the linears outside of towers and projectors."""
    towers = re.compile(_of_towers(model) or "$^")
    return [name for name in _all_linears(model) if not towers.fullmatch(name)]


def _all_linears(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def _of_towers(model: PreTrainedModel) -> str | None:
    """A pattern of the names of modules in towers of other modalities and projectors; None where there are none."""
    towers = other_towers(model)
    names = [name for name, module in model.named_modules() if any(module is tower for tower in towers)]
    return f"({'|'.join(map(re.escape, names))})(\\..*)?" if names else None


def _named(target: str, linears: Sequence[str]) -> list[str]:
    return [name for name in linears if name == target or name.endswith(f".{target}")]


def _refuse_of_tower(model: PreTrainedModel, target: str) -> None:
    if of_tower := _named(target, _all_linears(model)):
        raise ModelError(
            f"lora.targets has {target!r}, which stands in the tower or projector of {type(model).__name__} alone "
            f"({of_tower[0]}): adapters are trained in the language model, towers and projectors whole or not at all; "
            'leave it out, and set encoder.train = "projector" or "all" to train these'
        )


def _taken_for_experts(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Of names of linears those that peft replaces by parameters of the model's fused experts, as of transformers 4."""
    import peft

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a peft that replaces none
        return []
    taken = list[str]()
    for name in names:
        config = peft.LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # one of several that it joins
            taken.append(name)
        else:
            taken += [name] if name not in (config.target_modules or ()) else []
    return taken


def _refused_by_peft(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Of names of linears those of mixers that some kernels read around an adapter, in families that peft lists."""
    import peft

    try:
        from peft.tuners.tuners_utils import (
            _check_lora_target_modules_mamba as check,  # pyright: ignore[reportPrivateUsage]
        )
    except ImportError:  # a peft that refuses none
        return []
    refused = list[str]()
    for name in names:
        try:
            check(peft.LoraConfig(), model, name)
        except ValueError:
            refused.append(name)
    return refused


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


def is_drawn_when_prepared(model: nn.Module) -> bool:
    """Whether `prepare` draws the adapter in a model: `add_lora` made it, over weights that are yet to come."""
    weights = vars(model).get("weights_to_come")
    return weights is not None and isinstance(weights.source, AdapterOver)


def _draw_when_prepared(model: nn.Module, seed: int) -> None:
    """Have `prepare` draw a new adapter, before it fills the base model."""
    if (weights := vars(model).get("weights_to_come")) is not None:
        shapes = {name: tuple(parameter.shape) for name, parameter in adapter_parameters(model)}
        weights.source = AdapterOver(weights.source, shapes, seed)
