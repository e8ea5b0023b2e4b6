"""Which frozen weights of a model are packed in four or eight bits, and their bytes: by its shape and its folder.

Packed are the linears of decoder layers: of attention, of MLPs and shared experts, experts, and the projections into
and out of state-space layers. Embeddings, head, norms, routers, convolutions, towers and depths stay whole.
"""

import re
from typing import Any, Literal, NamedTuple

from longspan.errors import PlanError
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.layers import (
    LayerKind,
    MixerShape,
    Weights,
    attention_weights,
    feed_forward_weights,
    layer_kinds,
    read_mixer_shape,
)

FrozenWeights = Literal["auto", "whole", "nf4", "stored"]
# Names under which a folder leaves a part of its layers as it is
_ATTENTION = frozenset(("self_attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj"))
_MIXER = frozenset(("linear_attn", "mamba", "mixer", "conv", "in_proj", "out_proj"))
_MLP = frozenset(("mlp", "feed_forward", "gate_proj", "up_proj", "down_proj"))
_EXPERTS = frozenset(("mlp", "feed_forward", "experts"))


class PackedRows(NamedTuple):
    """How a row of numbers lies as bytes: codes, and a scale for each `block` of them (0: one for the row).

    >>> NF4.row_bytes(4096) / 4096, NF4.reason_against(100)
    (0.5625, 'its rows have 100 numbers, which blocks of 64 do not divide')

    `whole` are names of modules that a folder leaves whole.
    """

    name: str
    number_bytes: float
    block: int
    scale_bytes: int
    whole: frozenset[str] = frozenset()

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
        if not self.block or ends_with_any_block or columns_of_part % self.block == 0:
            return ""
        reason = f"its rows have {columns_of_part} numbers, which blocks of {self.block} do not divide"
        return reason + (f" on each of {parts} tensor-parallel ranks; use tp 1" if parts > 1 else "")


NF4 = PackedRows("nf4", 0.5, 64, 4)
MXFP4 = PackedRows("mxfp4", 0.5, 32, 1)
INT8 = PackedRows("int8", 1, 0, 4)
FLOAT8 = PackedRows("float8", 1, 0, 4)


class PackedWeights(NamedTuple):
    """How many weights are packed, and their bytes; those of experts, which ep ranks share, apart."""

    numbers: float = 0.0
    bytes: float = 0.0
    experts: float = 0.0
    experts_bytes: float = 0.0


def find_packed_rows(config: Any, frozen: FrozenWeights) -> PackedRows | None:
    """Return how the frozen weights of a model lie as bytes; None if they are whole. "auto" and "stored" keep the
    format that the model's `quantization_config` names; if it names none that is known, "auto" is whole, and "stored"
    raises PlanError.
    """
    if frozen in ("whole", "nf4"):
        return NF4 if frozen == "nf4" else None
    read = ConfigReader.read_whole_model(config)
    stored = read.section("quantization_config")
    method = stored.value("quant_method")
    rows = None
    if method == "fp8":  # in blocks (rows, columns), or with one scale for each tensor, repeated in its rows
        rows = FLOAT8._replace(block=(stored.value("weight_block_size") or (0, 0))[1])
    elif method == "mxfp4":
        rows = MXFP4
    elif method == "bitsandbytes":
        rows = INT8 if stored.value("load_in_8bit") else NF4
    elif method == "compressed-tensors":
        groups: Any = stored.value("config_groups") or {"": None}  # None: a group that says nothing
        group: Any = next(iter(groups.values()))
        weights = ConfigReader(group, stored.where).section("weights")
        if (weights.value("type"), weights.value("num_bits")) == ("float", 8):
            rows = FLOAT8._replace(block=(weights.value("block_structure") or (0, 0))[1])
    if rows is None:
        if frozen == "auto":
            return None
        form = f"in {method}, which is not read" if method else "whole, without a quantization_config"
        raise PlanError(f'model.frozen is "stored", and {read.where} holds its weights {form}; use nf4 or whole')
    lists = (stored.value(name) for name in ("modules_to_not_convert", "llm_int8_skip_modules", "ignore"))
    # Modules that stay whole are listed by dotted names or expressions: the last word of each is the module's name.
    words_of_names = (re.findall(r"[a-z]\w*", str(name)) for names in lists for name in names or ())
    return rows._replace(whole=frozenset(words[-1] for words in words_of_names if words))


