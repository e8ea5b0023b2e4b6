"""An encoder's attention and MLPs split over the tensor-parallel ranks of its slots, which encode the same items.

transformers has no plans for vision towers: linears are recognised by names, or by the caller's plan, and every linear
inside a block must be one. Names prove nothing: `split_trial.py` compares it with the unsplit module.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from longspan.comm import World
from longspan.errors import ModelError
from longspan.model.adapted_modules import peft_modules, unadapted_module
from longspan.model.tensor_parallel.module_styles import COLWISE, QKV, ROWWISE, check_divided_sizes
from longspan.model.tensor_parallel.split_modules import (
    split_linear,
    sum_input_gradients,
    sum_partial_gradients,
    wrap_forward,
)
from longspan.model.tensor_parallel.split_trial import SplitTrial

REPLICATED = "replicated"
STYLES = (COLWISE, ROWWISE, QKV, REPLICATED)

# names of linears that make queries, keys and values; the one behind attention; those of MLPs and the one behind them
_ATTENTION = (
    ("q_proj", "k_proj", "v_proj"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
)
_FUSED = (("qkv",), ("qkv_proj",), ("wqkv",), ("Wqkv",))
_AFTER_ATTENTION = ("out_proj", "o_proj", "proj", "to_out", "wo", "out", "dense", "projection_layer")
_MLP = {
    ("gate_proj", "up_proj"): "down_proj",
    ("up_proj",): "down_proj",
    ("linear_fc1",): "linear_fc2",
    ("fc1",): "fc2",
    ("fc0",): "fc1",
    ("w1", "w3"): "w2",
    ("w1",): "w2",
    ("linear1",): "linear2",
    ("lin1",): "lin2",
    ("dense_h_to_4h",): "dense_4h_to_h",
    ("c_fc",): "c_proj",
}
# names of a module's attributes: numbers of heads, of key/value heads, features of a head, and of all heads
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nheads", "heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
HEAD_SIZE = ("head_dim", "attention_head_size", "hidden_size_per_attention_head", "dim_head", "head_size")
WIDTHS = ("q_dim", "kv_dim", "embed_dim", "all_head_size", "attn_dim", "inner_dim", "dim")
WIDTHS += ("hidden_size", "hidden_dim", "d_model")


@dataclass(frozen=True)
class SplitModule:
    """A module whose own linears are split, with their `styles` by name.

    With `several` attentions or MLPs in it, each linear sums the gradient of its own input; else the module does.
    """

    name: str
    module: nn.Module
    styles: Mapping[str, str]
    several: bool

    @property
    def local_attributes(self) -> dict[str, int]:
        """Return the module's numbers of heads, and widths of all heads, by name: a rank has 1 / tp of each."""
        attributes = {n: value for n, value in vars(self.module).items() if type(value) is int}
        counts = {n: value for n, value in attributes.items() if n in (*HEADS, *KEY_HEADS)}
        if not counts or self.several:
            return counts
        return counts | {
            n: value for n, value in attributes.items() if n in WIDTHS and value in self.query_and_key_widths
        }

    @property
    def query_and_key_widths(self) -> tuple[int, int]:
        """Return the features of all queries, and those of all keys, or of all values.

        A fused linear has heads + 2 · key heads of one size if both are counted and fit, else three equal parts; of
        separate ones the widest has the queries, the narrowest keys and values.
        """
        outputs = list[int]()
        for name, style in self.styles.items():
            linear: Any = unadapted_module(self.module.get_submodule(name))
            if style == QKV:
                heads, key_heads = self._read_count(HEADS), self._read_count(KEY_HEADS)
                head_dim = linear.out_features // (heads + 2 * key_heads) if heads and key_heads else 0
                if head_dim * (heads + 2 * key_heads) == linear.out_features:
                    return heads * head_dim, key_heads * head_dim
                return linear.out_features // 3, linear.out_features // 3
            if style != ROWWISE:
                outputs.append(linear.out_features)
        return max(outputs, default=0), min(outputs, default=0)

    def _read_count(self, names: tuple[str, ...]) -> int:
        values = vars(self.module)
        return next((values[name] for name in names if type(values.get(name)) is int), 0)


