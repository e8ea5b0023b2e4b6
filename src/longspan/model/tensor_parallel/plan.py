"""Which tensor-parallel style each module of a model gets, by transformers' plan and ours; how mixers' rows divide.

Experts get no style: tokens are split. A rank has consecutive heads of a mixer: runs of rows, as of [gate | x | B | C |
dt]. Each group of a rank serves equally many heads: it is repeated where they do not divide so (0, 0, 1).
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.errors import ModelError
from longspan.model.adapted_modules import base_module
from longspan.model.kinds import find_mixers
from longspan.model.layers import MTP, text_model_name
from longspan.plan.shape.families import (
    COLWISE,
    EMBEDDING,
    HEADS,
    PACKED,
    PARTIAL_GRADIENT,
    ROWWISE,
    find_family,
)


@dataclass(frozen=True)
class EvenRows:
    """Rows that are divided into equal slices, one a rank."""

    size: int

    def runs(self, tp: int, rank: int) -> tuple[range, ...]:
        """Return this rank's rows, a single run."""
        part = self.size // tp
        return (range(rank * part, (rank + 1) * part),)


@dataclass(frozen=True)
class GroupRows:
    """Rows of groups of heads, `width` for each group: a rank has the rows of its heads' groups, in their order."""

    groups: int
    width: int
    heads: int

    @property
    def size(self) -> int:
        """All rows."""
        return self.groups * self.width

    def heads_together(self, tp: int) -> int:
        """Return the largest n for which every n neighbouring heads of a rank, from its first on, share a group."""
        return math.gcd(self.heads // tp, self.heads // self.groups)

    def runs(self, tp: int, rank: int) -> tuple[range, ...]:
        """Return this rank's rows: its group's `width` rows for every `heads_together` neighbouring heads."""
        first = rank * (self.heads // tp)
        together = self.heads_together(tp)
        heads = range(first, first + self.heads // tp, together)
        groups = [head // (self.heads // self.groups) for head in heads]
        return tuple(range(group * self.width, (group + 1) * self.width) for group in groups)


@dataclass(frozen=True)
class FusedRows:
    """Rows of several things, one after another in one dim of a parameter."""

    parts: tuple[EvenRows | GroupRows, ...]

    @property
    def size(self) -> int:
        """All rows."""
        return sum(part.size for part in self.parts)

    def runs(self, tp: int, rank: int) -> tuple[range, ...]:
        """Return this rank's rows, part after part, counted from the first row of the first part."""
        runs = list[range]()
        start = 0
        for rows_part in self.parts:
            runs += [range(start + run.start, start + run.stop) for run in rows_part.runs(tp, rank)]
            start += rows_part.size
        return tuple(runs)

    def cut_pieces(self, tp: int, rank: int) -> tuple[list[int], list[int]]:
        """Cut all rows wherever a run of this rank begins or ends.

        Return the pieces' sizes and the rank's indices, in order.
        """
        runs = self.runs(tp, rank)
        cuts = sorted({0, self.size, *(run.start for run in runs), *(run.stop for run in runs)})
        order = [i for run in runs for i in range(cuts.index(run.start), cuts.index(run.stop))]
        return [end - start for start, end in itertools.pairwise(cuts)], order


@dataclass(frozen=True)
class MixerParts:
    """How a mixer divides over tensor-parallel ranks: tp must divide `heads`, and `rows` are by child or tensor.

    `whole` names what every rank applies undivided, `output` the projection back; `attributes` are numbers on a rank.
    """

    heads: Mapping[str, int]
    rows: Mapping[str, EvenRows | FusedRows]
    attributes: Mapping[str, int]
    output: str = "out_proj"
    whole: tuple[str, ...] = ()


def mixer_parts(name: str, mixer: nn.Module, tp: int) -> MixerParts:
    """Return the parts of a mixer, recognised by its attributes.

    ModelError for others, and for parameters not covered.
    """
    kind = next((kind for attributes, kind in _KINDS if all(hasattr(mixer, a) for a in attributes)), None)
    if kind is None:
        raise ModelError(
            f"{name} ({type(mixer).__name__}) is none of the mixers whose heads are split over tensor-parallel ranks "
            "(gated delta nets, Kimi's delta attention, Mamba 2, short convolutions); use tp 1"
        )
    parts = kind(mixer, tp)
    part_names = (*parts.rows, *parts.whole, parts.output)
    for parameter, tensor in mixer.named_parameters():
        part = next((p for p in part_names if parameter == p or parameter.startswith(f"{p}.")), None)
        rows = parts.rows.get(part or "")
        # an adapter's first matrix stays whole, whatever its number of rows
        if part is None or (
            rows is not None and rows.size not in tensor.shape and not is_first_adapter_matrix(parameter)
        ):
            raise ModelError(
                f"{name}.{parameter} {tuple(tensor.shape)} of {type(mixer).__name__} is not known, so that it is not "
                "known how it divides over tensor-parallel ranks; use tp 1"
            )
    return parts


def _delta_net_parts(mixer: Any, tp: int) -> MixerParts:
    """Qwen3-Next fuses projections by key head: a rank's rows are one run.

    Qwen3.5 fuses queries, keys and values one after another, and OLMo Hybrid has a linear for each.
    """
    keys = EvenRows(mixer.key_dim)
    values = EvenRows(mixer.value_dim)
    heads = EvenRows(mixer.num_v_heads)
    queries_keys_values = FusedRows((keys, keys, values))
    rows = {
        "in_proj_qkvz": EvenRows(2 * keys.size + 2 * values.size),
        "in_proj_ba": EvenRows(2 * heads.size),
        "in_proj_qkv": queries_keys_values,
        "conv1d": queries_keys_values,
        **dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), values),
        **dict.fromkeys(("q_proj", "k_proj"), keys),
        **dict.fromkeys(("in_proj_a", "in_proj_b", "a_proj", "b_proj", "A_log", "dt_bias"), heads),
    }
    numbers = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
    return MixerParts(
        heads={"key heads": mixer.num_k_heads, "value heads": mixer.num_v_heads},
        rows=rows,
        attributes={number: getattr(mixer, number) // tp for number in numbers},
        output="out_proj" if hasattr(mixer, "out_proj") else "o_proj",
        whole=("norm", "o_norm"),
    )


def _kimi_parts(mixer: Any, tp: int) -> MixerParts:
    width = EvenRows(mixer.qkv_dim)
    heads = EvenRows(mixer.num_heads)
    of_width = ("q_proj", "k_proj", "v_proj", "g_proj", "g_b_proj")  # a row for each feature of each head
    of_width += ("forget_gate.f_proj", "forget_gate.f_b_proj", "forget_gate.dt_bias")
    rows = {
        **dict.fromkeys(of_width, width),
        **dict.fromkeys(("b_proj", "forget_gate.A_log"), heads),
        "conv1d": FusedRows((width,) * 3),
    }
    attributes = {number: getattr(mixer, number) // tp for number in ("num_heads", "qkv_dim", "conv_dim")}
    attributes |= {f"forget_gate.{number}": attributes[number] for number in ("num_heads", "qkv_dim")}
    whole = ("g_a_proj", "forget_gate.f_a_proj", "o_norm")
    return MixerParts({"heads": heads.size}, rows, attributes, output="o_proj", whole=whole)


def _mamba2_parts(mixer: Any, tp: int) -> MixerParts:
    """Projects to [gate / x / B / C / dt] and convolves [x / B / C]."""
    inner = EvenRows(mixer.intermediate_size)
    heads = EvenRows(mixer.num_heads)
    # of B, and as many of C
    states = GroupRows(mixer.n_groups, mixer.ssm_state_size, mixer.num_heads)
    projected = FusedRows((inner, inner, states, states, heads))
    groups = heads.size // tp // states.heads_together(tp)  # of a rank, repeated ones included
    width = groups * states.width
    attributes = {
        "num_heads": heads.size // tp,
        "intermediate_size": inner.size // tp,
        "n_groups": groups,
        "conv_dim": inner.size // tp + 2 * width,
        "groups_time_state_size": width,  # of Falcon-H1
    }
    rows = {
        "in_proj": projected,
        "mup_vector": projected,
        "conv1d": FusedRows((inner, states, states)),
        **dict.fromkeys(("A_log", "D", "dt_bias"), heads),
        "norm": inner,
    }
    return MixerParts({"heads": heads.size}, rows, attributes)


def _short_convolution_parts(mixer: Any, tp: int) -> MixerParts:
    channels = EvenRows(mixer.conv.in_channels)
    rows = {"in_proj": FusedRows((channels,) * 3), "conv": channels}
    return MixerParts({"channels": channels.size}, rows, attributes={})


_KINDS: Sequence[tuple[tuple[str, ...], Callable[[Any, int], MixerParts]]] = (
    (("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv1d"), _delta_net_parts),
    (("qkv_dim", "forget_gate", "conv1d"), _kimi_parts),
    (("ssm_state_size", "n_groups", "num_heads", "intermediate_size", "in_proj", "conv1d"), _mamba2_parts),
    (("conv", "in_proj", "out_proj"), _short_convolution_parts),
)


def tensors_of_part(mixer: nn.Module, part_name: str) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name in the mixer, owner, name there) of the tensors of a child, or the one tensor, `part_name`."""
    for name, _ in (*mixer.named_parameters(), *mixer.named_buffers()):
        if name == part_name or name.startswith(f"{part_name}."):
            owner, _, attribute = name.rpartition(".")
            yield name, mixer.get_submodule(owner), attribute


def is_first_adapter_matrix(name: str) -> bool:
    """Return whether a parameter is the first matrix of a LoRA adapter: its rows are the adapter's rank, not outputs.

    >>> is_first_adapter_matrix("in_proj.lora_A.default.weight")
    True
    """
    return ".lora_A." in name


QKV = "qkv"  # of one linear that makes queries, keys and values, in an encoder
GATHERED = ("colwise_gather_output", "colwise_rep")
SPLIT_INPUT = "rowwise_split_input"  # of a linear whose input is whole on every rank
MIXER = "mixer"  # ours: a state-space layer, whose heads or channels are split

_HEAD = {"lm_head": GATHERED[0]}


def tensor_parallel_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the style of every module and parameter that has one, by its name in the model, with `*` for layers.

    Styles of the configuration, then of the class, replace ours; depths are split as layers. ModelError without a plan.
    """
    config = model.config.get_text_config()
    theirs = getattr(config, "base_model_tp_plan", None)
    ours = find_family(config.model_type).tensor_parallel
    if not theirs and ours is None:
        raise ModelError(
            f"{type(model).__name__} has no tensor-parallel plan (base_model_tp_plan of its configuration); use tp 1"
        )
    base = {**(ours or {}), **(theirs or {})}
    prefix = text_model_name(model)
    inside_layers = {inside: style for name, style in base.items() if (inside := name.partition(".*.")[2])}
    return (  # of two styles of a name the later one counts
        {f"{prefix}.{name}": style for name, style in base.items()}
        | {f"{MTP}.layers.*.mtp_block.{inside}": style for inside, style in inside_layers.items()}
        # a block of several layers numbers them
        | {f"{MTP}.layers.*.mtp_block.*.{inside}": style for inside, style in inside_layers.items()}
        | ({} if ours is None else _HEAD)  # a family that transformers does not cover may not name its head
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


def layer_experts(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the experts of a decoder layer by name: modules named "experts"."""
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
                of_heads = style == COLWISE and getattr(module, parameter).ndim == 1
                yield StyledModule(f"{name}.{parameter}", module, HEADS if of_heads else style, parameter)


def _find_style(plan: Mapping[re.Pattern[str], str], name: str) -> str | None:
    style = next((style for pattern, style in plan.items() if pattern.fullmatch(name)), None)
    return None if style in _WITHOUT_EFFECT else style


def check_divided_sizes(sizes: Mapping[str, int], tp: int, model: str) -> None:
    """Raise ModelError, with the values of tp that would fit, where tp does not divide these sizes of a model."""
    wrong = [f"{size} ({name})" for name, size in sizes.items() if size % tp]
    if wrong:
        common = math.gcd(*sizes.values())
        *others, last = (str(d) for d in range(1, common + 1) if common % d == 0)
        fitting = f"{', '.join(others)} or {last}" if others else last
        raise ModelError(f"tp {tp} does not divide {' and '.join(wrong[:4])} of {model}; use tp {fitting}")


def sizes_divided_by_tp(model: PreTrainedModel, styled_modules: list[StyledModule]) -> dict[str, int]:
    """All layers share one entry, as their numbers are alike.

    A column-wise linear splits its outputs, a packed one half of them, others inputs; attention's divide where heads
    do, except whole inputs (SPLIT_INPUT).
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
            linear = base_module(module)
            if not isinstance(linear, nn.Linear):
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
