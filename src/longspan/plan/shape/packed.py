"""Which frozen weights of a model are packed in four or eight bits, and their bytes: by its shape and its folder.

Packed are the linears of decoder layers: of attention, of MLPs and shared experts, experts, and the projections into
and out of state-space layers. Embeddings, head, norms, routers, convolutions, towers and depths stay whole.
"""

from typing import Any, NamedTuple

from longspan.errors import ModelError, PlanError
from longspan.plan.form import FrozenWeights
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.layers import (
    LayerKind,
    MixerShape,
    Weights,
    attention_weights,
    feed_forward_weights,
    has_latent_attention,
    latent_widths,
    layer_kinds,
    read_mixer_shape,
)
from longspan.plan.shape.quantization import NF4_FORM, LayerModules, PackedForm, read_quantization
from longspan.plan.shape.streams import read_streams

# A linear with fewer outputs has one number a head, or is a gate of experts.
LEAST_ROWS = 64
# These routers are plain linears.
_ROUTERS = ("gate", "router", "classifier")


def may_pack_linear(name: str, rows: int) -> bool:
    """Return whether a linear of a decoder layer may be packed, by the last word of its name and its outputs."""
    return rows >= LEAST_ROWS and name not in _ROUTERS


# Parts of a layer, by the names under which a folder may leave them as they are, or stores them in another way.
def _modules(names: str, *paths: str) -> LayerModules:
    return LayerModules(frozenset(names.split()), tuple(f"model.layers.0.{path}" for path in paths))


_ATTENTION = _modules(
    "self_attn attention q_proj k_proj v_proj o_proj q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj",
    *("self_attn.q_proj", "self_attn.o_proj"),
)
_MIXER = _modules("linear_attn mamba mixer conv in_proj out_proj", "linear_attn.in_proj", "mixer.out_proj")
_MLP = _modules("mlp feed_forward gate_proj up_proj down_proj", "mlp.gate_proj", "mlp.down_proj")
_CONNECTIONS = _modules(
    "attn_hyper_connection mlp_hyper_connection input_mix_weight_down input_mix_weight_up",
    *("attn_hyper_connection.input_mix_weight_down", "mlp_hyper_connection.input_mix_weight_up"),
)
_EXPERTS = _modules("mlp feed_forward experts", "mlp.experts.0.gate_proj", "mlp.experts.0.down_proj")


class PackedWeights(NamedTuple):
    """How many weights are packed, and their bytes; those of experts, which ep ranks share, apart."""

    numbers: float = 0.0
    bytes: float = 0.0
    experts: float = 0.0
    experts_bytes: float = 0.0


def find_packed_form(config: Any, frozen: FrozenWeights) -> PackedForm | None:
    """Return how the frozen weights of a model are packed; None if they are whole. "auto" and "stored" keep the form
    that the model's `quantization_config` names; if it names none that is known, "auto" is whole, and "stored" raises
    PlanError.
    """
    if frozen in ("whole", "nf4"):
        return NF4_FORM if frozen == "nf4" else None
    read = ConfigReader.read_whole_model(config)
    settings = read.quantization_settings()
    if settings:
        try:
            return read_quantization(settings)
        except ModelError:
            pass
    if frozen == "auto":
        return None
    method = settings.get("quant_method")
    experts = f" with experts in {settings['expert_dtype']}" if "expert_dtype" in settings else ""
    form = f"in {method}{experts}, which is not read" if method else "whole, without a quantization_config"
    raise PlanError(f'model.frozen is "stored", and {read.where} holds its weights {form}; use nf4 or whole')