def packed_weights_of_layer(
    read: ConfigReader, kind: LayerKind, mixer: MixerShape | None, rows: PackedRows | None, tp: int = 1
) -> PackedWeights:
    """Count the packed weights of one layer: those of its linears and of all its experts, but for those that `rows`
    leave whole; none if `rows` is None. `tp` ranks cut the columns of the linears that lead back to the model's
    width. Raises PlanError for rows that blocks do not divide.
    """
    if rows is None:
        return PackedWeights()
    hidden = read.count("hidden_size")
    parts = list[_Part]()
    if kind.attention:
        parts += _linear_parts(_ATTENTION, attention_weights(read), hidden, tp)
    if kind.mixes and mixer:
        # without those of the convolution
        weights = Weights(mixer.weights - mixer.channels * mixer.width, mixer.last)
        parts += _linear_parts(_MIXER, weights, hidden, tp)
    if kind.feeds == "dense":
        parts += _linear_parts(_MLP, feed_forward_weights(read, "dense"), hidden, tp)
    experts = list[_Part]()
    if kind.feeds == "experts":
        weights = feed_forward_weights(read, "experts")
        count = read.experts_attribute_and_count()[1]
        inputs = read.count("moe_latent_size") or hidden
        width = read.count("moe_intermediate_size") or read.count("intermediate_size")
        down = count * inputs * width
        experts.append(_Part(_EXPERTS, weights.of_experts + weights.unvisited - down, inputs))
        experts.append(_Part(_EXPERTS, down, width))
        # What is left beside the router: the shared expert, and the one row of its gate.
        shared = weights.all - weights.of_experts - hidden * count
        parts.append(_Part(_MLP, shared, hidden))
    if rows.name == MXFP4.name:  # in which only experts are packed
        parts = []
    numbers, size = _count_packed(read, parts, rows)
    return PackedWeights(numbers, size, *_count_packed(read, experts, rows))


class _Part(NamedTuple):
    """Matrices of a layer that have as many `columns`, which `tp` ranks cut: the numbers of all (`weights`), and the
    `names` by which a folder may leave their modules whole.
    """

    names: frozenset[str]
    weights: int
    columns: int
    tp: int = 1


def _linear_parts(names: frozenset[str], weights: Weights, hidden: int, tp: int) -> list[_Part]:
    """Return the first linears of a part of a layer, which read rows of the hidden size, and its last one, which makes
    such rows: its columns are its numbers over the hidden size.
    """
    return [
        _Part(names, weights.all - weights.last, hidden),
        _Part(names, weights.last, weights.last // hidden, tp),
    ]


def _count_packed(read: ConfigReader, parts: list[_Part], rows: PackedRows) -> tuple[float, float]:
    """Return the numbers and the bytes of the parts that are packed; those that a folder leaves whole are left out.
    Raises PlanError for rows that blocks do not divide.
    """
    numbers = 0.0
    size = 0.0
    for part in parts:
        if not part.weights or not part.names.isdisjoint(rows.whole):
            continue
        if reason := rows.reason_against(part.columns, part.tp):
            raise PlanError(
                f"the weights of {read.where} cannot be frozen as {rows.name!r}: of its {min(part.names)} {reason}; or "
                'use model.frozen = "whole"'
            )
        numbers += part.weights
        size += part.weights // part.columns * rows.row_bytes(part.columns)
    return numbers, size


def packed_weights_of_model(config: Any, frozen: FrozenWeights) -> PackedWeights:
    """Count the packed weights of all decoder layers of a configuration, an object, a dict, its file or its folder."""
    rows = find_packed_rows(config, frozen)
    if rows is None:
        return PackedWeights()
    read = ConfigReader.read_language_model(config)
    kinds = layer_kinds(read)
    mixer = read_mixer_shape(read)
    weights_of_kinds = {kind: packed_weights_of_layer(read, kind, mixer, rows) for kind in dict.fromkeys(kinds)}
    return PackedWeights(*map(sum, zip(*(weights_of_kinds[kind] for kind in kinds), strict=True)))
