"""Which modules a new adapter adapts: the names of `lora.target_modules` checked, or names chosen for the model."""

import re
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.kinds import (
    expert_modules,
    find_indexers,
)
from longspan.model.layers import decoder_layers, towers_beside_text_model


def _linears_outside_towers(model: PreTrainedModel) -> tuple[list[str], str | None]:
    """Return the linears outside towers and indexers, and a pattern of all modules of towers (None: no towers).

    Towers have linears of like names, which peft must not adapt.
    """
    towers = {id(tower) for tower in towers_beside_text_model(model)}
    names = [name for name, module in model.named_modules() if id(module) in towers]
    pattern = f"({'|'.join(map(re.escape, names))})(\\..*)?" if names else None
    untrained = tuple(f"{name}." for name in find_indexers(model))
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    linears = [name for name in linears if not name.startswith(untrained)]
    return [name for name in linears if not (pattern and re.fullmatch(pattern, name))], pattern


def _checked_target_names(
    model: PreTrainedModel, targets: Sequence[str], linears: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the targets, each once and in their order, that name linears, and those that name experts' matrices alone.

    A target names what its name ends with it; `linears` are the model's qualified names. Raises ModelError for a target
    that names nothing, or that peft refuses.
    """
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
        if "." in target and any(name.endswith(f".{target}") for name in matrices):
            of_experts.append(target)
            continue
        endings = sorted({name.rpartition(".")[2] for name in linears})
        endings += sorted({".".join(name.split(".")[-2:]) for name in matrices})
        matches = get_close_matches(target.rpartition(".")[2], endings, n=1, cutoff=0.4)
        hint = f"did you mean {matches[0]!r}? It has" if matches else "it has"
        raise ModelError(
            f"lora.target_modules has {target!r}, which is no linear of {type(model).__name__} outside its towers and "
            f"indexers; {hint} {', '.join(endings)}"
        )
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


def _default_target_names(model: PreTrainedModel, linears: Sequence[str]) -> list[str]:
    """Return the last names of all linears in decoder layers, or whole names where these are numbers.

    Names that peft takes for experts, or refuses, are left out with a warning.
    """
    layers = tuple(f"{name}." for name in decoder_layers(model))
    inside = [name for name in linears if name.startswith(layers)]
    names = sorted({name if (last := name.rpartition(".")[2]).isdigit() else last for name in inside})
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
    """Return those of `names`, in their order, that peft takes for fused experts, or refuses. Each is a target, the
    ending of names of modules, and is tried alone.

    Fused experts were linears of single experts in transformers 4. Refused are linears of mixers whose weights kernels
    read directly, past an adapter.
    """
    import peft
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba  # pyright: ignore[reportPrivateUsage]

    # not in peft 0.18, which takes none for experts
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
            refused += [name] if name not in (config.target_modules or ()) else []
    return refused
