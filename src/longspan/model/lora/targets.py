"""Which linears of a model get an adapter: by the parts that they are in, and by names that peft takes.

An image-text-to-text model has three parts: the language model, the tower that encodes images, and the projector
between them.
"""

import re
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.layers import decoder_layers, is_in_projector, other_towers

LANGUAGE_MODEL, PROJECTOR, TOWER = PARTS = ("language_model", "projector", "tower")


class AdapterTargets(NamedTuple):
    """Arguments of peft's LoraConfig: endings of names, and a pattern of the modules to leave out (None: none)."""

    names: list[str]
    excluded: str | None


def choose_targets(model: PreTrainedModel, requested: Sequence[str], parts: Sequence[str]) -> AdapterTargets:
    """Choose an adapter's targets in these parts: without names every linear of decoder layers, tower or projector.

    Raises ModelError for parts that the model lacks, for a name that no linear in the parts has, and for names that
    peft refuses or takes for experts.
    """
    linears = _part_linears(model, parts)
    if requested:
        names = _check_target_names(model, requested, linears, parts)
    else:
        names = _default_names(model, linears, parts)
    return AdapterTargets(names, _exclusion_pattern(model, names, linears, parts))


def _part_by_module(model: PreTrainedModel) -> dict[str, str]:
    towers = tuple(f"{tower}." for tower in _tower_names(model))
    part_of = dict[str, str]()
    for name, _ in model.named_modules():
        if f"{name}.".startswith(towers):
            part_of[name] = PROJECTOR if is_in_projector(name) else TOWER
        else:
            part_of[name] = LANGUAGE_MODEL
    return part_of


def _tower_names(model: PreTrainedModel) -> list[str]:
    towers = {id(tower) for tower in other_towers(model)}
    return [name for name, module in model.named_modules() if id(module) in towers]


def _part_linears(model: PreTrainedModel, parts: Sequence[str]) -> dict[str, str]:
    """Return the part of each linear in `parts`, by qualified name. Raises ModelError for a part without a linear.

    In towers subclasses of nn.Linear are left out: torch's own attention has one, and never calls it.
    """
    by_part = _part_by_module(model)
    linears = {
        name: by_part[name]
        for name, module in model.named_modules()
        if by_part[name] in parts
        and (type(module) is nn.Linear or (by_part[name] == LANGUAGE_MODEL and isinstance(module, nn.Linear)))
    }
    for part in parts:
        if part not in PARTS:
            raise ModelError(f"lora.parts has {part!r}; use some of {', '.join(PARTS)}")
        if part not in linears.values():
            raise ModelError(f"lora.parts has {part!r}, where {type(model).__name__} has no nn.Linear; leave it out")
    return linears


def _check_target_names(
    model: PreTrainedModel, targets: Sequence[str], linears: dict[str, str], parts: Sequence[str]
) -> list[str]:
    """Return the targets, each once, if each ends some linear's name.

    Raises ModelError for others, for names that peft takes for experts, and for names that peft refuses.
    """
    for target in targets:
        if not _matching_names(target, [*linears]):
            _refuse_other_part(model, target, parts)
            endings = sorted({name.rpartition(".")[2] for name in linears})
            matches = get_close_matches(target.rpartition(".")[2], endings, n=1, cutoff=0.4)
            hint = f"did you mean {matches[0]!r}? It has" if matches else "it has"
            raise ModelError(
                f"lora.targets has {target!r}, which is no linear of {type(model).__name__}; {hint} "
                f"{', '.join(endings)}"
            )
    if experts := _expert_names(model, targets):
        raise ModelError(
            f"lora.targets has {', '.join(experts)}, which peft takes for the experts of a {type(model).__name__}, and "
            "adapters of experts are not supported; leave them out"
        )
    if refused := _peft_refusals(model, targets):
        raise ModelError(
            f"lora.targets has {', '.join(refused)}, which peft refuses in a {type(model).__name__}; leave it out"
        )
    return list(dict.fromkeys(targets))


