"""Which tensor-parallel style each module of a model gets, by transformers' plan and ours, and what tp must divide.

Experts get no style: tokens are split. What a style does is in `split_modules.py`.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.errors import ModelError
from longspan.model.adapted_modules import unadapted_module
from longspan.model.kinds import find_mixers, is_linear
from longspan.model.layers import MTP, text_model_name
from longspan.model.tensor_parallel.mixer_parts import mixer_parts
from longspan.plan.shape.families import (
    COLWISE,
    EMBEDDING,
    HEADS,
    PACKED,
    PARTIAL_GRADIENT,
    ROWWISE,
    find_family,
)

# An encoder's linear of this style makes queries, keys and values.
QKV = "qkv"
GATHERED = ("colwise_gather_output", "colwise_rep")
# The input of a linear of this style is whole on every rank.
SPLIT_INPUT = "rowwise_split_input"
MIXER = "mixer"  # ours: a state-space layer, whose heads or channels are split

_HEAD = {"lm_head": GATHERED[0]}


def tensor_parallel_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the style of every module and parameter that has one, by its name in the model, with `*` for layers.

    Of styles for one name, the class's counts before the configuration's, and that before longspan's row of the family.
    Depths of multi-token prediction are split as layers. ModelError without a plan.
    """
    config = model.config.get_text_config()
    stock_plan = getattr(config, "base_model_tp_plan", None)
    family_plan = find_family(config.model_type).tensor_parallel
    if not stock_plan and family_plan is None:
        raise ModelError(
            f"{type(model).__name__} has no tensor-parallel plan (base_model_tp_plan of its configuration); use tp 1"
        )
    base = {**(family_plan or {}), **(stock_plan or {})}
    prefix = text_model_name(model)
    inside_layers = {
        name_in_layer: style for name, style in base.items() if (name_in_layer := name.partition(".*.")[2])
    }
    # Of two styles of a name the later one counts.
    return (
        {f"{prefix}.{name}": style for name, style in base.items()}
        | {f"{MTP}.layers.*.mtp_block.{name_in_layer}": style for name_in_layer, style in inside_layers.items()}
        # a block of several layers numbers them
        | {f"{MTP}.layers.*.mtp_block.*.{name_in_layer}": style for name_in_layer, style in inside_layers.items()}
        | ({} if family_plan is None else _HEAD)  # a family that transformers does not cover may not name its head
        | dict(getattr(type(model), "_tp_plan", None) or {})
    )


KNOWN = (COLWISE, ROWWISE, PACKED, *GATHERED, SPLIT_INPUT, PARTIAL_GRADIENT, EMBEDDING, HEADS, MIXER)
_LAYER_NUMBER = re.compile(r"\.\d+\.")
_WITHOUT_EFFECT = ("replicate", "local_params")  # the latter: of a module whose own parameters have a style


class StyledModule(NamedTuple):
    """A module, or with `parameter` one parameter that it owns, with its style; `name` is qualified (dots)."""

    name: str
    module: nn.Module
    style: str
    parameter: str | None = None


def list_styles(model: PreTrainedModel) -> list[StyledModule]:
    """List every module and parameter that the plan names, and mixers, in order; ModelError for an unknown style."""
    plan = {
        re.compile(re.escape(k).replace(r"\*", r"\d+")): style for k, style in tensor_parallel_plan(model).items()
    }
    styled_modules = list(_find_styled_modules(model, plan))
    if unknown := sorted({f"{p.style!r} of {p.name}" for p in styled_modules if p.style not in KNOWN}):
        raise ModelError(
            f"{type(model).__name__}: tensor-parallel style {unknown[0]} is not supported "
            f"({', '.join(KNOWN)} are); use tp 1"
        )
    return styled_modules


def split_block_names(styled_modules: Sequence[StyledModule]) -> set[str]:
    """Return the names of the blocks that are split inside: mixers, and modules that own a column-wise linear.

    Of nested blocks the outermost counts: an adapted linear inside attention has column-wise linears too.
    """
    blocks = {name.rpartition(".")[0] for name, _, style, _ in styled_modules if style in (COLWISE, PACKED)}
    blocks |= {name for name, _, style, _ in styled_modules if style == MIXER}
    return {name for name in blocks if not any(name[: dot.start()] in blocks for dot in re.finditer(r"\.", name))}


