"""A new LoRA adapter in a model: what it adapts, and values drawn from a seed, the same under every layout.

peft makes the layers and their configuration. Matrices A are uniform and B zero, as peft draws them by default, but
each from a seed of its own, `seed` and its name, so that no rank needs another's numbers.
"""

import math
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.adapted_modules import is_adapted
from longspan.model.adapters.adapter import adapted_weights, adapter_parameters
from longspan.model.kinds import (
    SCORE_HEADS,
    expert_modules,
    find_choosing_modules,
    is_linear,
    name_without_adapter,
    uncalled_linears,
)
from longspan.model.layers import architecture_name, decoder_layers, towers_beside_text_model
from longspan.model.mtp.depths import unwrap_trained_mtp
from longspan.model.parts import is_tied
from longspan.model.weights.empty_model import has_meta_parameters
from longspan.model.weights.fill import JoinedWeights, find_deferred_weights
from longspan.model.weights.local_tensors import LocalPart
from longspan.plain_text import nearest_name


def adapter_notes(model: PreTrainedModel) -> Iterator[str]:
    """Yield, as lines for people, what may surprise in an adapted model; nothing if there is nothing.

    That is which modules of decoder layers have no adapter, of those with 1 % of their weights or more; and that an
    adapter of a tied head, or embedding, cannot be merged.
    """
    adapted = adapted_weights(model)
    sizes = Counter[str]()
    total = 0
    for path, layer in decoder_layers(model).items():
        for name, parameter in layer.named_parameters():
            if parameter.ndim > 1 and ".lora_" not in name:
                total += parameter.numel()
                owner = [part for part in name_without_adapter(name).split(".")[:-1] if not part.isdecimal()][-1]
                if f"{path}.{name}" not in adapted:
                    sizes[owner] += parameter.numel()
    if large := [name for name, size in sizes.most_common() if size >= total / 100]:
        share = 100 * sum(sizes[name] for name in large) / total
        yield f"lora: {', '.join(large)} ({share:.1f} % of the weights of decoder layers) have no adapter"
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    if is_tied(model) and any(map(is_adapted, ends)):
        yield (
            "caution: lora.target_modules has the head, which shares its weight with the embedding "
            "(tie_word_embeddings): "
            "longspan export --merge will refuse this adapter, which stock peft reads over its base model; leave the "
            "head out of lora.target_modules if it is to be merged"
        )


@dataclass(frozen=True, kw_only=True)
class NewAdapter:
    """What a new LoRA adapter is to be; `alpha` 0 is twice the rank.

    Without `targets`, every linear of the decoder layers has an adapter. `whole` modules are trained whole; `base`
    names the base model in the configuration, and `revision` its commit on the hub.
    """

    rank: int
    alpha: float = 0.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    seed: int = 0
    base: str = ""
    revision: str = ""


def add_lora(model: PreTrainedModel, new: NewAdapter) -> Any:
    """Put a new adapter into a model, and return the PeftModel around it; `prepare` fills one on the meta device.

    Towers have none. Adapters, and modules that are trained whole, become float32, or float64 in a float64 model.
    ModelError without peft, and for wrong targets.
    """
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            f"adapters are made by peft, which cannot be imported ({error}); pip install 'longspan[lora]'"
        ) from error
    linears, left_out = _linears_to_adapt(model)
    if new.targets:
        names, of_experts = _checked_target_names(model, new.targets, linears)
    else:
        names, of_experts = _default_target_names(model, linears), []
    if of_experts and new.dropout:
        raise ModelError(
            f"lora.dropout is {new.dropout:g}, and lora.target_modules has experts ({', '.join(of_experts)}), whose "
            "adapters have none in peft; set it to 0"
        )
    config = peft.LoraConfig(
        r=new.rank,
        lora_alpha=new.alpha or 2 * new.rank,  # pyright: ignore[reportArgumentType]
        lora_dropout=new.dropout,
        target_modules=names,
        target_parameters=of_experts or None,
        exclude_modules=left_out,
        task_type="SEQ_CLS" if architecture_name(model).endswith(SCORE_HEADS) else "CAUSAL_LM",
        modules_to_save=[*new.whole] or None,
    )
    empty = has_meta_parameters(model)
    # peft reads names of transformers that are to go
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        peft_model: Any = peft.get_peft_model(model, config, low_cpu_mem_usage=empty)
    config.base_model_name_or_path = new.base or None
    config.revision = new.revision or None
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    unwrap_trained_mtp(model)  # if depths are in `new.whole`: peft's copy of them takes their place
    for name in new.whole:
        model.get_submodule(name).to(dtype)
    for name, parameter in adapter_parameters(model):
        parameter.data = (
            parameter.data.to(dtype)
            # Parameters of other names belong to modules that are trained whole.
            if empty or ".lora_" not in name
            else draw_adapter_values(name, parameter.shape, new.seed).to(dtype)
        )
    if empty and (weights := find_deferred_weights(model)) is not None:
        shapes = {name: tuple(parameter.shape) for name, parameter in adapter_parameters(model)}
        weights.source = JoinedWeights(weights.source, DrawnAdapter(shapes, new.seed))
    return peft_model


# ---- names of targets