def _default_names(model: PreTrainedModel, linears: dict[str, str], parts: Sequence[str]) -> list[str]:
    """List the name endings of linears in decoder layers, towers and projectors.

    Names that peft takes for experts, or refuses, are left out with a warning. Raises ModelError if none is left.
    """
    layers = tuple(f"{name}." for name in decoder_layers(model))
    inside = [name for name, part in linears.items() if part != LANGUAGE_MODEL or name.startswith(layers)]
    names = sorted({_name_ending(name) for name in inside})
    if experts := _expert_names(model, names):
        warnings.warn(
            f"the adapter leaves out {', '.join(experts)}, which peft takes for the experts of a "
            f"{type(model).__name__}: dense layers and shared experts have no adapter there",
            stacklevel=3,
        )
    if refused := _peft_refusals(model, names):
        warnings.warn(
            f"the adapter leaves out {', '.join(refused)}, which peft refuses in a {type(model).__name__}", stacklevel=3
        )
    if targets := [name for name in names if name not in (*experts, *refused)]:
        return targets
    place = "its decoder layers" if LANGUAGE_MODEL in parts else " and ".join(parts)
    raise ModelError(f"{type(model).__name__} has no nn.Linear in {place} for an adapter; name lora.targets")


def _name_ending(name: str) -> str:
    last = name.rpartition(".")[2]
    return name if last.isdigit() else last


def _exclusion_pattern(
    model: PreTrainedModel, names: Sequence[str], linears: dict[str, str], parts: Sequence[str]
) -> str | None:
    """Return a pattern of the modules that peft must leave out though a target's name fits; None if there are none.

    peft compares the ends of names, in all parts and whatever the module is. Left out are the modules of other parts
    and, in towers, those that are not among `linears`, the linears of the chosen parts.
    """
    towers = "|".join(map(re.escape, _tower_names(model)))
    if not towers:  # all modules are the language model's
        return None
    if tuple(parts) == (LANGUAGE_MODEL,):  # all towers, whatever is in them
        return f"({towers})(\\..*)?"
    part_of = _part_by_module(model)
    in_towers = [name for name, part in part_of.items() if part != LANGUAGE_MODEL and name not in linears]
    to_leave_out = [name for name in in_towers if any(_matching_names(target, [name]) for target in names)]
    outside_towers = [] if LANGUAGE_MODEL in parts else [f"(?!({towers})\\.).*"]  # all of the language model
    return "|".join([*map(re.escape, to_leave_out), *outside_towers]) or None


def _matching_names(target: str, linears: Sequence[str]) -> list[str]:
    return [name for name in linears if name == target or name.endswith(f".{target}")]


def _refuse_other_part(model: PreTrainedModel, target: str, parts: Sequence[str]) -> None:
    everywhere = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if elsewhere := _matching_names(target, everywhere):
        part = _part_by_module(model)[elsewhere[0]]
        raise ModelError(
            f"lora.targets has {target!r}, which stands in the {part} of {type(model).__name__} alone "
            f"({elsewhere[0]}), and lora.parts is {', '.join(parts)}; leave it out, or add {part!r} to lora.parts"
            + ("" if part == LANGUAGE_MODEL else '; encoder.train = "projector" or "all" trains these weights whole')
        )


def _expert_names(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Return the names, among `names`, that peft replaces by parameters of the model's fused experts.

    In transformers 4 these names were linears of single experts.
    """
    import peft

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a peft that replaces none
        return []
    experts = list[str]()
    for name in names:
        config = peft.LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # peft fuses it with another name, which is missing here
            experts.append(name)
        else:
            experts += [name] if name not in (config.target_modules or ()) else []
    return experts


def _peft_refusals(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Return the names that peft refuses: linears of mixers whose weights kernels read directly, past an adapter."""
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