def modules_named_experts(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a decoder layer that are named "experts", by name, whatever interface they have."""
    return {name: module for name, module in layer.named_modules() if name.rpartition(".")[2] == "experts"}


def _find_styled_modules(model: PreTrainedModel, plan: Mapping[re.Pattern[str], str]) -> Iterator[StyledModule]:
    mixers = find_mixers(model)
    mixer_prefixes = tuple(f"{name}." for name in mixers)
    for name, module in model.named_modules():
        if ".experts." in f".{name}." or name.startswith(mixer_prefixes):
            continue
        if name in mixers:
            yield StyledModule(name, module, MIXER)
            continue
        if (style := _find_style(plan, name)) is not None:
            yield StyledModule(name, module, style)
        for parameter, _ in module.named_parameters(recurse=False):
            if (style := _find_style(plan, f"{name}.{parameter}")) is not None:
                # transformers calls a vector of one number a head, such as sinks, column-wise
                is_vector = style == COLWISE and getattr(module, parameter).ndim == 1
                yield StyledModule(f"{name}.{parameter}", module, HEADS if is_vector else style, parameter)


def _find_style(plan: Mapping[re.Pattern[str], str], name: str) -> str | None:
    style = next((style for pattern, style in plan.items() if pattern.fullmatch(name)), None)
    return None if style in _WITHOUT_EFFECT else style


def check_divided_sizes(sizes: Mapping[str, int], tp: int, model: str) -> None:
    """Raise ModelError, with the values of tp that would fit, where tp does not divide these sizes of a model."""
    undivided = [f"{size} ({name})" for name, size in sizes.items() if size % tp]
    if undivided:
        common = math.gcd(*sizes.values())
        *smaller, last = (str(d) for d in range(1, common + 1) if common % d == 0)
        fitting = f"{', '.join(smaller)} or {last}" if smaller else last
        raise ModelError(f"tp {tp} does not divide {' and '.join(undivided[:4])} of {model}; use tp {fitting}")


def sizes_divided_by_tp(model: PreTrainedModel, styled_modules: list[StyledModule]) -> dict[str, int]:
    """Return the sizes that tp must divide, by what they are; all layers share one entry, as their sizes are alike.

    Of a linear it is the width that is split: outputs if its style is column-wise, half of them if packed, else inputs.
    Linears of attention divide where heads do, unless their inputs are whole (SPLIT_INPUT). ModelError for styles that
    cannot be followed: a module's style on a parameter, and a linear's on a module that is none.
    """
    sizes = dict(_head_counts(model.config.get_text_config()))
    for name, module, style, parameter in styled_modules:
        name_for_layers = _LAYER_NUMBER.sub(".*.", name)
        if style == MIXER:
            heads = mixer_parts(name, module, tp=1).heads
            sizes |= {f"{count} of {name_for_layers}": size for count, size in heads.items()}
        elif parameter is not None and style == HEADS:
            sizes["numbers of " + name_for_layers] = getattr(module, parameter).numel()
        elif parameter is not None and style != PARTIAL_GRADIENT:
            shape = tuple(getattr(module, parameter).shape)
            raise ModelError(f"{name} {shape} has style {style!r}, which is for modules; use tp 1")
        elif parameter is None and style in (COLWISE, ROWWISE, PACKED, SPLIT_INPUT):
            linear = unadapted_module(module)
            if not is_linear(linear):
                raise ModelError(
                    f"{name} ({type(module).__name__}) has style {style!r}, which is for nn.Linear; use tp 1"
                )
            width = {COLWISE: linear.out_features, PACKED: linear.out_features // 2}.get(style, linear.in_features)
            if ".self_attn." not in name or style == SPLIT_INPUT:
                sizes["width of " + name_for_layers] = width
    return sizes


def _head_counts(config: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """Without a number of key/value heads, each query head has its own."""
    values: dict[str, Any] = config.to_dict()
    layers: dict[Any, Mapping[str, Any]] = values.pop("per_layer_config", None) or {}
    names = [config.attribute_map.get(name, name) for name in ("num_attention_heads", "num_key_value_heads")]
    for layer, layer_values in {"": {}, **layers}.items():  # "" is the model
        queries, keys = (layer_values.get(name, values.get(name)) for name in names)
        layer_text = f" of layer {layer}" if layer_values else ""
        yield f"query heads{layer_text}", int(queries or 0)
        yield f"key/value heads{layer_text}", int(keys or queries or 0)


def refuse_unnamed_parameters(model: nn.Module, styled_modules: Sequence[StyledModule]) -> None:
    """Raise ModelError for a parameter of a split block that the plan does not name: its gradient may be partial."""
    named_ids = set[int]()
    for entry in styled_modules:
        parameters = (
            entry.module.parameters() if entry.parameter is None else [getattr(entry.module, entry.parameter)]
        )
        named_ids.update(map(id, parameters))
    for block in sorted(split_block_names(styled_modules)):
        for name, parameter in model.get_submodule(block).named_parameters(prefix=block):
            if id(parameter) not in named_ids:
                owner = model.get_submodule(name.rpartition(".")[0])
                raise ModelError(
                    f"{name} ({type(owner).__name__}) is not in the tensor-parallel plan of {type(model).__name__}, "
                    "but in a block whose features are split, so that its gradient may be partial: use tp 1"
                )