def _linears_to_adapt(model: PreTrainedModel) -> tuple[list[str], str | None]:
    """The pattern (None: none) fits all modules of towers, of indexers, which get no gradient, and linears that nothing
    calls: they may have names like those of others, and peft must not adapt them."""
    towers = {id(tower) for tower in towers_beside_text_model(model)}
    left_out = [name for name, module in model.named_modules() if id(module) in towers]
    left_out += [*find_choosing_modules(model), *uncalled_linears(model)]
    # A pattern for all layers: "model.layers.3.self_attn.indexer" is one of any number.
    patterns = dict.fromkeys(re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(name)) for name in left_out)
    pattern = f"({'|'.join(patterns)})(\\..*)?" if patterns else None
    linears = [name for name, module in model.named_modules() if is_linear(module)]
    return [name for name in linears if not (pattern and re.fullmatch(pattern, name))], pattern


def _checked_target_names(
    model: PreTrainedModel, targets: Sequence[str], linears: Sequence[str]
) -> tuple[list[str], list[str]]:
    """A target names all linears or matrices whose qualified names end with it; the second list has matrices alone."""
    matrices = [
        f"{path}.{name}"
        for path, experts in expert_modules(model).items()
        for name, parameter in experts.named_parameters(recurse=False)
        if parameter.ndim == 3
    ]
    of_experts = list[str]()
    for target in dict.fromkeys(targets):
        if any(f".{name}".endswith(f".{target}") for name in linears):
            continue
        if "." not in target or not any(name.endswith(f".{target}") for name in matrices):
            raise _unknown_target_error(model, target, linears, matrices)
        of_experts.append(target)
    modules = [target for target in dict.fromkeys(targets) if target not in of_experts]
    if refused := _names_peft_cannot_adapt(model, modules):
        instead = "leave them out"
        if matrices:
            instead += (
                f", or name its experts' matrices, {matrices[0].partition('.layers.')[2].partition('.')[2]} say"
            )
        raise ModelError(
            f"lora.target_modules has {', '.join(refused)}, which peft refuses in a {type(model).__name__}, or takes "
            f"for its experts; {instead}"
        )
    return modules, of_experts


def _unknown_target_error(
    model: PreTrainedModel, target: str, linears: Sequence[str], matrices: Sequence[str]
) -> ModelError:
    endings = sorted({name.rpartition(".")[2] for name in linears})
    endings += sorted({".".join(name.split(".")[-2:]) for name in matrices})
    nearest = nearest_name(target.rpartition(".")[2], endings)
    hint = f"did you mean {nearest!r}? It has" if nearest else "it has"
    return ModelError(
        f"lora.target_modules has {target!r}, which is no linear of {type(model).__name__} outside its towers and "
        f"indexers, and which its layers call; {hint} {', '.join(endings)}"
    )


def _default_target_names(model: PreTrainedModel, linears: Sequence[str]) -> list[str]:
    layers = tuple(f"{name}." for name in decoder_layers(model))
    inside = [name for name in linears if name.startswith(layers)]
    names = sorted({name if (last := name.rpartition(".")[2]).isdecimal() else last for name in inside})
    if refused := _names_peft_cannot_adapt(model, names):
        warnings.warn(
            f"the adapter leaves out {', '.join(refused)}, which peft refuses in a {type(model).__name__}, or takes "
            "for its experts: dense layers and shared experts of these names have no adapter there",
            stacklevel=3,
        )
    if targets := [name for name in names if name not in refused]:
        return targets
    raise ModelError(
        f"{type(model).__name__} has no nn.Linear in its decoder layers for an adapter; name lora.target_modules"
    )


def _names_peft_cannot_adapt(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """peft refuses linears of mixers that kernels read past an adapter, and takes old names for experts."""
    import peft
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba  # pyright: ignore[reportPrivateUsage]

    # peft 0.18 has no such module, and takes no name for experts
    name_of_conversion = "peft.utils.transformers_weight_conversion"
    conversion: Any = import_module(name_of_conversion) if find_spec(name_of_conversion) else None
    refused = list[str]()
    for name in names:
        config = peft.LoraConfig(target_modules=[name])
        try:
            _check_lora_target_modules_mamba(peft.LoraConfig(), model, name)
            if conversion is not None:
                conversion.convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # peft fuses it with another name, which is missing here, or refuses it
            refused.append(name)
        else:
            if name not in (config.target_modules or ()):  # taken for experts
                refused.append(name)
    return refused


# ---- values


def draw_adapter_values(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Draw an adapter's initial values, float32, on the CPU, as peft does: A uniform in ±1 / √inputs, B zero."""
    if ".lora_A." not in name:
        return torch.zeros(tuple(shape))
    # On CPUs seeds have 32 bits.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


@dataclass(eq=False)
class DrawnAdapter:
    """A source of the weights of an adapter that `add_lora` made on the meta device: names and shapes, and a seed."""

    _shapes: Mapping[str, Sequence[int]]
    _seed: int

    def read(self, parts: Mapping[str, LocalPart], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        for name, shape in self._shapes.items():
            if part := parts.get(name):
                yield name, draw_adapter_values(name, shape, self._seed)[part.block].to(part.dtype)
