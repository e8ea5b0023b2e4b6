"""How rows of frozen weights are packed, and how a folder's `quantization_config` says that its weights are stored.

Plans and loading read it here. Which tensors of the files make a weight, and its numbers, is in `model/frozen/formats`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from longspan.errors import ModelError

DEQUANTIZE = (
    "load it in transformers, dequantize it (by its method: dequantize=True of its quantization configuration, or "
    "model.dequantize()), save it by save_pretrained and use that folder"
)
_ADVICE = (
    "use a folder in float8 (fp8 or compressed-tensors), in symmetric int4 of compressed-tensors (pack-quantized, by "
    f"group or channel), in 4 or 8 bits of bitsandbytes or in MXFP4, or dequantize this one: {DEQUANTIZE}"
)


class PackedRows(NamedTuple):
    """How a row of numbers lies as bytes: codes, and a scale for each `block` of them (0: one for the row).

    >>> NF4.row_bytes(4096) / 4096, NF4.reason_against(100)
    (0.5625, 'its rows have 100 numbers, which blocks of 64 do not divide')
    """

    name: str
    number_bytes: float
    block: int
    scale_bytes: int

    def row_bytes(self, columns: int) -> int:
        """Return how many bytes a row of so many numbers takes."""
        return int(columns * self.number_bytes) + -(-columns // (self.block or columns)) * self.scale_bytes

    def reason_against(self, columns: int, parts: int = 1) -> str:
        """Return why rows of `columns` numbers, each cut into `parts` for tensor-parallel ranks, cannot be packed; ""
        if they can.
        """
        columns_of_part = columns // parts
        # A whole row of bytes may end with a shorter block; blocks of half bytes, and of a row that is cut, divide it.
        ends_with_any_block = self.number_bytes == 1 and parts == 1
        # Codes of a row with one scale fill its bytes.
        block = self.block or int(1 / self.number_bytes)
        if ends_with_any_block or columns_of_part % block == 0:
            return ""
        reason = f"its rows have {columns_of_part} numbers, which blocks of {block} do not divide"
        return reason + (f" on each of {parts} tensor-parallel ranks; use tp 1" if parts > 1 else "")


NF4 = PackedRows("nf4", 0.5, 64, 4)
MXFP4 = PackedRows("mxfp4", 0.5, 32, 1)
INT4 = PackedRows("int4", 0.5, 0, 4)
INT8 = PackedRows("int8", 1, 0, 4)
FLOAT8 = PackedRows("float8", 1, 0, 4)


class LayerModules(NamedTuple):
    """Modules of a part of a layer: words by which a configuration may name them, and paths of two of them."""

    names: frozenset[str]
    paths: tuple[str, ...]


@dataclass(frozen=True)
class StoredGroup:
    """Weights of a folder that are stored alike.

    So many rows (`shared_rows`, 0: all) have one scale for the same block of columns. `targets` are names or
    expressions ("re:…") of the modules that they are of, or classes of modules; none: of all linears.
    """

    rows: PackedRows
    shared_rows: int = 1
    targets: tuple[str, ...] = ()

    @property
    def is_general(self) -> bool:
        """Whether the group is of all linears that no other group names."""
        return not self.targets or any(target[:1].isupper() for target in self.targets)

    def names(self, modules: LayerModules) -> bool:
        """Return whether the group names these modules."""
        expressions = [target.removeprefix("re:") for target in self.targets if target.startswith("re:")]
        if any(re.match(expression, path) for expression in expressions for path in modules.paths):
            return True
        return not modules.names.isdisjoint(_last_words(self.targets))


@dataclass(frozen=True)
class PackedForm:
    """How the frozen weights of a model are packed, in nf4 or as its folder stores them.

    `format` is a row of `FORMATS` in `model/frozen/formats/storage_methods.py`. `whole` are names of modules that a
    folder leaves whole.
    """

    format: str
    description: str
    groups: tuple[StoredGroup, ...]
    experts_alone: bool = False
    whole: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The form in one word."""
        return self.groups[0].rows.name

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """How many rows and columns (0: all) share a scale, in each group."""
        return tuple((group.shared_rows, group.rows.block) for group in self.groups)

    def rows_of(self, modules: LayerModules) -> PackedRows | None:
        """Return how weights of these modules are packed; None if they stay whole."""
        if not modules.names.isdisjoint(self.whole):
            return None
        # A group that names modules goes before one of all linears.
        naming_groups = [group for group in self.groups if group.names(modules)]
        general_groups = [group for group in self.groups if group.is_general]
        return next((group.rows for group in (*naming_groups, *general_groups)), None)