def packed_weights_of_layer(
    read: ConfigReader, kind: LayerKind, mixer: MixerShape | None, form: PackedForm | None, tp: int = 1
) -> PackedWeights:
    """Count the packed weights of one layer: those of its linears and of all its experts, but for those that `form`
    leaves whole; none if it is None. `tp` ranks cut the columns of the linears that lead back to the model's width.
    Raises PlanError for rows that blocks do not divide.
    """
    if form is None:
        return PackedWeights()
    hidden = read.count("hidden_size")
    times = 1 + kind.double
    parts = list[_Part]()
    if kind.attention:
        parts += _attention_parts(read, hidden, tp) * times
    if kind.mixes and mixer:
        # without those of the convolution
        weights = Weights(mixer.weights - mixer.channels * mixer.width, mixer.last)
        parts += _linear_parts(_MIXER, weights, hidden, tp)
    if kind.feeds == "dense" or kind.double:
        parts += _linear_parts(_MLP, feed_forward_weights(read, "dense"), hidden, tp) * times
    if (streams := read_streams(read)) and streams.rank:
        narrow = 2 * streams.width * streams.rank
        parts += [_Part(_CONNECTIONS, narrow, streams.width)] * (streams.rank >= LEAST_ROWS)
        parts.append(_Part(_CONNECTIONS, narrow, streams.rank))
    experts = list[_Part]()
    if kind.feeds == "experts":
        weights = feed_forward_weights(read, "experts")
        count = read.experts_attribute_and_count()[1]
        inputs = read.count("moe_latent_size") or hidden
        width = read.count("moe_intermediate_size") or read.count("intermediate_size")
        if read.family.experts_interface:  # others stay whole
            down = count * inputs * width
            experts.append(_Part(_EXPERTS, weights.of_experts + weights.unvisited - down, inputs))
            experts.append(_Part(_EXPERTS, down, width))
        # What is left beside the router: the shared expert, and the one row of its gate.
        shared = weights.all - weights.of_experts - hidden * (count + read.count("zero_expert_num"))
        parts.append(_Part(_MLP, shared, hidden))
    if form.experts_alone:
        parts = []
    numbers, size = _count_packed(read, parts, form)
    return PackedWeights(numbers, size, *_count_packed(read, experts, form))


class _Part(NamedTuple):
    """Matrices of a layer that have as many `columns`, which `tp` ranks cut; `weights` are the numbers of all."""

    modules: LayerModules
    weights: int
    columns: int
    tp: int = 1


def _linear_parts(modules: LayerModules, weights: Weights, hidden: int, tp: int) -> list[_Part]:
    """The first linears of a part of a layer read rows of the hidden size, and its last one makes such rows: its
    columns are its numbers over the hidden size."""
    return [
        _Part(modules, weights.all - weights.last, hidden),
        _Part(modules, weights.last, weights.last // hidden, tp),
    ]


def _attention_parts(read: ConfigReader, hidden: int, tp: int) -> list[_Part]:
    """Latent attention has linears of narrow rows, too, of queries and of keys and values."""
    weights = attention_weights(read)
    if not has_latent_attention(read):
        return _linear_parts(_ATTENTION, weights, hidden, tp)
    latent = latent_widths(read)
    parts = [
        _Part(_ATTENTION, columns * rows, columns)
        for columns, rows in ((latent.query_rank, latent.query), (latent.rank, latent.expanded))
        if columns
    ]
    of_hidden = weights.all - weights.last - sum(part.weights for part in parts)
    return [_Part(_ATTENTION, of_hidden, hidden), *parts, _Part(_ATTENTION, weights.last, latent.value, tp)]


def _count_packed(read: ConfigReader, parts: list[_Part], form: PackedForm) -> tuple[float, float]:
    """(numbers, bytes); parts that a folder leaves whole are left out."""
    numbers = 0.0
    size = 0.0
    for part in parts:
        rows = form.rows_of(part.modules)
        if not part.weights or rows is None:
            continue
        if reason := rows.reason_against(part.columns, part.tp):
            raise PlanError(
                f"the weights of {read.where} cannot be frozen as {rows.name!r}: of its {min(part.modules.names)} "
                f'{reason}; or use model.frozen = "whole"'
            )
        numbers += part.weights
        size += part.weights // part.columns * rows.row_bytes(part.columns)
    return numbers, size


def packed_weights_of_model(config: Any, frozen: FrozenWeights) -> PackedWeights:
    """Count the packed weights of all decoder layers of a configuration, an object, a dict, its file or its folder."""
    form = find_packed_form(config, frozen)
    if form is None:
        return PackedWeights()
    read = ConfigReader.read_language_model(config)
    kinds = layer_kinds(read)
    mixer = read_mixer_shape(read)
    weights_of_kinds = {kind: packed_weights_of_layer(read, kind, mixer, form) for kind in dict.fromkeys(kinds)}
    return PackedWeights(*map(sum, zip(*(weights_of_kinds[kind] for kind in kinds), strict=True)))