def find_split_parts(
    module: nn.Module, blocks: Mapping[str, nn.Module], tp: int, plan: Mapping[str, str]
) -> list[SplitModule]:
    """Find the parts of an encoder that are split over tp ranks, in its order; with tp 1 none, and `plan` is checked.

    ModelError for a plan that does not fit, for linears that are not known, and for sizes that tp does not divide.
    """
    callers_styles = _read_caller_styles(module, plan)
    if tp == 1:
        return []
    styles = _recognise_styles(module) | callers_styles
    _refuse_unknown_linears(module, blocks, styles)
    linears_by_owner = dict[str, dict[str, str]]()
    for name, style in styles.items():
        if style != REPLICATED:
            owner_name, _, child = name.rpartition(".")
            if _is_clipped_linear(module.get_submodule(owner_name)):
                owner_name, _, outer = owner_name.rpartition(".")
                child = f"{outer}{_CLIPPED}"
            linears_by_owner.setdefault(owner_name, {})[child] = style
    split_parts = list[SplitModule]()
    for name, linears in linears_by_owner.items():
        # A block's input also goes around its linears (the residual), where its gradient is already whole, and a list
        # is not called: both count as several attentions or MLPs.
        owner = module.get_submodule(name)
        is_list_or_block = name in blocks or isinstance(owner, nn.ModuleDict | nn.ModuleList)
        several = is_list_or_block or sum(style == ROWWISE for style in linears.values()) > 1
        split_parts.append(SplitModule(name, owner, linears, several=several))
    sizes = {f"{count} of {part.name}": size for part in split_parts for count, size in _sizes_divided_by_tp(part)}
    check_divided_sizes(sizes, tp, type(module).__name__)
    return split_parts


# ---- linears and their styles


def _recognise_styles(module: nn.Module) -> dict[str, str]:
    """Beside a convolution, which mixes features, linears are replicated."""
    styles = dict[str, str]()
    for name, owner in module.named_modules():
        children = dict(owner.named_children())
        paths = {n: f"{n}{_CLIPPED}" if _is_clipped_linear(child) else n for n, child in children.items()}
        modules = {n: unadapted_module(owner.get_submodule(path)) for n, path in paths.items()}
        linears = {n: module for n, module in modules.items() if type(module) is nn.Linear}
        convolves = any(isinstance(child, nn.Conv1d | nn.Conv2d) for child in children.values())  # LFM3-VL: between
        styles_here = dict.fromkeys(linears, REPLICATED) if convolves else _module_styles(linears)
        styles |= {f"{name}.{paths[child]}".lstrip("."): style for child, style in styles_here.items()}
    return styles


# Gemma 4 clips what enters and leaves a linear, in a module around it that has nothing else.
_CLIPPED = ".linear"


def _is_clipped_linear(module: nn.Module) -> bool:
    return [*module._modules] == ["linear"]


def _find_linears(module: nn.Module) -> dict[str, nn.Linear]:
    adapted = tuple(f"{name}." for name in peft_modules(module))
    modules = {n: unadapted_module(child) for n, child in module.named_modules() if not n.startswith(adapted)}
    return {name: linear for name, linear in modules.items() if isinstance(linear, nn.Linear)}


def _module_styles(linears: Mapping[str, nn.Linear]) -> dict[str, str]:
    """Linears before attention, or before an activation, are split by columns, and the one behind it by rows."""
    styles = dict[str, str]()
    output = next((name for name in _AFTER_ATTENTION if name in linears), None)
    columns = next((names for names in (*_ATTENTION, *_FUSED) if linears.keys() >= {*names}), None)
    if output is not None and columns is not None:
        styles = dict.fromkeys(columns, QKV if columns in _FUSED else COLWISE) | {output: ROWWISE}
    for names, last in _MLP.items():
        belongs_to_attention = bool(styles.keys() & {*names, last})
        if linears.keys() >= {*names, last} and not belongs_to_attention:
            return styles | dict.fromkeys(names, COLWISE) | {last: ROWWISE}
    return styles