NF4_FORM = PackedForm("nf4", "nf4", (StoredGroup(NF4),))


def find_quantization_settings(config: Any) -> dict[str, Any]:
    """Return the `quantization_config` of a configuration (an object or a dict), or of one of its parts; else {}.

    DeepSeek-V4 names the type of its experts beside it: it is returned among the settings.
    """
    values = cast(dict[str, Any], config if isinstance(config, dict) else vars(config))
    parts: list[Any] = [values, *values.values()]
    for part in parts:
        is_dict = isinstance(part, dict)
        values_of_part = cast(dict[str, Any], part if is_dict else getattr(part, "__dict__", {}))
        stored: Any = values_of_part.get(_KEY)
        experts: Any = values_of_part.get(_EXPERT_TYPE)
        settings: Any = stored.to_dict() if hasattr(stored, "to_dict") else stored
        if settings and isinstance(settings, dict):
            of_experts: dict[str, Any] = {_EXPERT_TYPE: experts} if isinstance(experts, str) else {}
            return of_experts | cast(dict[str, Any], settings)
    return {}


def remove_quantization_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration without its `quantization_config`, and without those of its parts."""
    whole = {name: value for name, value in values.items() if name != _KEY}
    sections = {name: cast(dict[str, Any], value) for name, value in whole.items() if isinstance(value, dict)}
    return whole | {name: remove_quantization_settings(section) for name, section in sections.items()}


_KEY = "quantization_config"
_EXPERT_TYPE = "expert_dtype"


def read_quantization(settings: Mapping[str, Any]) -> PackedForm:
    """Return how a folder's weights are stored, by its `quantization_config`.

    >>> form = read_quantization({"quant_method": "fp8", "weight_block_size": [128, 128]})
    >>> form.description, form.groups[0].rows.row_bytes(256)
    ('float8 in blocks of 128 × 128 (fp8)', 264)

    Raises ModelError for a method, or settings of it, that are not read.
    """
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method not in _METHODS:
        raise ModelError(f"weights of {method} are not read; {_ADVICE}")
    try:
        form = _METHODS[method](settings)
        # Modules that stay whole are listed by dotted names or expressions, in any of these lists.
        lists = (settings.get(name) for name in ("modules_to_not_convert", "llm_int8_skip_modules", "ignore"))
        return replace(form, whole=_last_words([str(name) for names in lists for name in names or ()]))
    except ModelError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"settings of {method} weights are damaged: {type(error).__name__}: {error}") from error


def _last_words(names: Sequence[str]) -> frozenset[str]:
    """The last word of a dotted name or an expression is a module's name."""
    words_of_names = (re.findall(r"[a-z]\w*", name) for name in names if not name[:1].isupper())
    return frozenset(words[-1] for words in words_of_names if words)


def _read_fine_grained_float8(settings: Mapping[str, Any]) -> PackedForm:
    if (experts := settings.get(_EXPERT_TYPE)) not in (None, "fp8"):
        raise ModelError(
            f"experts in {experts} beside float8 linears ({_EXPERT_TYPE}, as DeepSeek-V4's e2m1 with a scale for 32 "
            f"numbers) are not read; {_ADVICE}"
        )
    block = settings.get("weight_block_size")
    rows, columns = block or (0, 0)
    text = f"in blocks of {rows} × {columns}" if block else "with a scale for each weight"
    group = StoredGroup(FLOAT8._replace(block=columns), rows)
    return PackedForm("fp8", f"float8 {text} (fp8)", (group,))


class _CompressedRows(NamedTuple):
    """How weights of compressed-tensors of a type and number of bits are read, in files of a `format` ("": any)."""

    rows: PackedRows
    strategies: tuple[str, ...]
    format: str = ""


_COMPRESSED: dict[Any, _CompressedRows] = {
    ("float", 8): _CompressedRows(FLOAT8, ("tensor", "channel", "block")),
    ("int", 4): _CompressedRows(INT4, ("channel", "group"), "pack-quantized"),
}
# These orders of columns (actorder) leave none in the files; others have them as g_idx.
_ORDERS_WITHOUT_INDICES = (None, False, "weight", "static")


def _read_compressed_tensors(settings: Mapping[str, Any]) -> PackedForm:
    config_groups: dict[str, dict[str, Any] | None] = settings.get("config_groups") or {}
    groups = list[StoredGroup]()
    texts = list[str]()
    for group_settings in config_groups.values():
        group, text = _read_compressed_group(group_settings or {}, settings.get("format"))
        groups.append(group)
        texts.append(text)
    sparsity_config: dict[str, Any] = settings.get("sparsity_config") or {}
    sparsity = sparsity_config.get("format", "dense")
    if sparsity != "dense":
        raise ModelError(f"compressed-tensors weights of format {sparsity} are not read; {_ADVICE}")
    if not groups:
        raise ModelError(f"compressed-tensors weights without config_groups are not read; {_ADVICE}")
    names = [*dict.fromkeys(group.rows.name for group in groups)]
    if len(names) > 1:
        raise ModelError(f"compressed-tensors weights in {' and '.join(names)} are not read together; {_ADVICE}")
    description = f"{names[0]} by {' and '.join(dict.fromkeys(texts))} (compressed-tensors)"
    return PackedForm(f"compressed {names[0]}", description, tuple(groups))


def _read_compressed_group(settings: Mapping[str, Any], folder_format: Any) -> tuple[StoredGroup, str]:
    """A group and what shares a scale in it, in words; defaults are those of compressed-tensors."""
    weights: dict[str, Any] = settings.get("weights") or {}
    size = weights.get("group_size") or 0
    strategy = str(weights.get("strategy") or {0: "tensor", -1: "channel"}.get(size, "group"))
    # A strategy has so many rows and columns of a block (0: all).
    strategies: dict[str, Any] = {
        "tensor": (0, 0),
        "channel": (1, 0),
        "group": (1, size),
        "block": tuple(weights.get("block_structure") or ()),
    }
    block = strategies.get(strategy, ())
    scheme = weights.get("type"), weights.get("num_bits")
    symmetric = bool(weights.get("symmetric", True))
    file_format = settings.get("format") or folder_format
    order = weights.get("actorder")
    has_indices = order not in _ORDERS_WITHOUT_INDICES
    read = _COMPRESSED.get(scheme)
    is_of_files = read is not None and strategy in read.strategies and read.format in ("", file_format)
    if read is None or not is_of_files or not symmetric or has_indices or len(block) != 2:
        raise ModelError(
            f"compressed-tensors weights of {scheme[1]} bits ({scheme[0]}, {'' if symmetric else 'not '}symmetric, "
            f"{strategy}, {file_format}{f', actorder {order}' if has_indices else ''}) are not read; {_ADVICE}"
        )
    # Codes of a group fill its bytes.
    if strategy == "group" and (size <= 0 or size % 2):
        raise ModelError(f"compressed-tensors weights in groups of {size} are not read; {_ADVICE}")
    targets = tuple(map(str, settings.get("targets") or ()))
    words = {"group": f"groups of {size}", "block": f"{' × '.join(map(str, block))} blocks"}
    group = StoredGroup(read.rows._replace(block=block[1]), block[0], targets)
    return group, words.get(strategy, strategy)


def _read_bitsandbytes(settings: Mapping[str, Any]) -> PackedForm:
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        return PackedForm("bitsandbytes int8", "int8 (bitsandbytes)", (StoredGroup(INT8),))
    again = ", scales quantised" if settings.get("bnb_4bit_use_double_quant") else ""
    description = f"{settings.get('bnb_4bit_quant_type', 'fp4')} (bitsandbytes{again})"
    return PackedForm("bitsandbytes 4 bits", description, (StoredGroup(NF4),))


def _read_mxfp4(settings: Mapping[str, Any]) -> PackedForm:
    return PackedForm("mxfp4", "experts in 4 bits (mxfp4)", (StoredGroup(MXFP4),), experts_alone=True)


_METHODS: dict[str, Callable[[Mapping[str, Any]], PackedForm]] = {
    "fp8": _read_fine_grained_float8,
    "compressed-tensors": _read_compressed_tensors,
    "bitsandbytes": _read_bitsandbytes,
    "mxfp4": _read_mxfp4,
}