def _read_caller_styles(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Of two patterns the later one counts."""
    styles = dict[str, str]()
    linears = [*_find_linears(module)]
    for pattern, style in plan.items():
        if style not in STYLES:
            raise ModelError(f"tp_plan gives {pattern!r} the style {style!r}; use one of {', '.join(STYLES)}")
        names = [name for name in linears if fnmatchcase(name, pattern)]
        if not names:
            raise ModelError(
                f"tp_plan names {pattern!r}, which is no nn.Linear of {type(module).__name__}; it has "
                f"{', '.join(linears[:6])}{', …' if len(linears) > 6 else ''} (* stands for any characters)"
            )
        styles |= dict.fromkeys(names, style)
    return styles


def _refuse_unknown_linears(module: nn.Module, blocks: Mapping[str, nn.Module], styles: Mapping[str, str]) -> None:
    unknown = [
        f"{path}.{name} ({child.in_features} to {child.out_features})"
        for path, block in blocks.items()
        for name, child in _find_linears(block).items()
        if f"{path}.{name}" not in styles
    ]
    if unknown or not styles:
        unknown_text = f"linears that are not known by name: {', '.join(unknown[:4])}"
        reason = unknown_text if unknown else "no linear that is known"
        raise ModelError(
            f"{type(module).__name__} cannot be split over tp: its blocks have {reason}. Say in tp_plan what they are, "
            '{"blocks.*.mlp.w12": "colwise"} say ("colwise", "rowwise", "qkv" or "replicated"), or use tp 1'
        )


# ---- sizes


def _sizes_divided_by_tp(part: SplitModule) -> Iterator[tuple[str, int]]:
    """Heads are counted by the size of one if there is no number of them; of a fused linear tp must divide the keys."""
    counts = [(name, value) for name, value in part.local_attributes.items() if name in (*HEADS, *KEY_HEADS)]
    yield from counts
    linears = {name.removesuffix(_CLIPPED) for name in part.styles}
    is_attention = QKV in part.styles.values() or any({*names} <= linears for names in _ATTENTION)
    if is_attention and not counts:
        size = next((v for n, v in vars(part.module).items() if n in HEAD_SIZE and type(v) is int and v > 0), 0)
        if not size:
            raise ModelError(
                f"{part.name} ({type(part.module).__name__}) holds no number of heads under one of the names "
                f"{', '.join(HEADS)}, so they cannot be split over tp; keep it in self.num_heads and use that in "
                "forward"
            )
        yield "heads", part.query_and_key_widths[0] // size
    for name, style in part.styles.items():
        linear: Any = unadapted_module(part.module.get_submodule(name))
        queries, keys = part.query_and_key_widths
        if style == QKV and queries + 2 * keys != linear.out_features:
            raise ModelError(
                f"{part.name}.{name} has {linear.out_features} outputs, which are not queries, keys and values of one "
                "size or of the heads that it counts; use tp 1, or separate linears for them"
            )
        if style == QKV:
            yield name, keys
        else:
            yield name, linear.in_features if style == ROWWISE else linear.out_features


# ---- splitting


def split_encoder(
    module: nn.Module, blocks: Mapping[str, nn.Module], parts: Sequence[SplitModule], world: World
) -> list[SplitTrial]:
    """Split these parts, in place, over the tensor-parallel ranks of this slot; all ranks call it together, before
    FSDP2.

    Returns trials of the first calls, which the caller hooks in once it has wrapped the blocks' forwards.
    """
    _ = world.meshes.tp  # the mesh is made by all ranks together
    tp = world.home.tp
    trials = [SplitTrial(name, unit, world) for name, unit in _trial_units(module, blocks, parts)]
    linears = [part.module.get_submodule(name) for part in parts for name in part.styles]
    split_module_ids = {id(module) for linear in linears for module in linear.modules()}  # an adapter's too
    for part in parts:
        for name, style in part.styles.items():
            linear = part.module.get_submodule(name)
            queries, keys = part.query_and_key_widths
            split_linear(linear, style, world, widths=(queries, keys, keys))
            if part.several and style != ROWWISE:
                sum_input_gradients(linear, world)
        if not part.several:
            # A module such as a norm of heads has gradients of this rank's heads.
            for child in part.module.modules():
                if id(child) in split_module_ids:
                    continue
                for name, _ in child.named_parameters(recurse=False):
                    sum_partial_gradients(child, world.key, name)
            sum_input_gradients(part.module, world)
        counts: dict[str, Any] = dict.fromkeys(part.local_attributes, lambda count: count // tp)
        wrap_forward(part.module, views=counts)
    _hook_refusal_of_dropout(module)
    return trials


def _hook_refusal_of_dropout(module: nn.Module) -> None:
    """A module draws if it has a rate above 0 in an attribute with "drop" in its name, or in `p` of torch's dropout."""
    rates = [
        f"{name} ({type(child).__name__}, {attribute} {rate:g})"
        for name, child in module.named_modules()
        for attribute, rate in vars(child).items()
        if ("drop" in attribute or (attribute == "p" and isinstance(child, nn.modules.dropout._DropoutNd)))
        and isinstance(rate, float)
        and rate > 0
    ]

    def refuse_dropout(module: nn.Module, _: Any) -> None:
        """Raise ModelError in training: a hook before the encoder's forward."""
        if module.training:
            raise ModelError(
                f"{', '.join(rates[:4])} draw at random in training, and the tensor-parallel ranks of a slot would "
                "draw differently; build the encoder with dropout 0.0, or use tp 1"
            )

    if rates:
        module.register_forward_pre_hook(refuse_dropout, prepend=True)


def _trial_units(
    module: nn.Module, blocks: Mapping[str, nn.Module], parts: Sequence[SplitModule]
) -> Iterator[tuple[str, nn.Module]]:
    """Of each kind, a class with the names and shapes of its parameters, the first one is tried."""
    kinds = set[Any]()
    for part in parts:
        name = next((block for block in blocks if f"{part.name}.".startswith(f"{block}.")), part.name)
        unit = module.get_submodule(name)
        shapes = tuple((n, p.shape) for n, p in unit.named_parameters())
        if (type(unit), shapes) not in kinds:
            kinds.add((type(unit), shapes))
            yield name, unit
