"""How many parameters each layer of a model has on a rank, whole, sharded, trained and packed; and which layers each
pipeline stage holds. What they take in bytes `stage_bytes.py` counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan.memory.settings import MemorySettings
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.key_choices import read_key_choice
from longspan.plan.shape.layers import (
    LayerKind,
    MixerShape,
    attention_weights,
    attention_widths,
    depth_kinds,
    feed_forward_weights,
    has_grouped_output,
    has_latent_attention,
    latent_widths,
    layer_kinds,
    layer_parts,
    read_mixer_shape,
    stack_runs,
)
from longspan.plan.shape.model_shape import ModelShape
from longspan.plan.shape.name_patterns import meets_any
from longspan.plan.shape.packed import find_packed_form, packed_weights_of_layer
from longspan.plan.shape.quantization import PackedForm
from longspan.plan.shape.streams import Streams, read_streams

# Models with images alone need these types.
if TYPE_CHECKING:
    from longspan.plan.items.encoder_shape import EncoderShape


@dataclass(frozen=True)
class Numbers:
    """How many parameters a part of a model has on a rank. `whole` are those that a rank gathers (experts divided by
    ep, the rest by tp), of which `trained` are trained and `packed` are packed, in `packed_bytes`. `share` are those
    that FSDP2 divides over its shards, a tensor-parallel rank's part with the experts of all ep ranks; `trained_share`,
    `packed_share` and `packed_share_bytes` are of these.
    """

    whole: float = 0.0
    trained: float = 0.0
    share: float = 0.0
    trained_share: float = 0.0
    packed: float = 0.0
    packed_bytes: float = 0.0
    packed_share: float = 0.0
    packed_share_bytes: float = 0.0

    def __add__(self, other: "Numbers") -> "Numbers":
        return Numbers(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def freeze(self, patterns: Sequence[str], *names: str, least: int = 1) -> "Numbers":
        """Return these numbers, with none trained if the patterns meet `least` of the names or more."""
        met = sum(meets_any(patterns, name) for name in names) if patterns else 0
        if met < least:
            return self
        return replace(self, trained=0.0, trained_share=0.0)


_ENDS = "model.embed_tokens.weight", "lm_head.weight"
# This name of a parameter in a layer no pattern names.
_ANY_NAME = "\0"


@dataclass(frozen=True)
class StageLayers:
    """What the ranks of one pipeline position hold: layers by index (depths behind the last), and parts of the root:
    the embedding where it `embeds`, the head where it `predicts`. `root` counts these parts' parameters (a stage with
    both has tied ones once), `all` those of the stage, with an encoder's tower.
    """

    layers: tuple[int, ...]
    embeds: bool
    predicts: bool
    root: Numbers
    all: Numbers


@dataclass(frozen=True)
class ModelNumbers:
    """The parameters of a model: of every layer, those of depths of multi-token prediction last, and what is around.
    `head` are those of the output projection, and of the embedding, which has as many, and `end` those between the last
    layer and the head. Each depth has `depth_layers`. Rows are `hidden_size` wide, between layers as many times that as
    there are `streams`, their queries `query_width`, and their logits `vocabulary`.
    """

    kinds: tuple[LayerKind, ...]
    layers: tuple[Numbers, ...]
    decoder_layers: int
    depth_layers: int
    head: Numbers
    end: Numbers
    tied: bool
    hidden_size: int
    streams: Streams | None
    query_width: int
    vocabulary: int
    tower: Numbers
    tower_shape: "EncoderShape | None"

    @classmethod
    def from_configuration(cls, config: object, home: Layout, settings: MemorySettings) -> "ModelNumbers":
        """Count the parameters of a configuration under a home. Raises PlanError for a model that cannot be counted.
        The first layer of a depth also projects two joined rows to one. A tower with its projector counts where images
        are encoded: it is sharded over all slots, and not split over tp.
        """
        read = ConfigReader.read_language_model(config)
        read.check_counts("hidden_size", "vocab_size")
        if read.family.shared_blocks:
            raise PlanError(f"{read.where} has shared blocks, whose memory no configuration tells")
        ModelShape.of(config)  # raises PlanError for layers that are not priced, which are not counted either
        hidden = read.count("hidden_size")
        of_depth = depth_kinds(read)
        kinds = layer_kinds(read)
        mixer = read_mixer_shape(read) if any(kind.mixes for kind in kinds) else None

        def numbers_on_rank(weights: float) -> Numbers:
            trained = weights * settings.trains_all
            return Numbers(weights, trained, weights, trained)

        form = None if settings.trains_all else find_packed_form(config, settings.frozen)
        numbers_of_kinds = {
            kind: _count_layer_parameters(read, kind, mixer, home, settings, form) for kind in dict.fromkeys(kinds)
        }
        layers = [
            numbers_of_kinds[kind].freeze(settings.frozen_names, f"model.layers.{number}.{_ANY_NAME}")
            for number, kind in enumerate(kinds)
        ]
        vocabulary = read.count("vocab_size")
        head = numbers_on_rank(hidden * vocabulary / home.tp)
        tied = ConfigReader.read_whole_model(config).ties_embeddings
        first, *others = (_count_layer_parameters(read, kind, mixer, home, settings, None) for kind in of_depth)
        mtp_layers = [first + numbers_on_rank(2 * hidden * hidden), *others] * settings.mtp_layers
        streams = read_streams(read)
        # Connections of a low rank are norms too, that behind the last layer as well.
        end = numbers_on_rank(hidden * (not (streams and streams.rank)) * read.family.norm_weights)
        if stack_runs(read):  # the state that the low stack begins with is never trained
            end += Numbers(hidden, 0.0, hidden)
        if streams:
            end += numbers_on_rank(streams.end_products + streams.end_vectors)
        tower = Numbers()
        shape = None
        if settings.encoder_rows:
            from longspan.plan.items.encoder_shape import EncoderShape

            shape = EncoderShape.of(config)
            weights = shape.embed_weights + shape.block_weights + shape.projector_weights
            trained = {"all": weights, "projector": shape.projector_weights, "none": 0}[settings.encoder_trained]
            tower = Numbers(weights, trained, weights, trained)
        return cls(
            kinds=kinds + of_depth * settings.mtp_layers,
            layers=(*layers, *mtp_layers),
            decoder_layers=len(kinds),
            depth_layers=len(of_depth),
            head=head.freeze(settings.frozen_names, *_ENDS, least=1 if tied else 2),
            end=end,
            tied=tied,
            hidden_size=hidden,
            streams=streams,
            query_width=attention_widths(read).query,
            vocabulary=vocabulary,
            tower=tower,
            tower_shape=shape,
        )


def _count_layer_parameters(
    read: ConfigReader,
    kind: LayerKind,
    mixer: MixerShape | None,
    home: Layout,
    settings: MemorySettings,
    form: PackedForm | None,
) -> Numbers:
    """Linears are split over tp, experts over ep (their shards over tp too), the two norms are whole. Adapters train
    rank · (inputs + outputs) of each linear that has one; `form` says how the frozen weights are packed (None:
    they are not). `all` of Weights has only the experts that a token visits, so that experts are counted apart."""
    parts = layer_parts(read, kind, mixer)
    experts = sum(weights.of_experts + weights.unvisited for weights in parts)
    dense = sum(weights.all - weights.of_experts for weights in parts)
    times = 1 + kind.double
    norms = times * (1 + bool(kind.feeds)) * read.count("hidden_size") * read.family.norm_weights
    if streams := read_streams(read):
        norms = norms * (not streams.rank) + 2 * (streams.products + streams.vectors)
    norms += _whole_numbers(read, kind) + (mixer.vectors if mixer and kind.mixes else 0)
    if kind.attention and has_latent_attention(read):  # narrow rows are whole on every tensor-parallel rank
        latent = latent_widths(read)
        narrow = latent.query_rank + latent.rank + latent.rotary
        narrow_weights = read.count("hidden_size") * narrow * (1 - 1 / home.tp)
        norms += times * (latent.query_rank + latent.rank + narrow_weights)
    whole = dense / home.tp + norms + experts / home.ep
    share = (dense + experts) / home.tp + norms
    if settings.trains_all:
        return Numbers(whole, whole, share, share)
    linears = _adapter_linears(read, kind, mixer)
    widths = (
        sum(width_in + width_out for name, width_in, width_out in linears if settings.has_adapter(name)) / home.tp
    )
    if kind.feeds == "experts":  # inputs and outputs of matrices with adapters, of which each rank gathers all
        weights = feed_forward_weights(read, "experts")
        count = read.experts_attribute_and_count()[1]
        inputs = read.count("moe_latent_size") or read.count("hidden_size")
        width = read.count("moe_intermediate_size") or read.count("intermediate_size")
        # The width is that of the first matrix's output.
        first_width = (weights.of_experts + weights.unvisited) // (count * inputs) - width
        expert_widths = 0
        if settings.adapts_experts("gate_up_proj") or settings.adapts_experts("up_proj"):
            expert_widths += inputs + first_width
        if settings.adapts_experts("down_proj"):
            expert_widths += inputs + width
        widths += count * expert_widths
    adapters = settings.lora_rank * widths
    packed = packed_weights_of_layer(read, kind, mixer, form, home.tp)
    return Numbers(
        whole + adapters,
        adapters,
        share + adapters,
        adapters,
        packed=packed.numbers / home.tp + packed.experts / home.ep,
        packed_bytes=packed.bytes / home.tp + packed.experts_bytes / home.ep,
        packed_share=(packed.numbers + packed.experts) / home.tp,
        packed_share_bytes=(packed.bytes + packed.experts_bytes) / home.tp,
    )


def adapted_widths(config: object, settings: MemorySettings) -> float:
    """Return the inputs and outputs of all linears with adapters, in all layers together; experts are left out.

    Raises PlanError for a model that cannot be counted.
    """
    if settings.trains_all:
        return 0.0
    read = ConfigReader.read_language_model(config)
    kinds = layer_kinds(read)
    mixer = read_mixer_shape(read) if any(kind.mixes for kind in kinds) else None
    of_kinds = {
        kind: sum(a + b for name, a, b in _adapter_linears(read, kind, mixer) if settings.has_adapter(name))
        for kind in dict.fromkeys(kinds)
    }
    return sum(map(of_kinds.__getitem__, kinds))


def _whole_numbers(read: ConfigReader, kind: LayerKind) -> float:
    """What every tensor-parallel rank of a layer that attends has whole: norms of heads, and where rows choose keys or
    see entries indexers, sinks, a bias for each row of a window and channel, and the norms of narrow rows and of
    entries."""
    if not kind.attention or (has_latent_attention(read) and not kind.chooses):
        return 0.0
    choice = read_key_choice(read, kind.attention)
    numbers = (choice.linears + choice.vectors) * kind.chooses if choice else 0
    size = attention_widths(read).query // read.count("num_attention_heads")
    if choice and choice.form == "entries":
        width = (2 if choice.most else 1) * size
        numbers += read.count("q_lora_rank") + 2 * size + read.count("num_attention_heads")
        return numbers + choice.stride * width
    return numbers + 2 * size * read.family.head_norms


def _adapter_linears(
    read: ConfigReader, kind: LayerKind, mixer: MixerShape | None
) -> list[tuple[str, float, float]]:
    """(name, inputs, outputs), experts apart. Widths that a configuration does not name follow from the counted
    weights. Attention has a gate as wide as its weights beyond the four projections. A mixer's input projections
    make what the convolution reads (`channels`), a gate, and a number for each head (two in a delta net); those
    of short convolutions, without heads, two gates."""
    hidden = read.count("hidden_size")
    linears = list[tuple[str, float, float]]()
    if kind.attention and has_latent_attention(read):
        latent = latent_widths(read)
        if latent.query_rank:
            linears += [("q_a_proj", hidden, latent.query_rank), ("q_b_proj", latent.query_rank, latent.query)]
        else:
            linears.append(("q_proj", hidden, latent.query))
        linears.append(("kv_a_proj_with_mqa", hidden, latent.rank + latent.rotary))
        linears += [("kv_b_proj", latent.rank, latent.expanded), ("o_proj", latent.value, hidden)]
    elif kind.attention and has_grouped_output(read):  # the linear of groups gets no adapter
        query, key = attention_widths(read)
        rank, output = read.count("q_lora_rank"), read.count("o_groups") * read.count("o_lora_rank")
        linears += [("q_a_proj", hidden, rank), ("q_b_proj", rank, query), ("kv_proj", hidden, key)]
        linears.append(("o_b_proj", output, hidden))
        if choice := read_key_choice(read, kind.attention):
            width = (2 if choice.most else 1) * key
            linears += [("kv_proj", hidden, width), ("gate_proj", hidden, width)]
    elif kind.attention:
        query, key = attention_widths(read)
        gate = max(0, attention_weights(read).all // hidden - 2 * query - 2 * key)
        linears += [("k_proj", hidden, key), ("v_proj", hidden, key)]
        if read.family.gate_linear:
            linears += [("q_proj", hidden, query), (read.family.gate_linear, hidden, gate)]
        else:
            linears.append(("q_proj", hidden, query + gate))
        linears += [("o_proj", query, hidden)]
    if mixer and kind.mixes:
        inner = mixer.last // hidden
        if mixer.kind == "gated delta net":
            linears += [("in_proj_qkvz", hidden, mixer.channels + inner), ("in_proj_ba", hidden, 2 * mixer.heads)]
        else:
            linears.append(
                ("in_proj", hidden, mixer.channels + (inner + mixer.heads if mixer.heads else 2 * inner))
            )
        linears.append(("out_proj", inner, hidden))
    if kind.feeds == "dense" or kind.double:
        weights = feed_forward_weights(read, "dense")
        width = weights.last // hidden
        gate_and_up = ("gate_proj", "up_proj") if weights.all // weights.last > 2 else ("up_proj",)
        linears += [*((name, hidden, width) for name in gate_and_up), ("down_proj", width, hidden)]
    if (streams := read_streams(read)) and streams.rank:
        for _ in range(1 + bool(kind.feeds)):
            linears += [
                ("input_mix_weight_down", streams.width, streams.rank),
                ("input_mix_weight_up", streams.rank, streams.width),
                ("block_inject_weight", streams.width, streams.count),
            ]
    return linears * (1 + kind.double)


def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Divide layers over pipeline stages as `prepare` cuts a model: embedding and head count as a layer each.

    Raises PlanError if there are more stages than layers.
    """
    if stages > layers:
        raise PlanError(
            f"{stages} pipeline stages (pp x virtual stages) for {layers} layers; each stage needs at least one: "
            f"use at most {layers} stages"
        )
    load = [1 + (stage == 0) + (stage == stages - 1) for stage in range(stages)]
    counts = [1] * stages
    for _ in range(layers - stages):
        # Of equally loaded stages the last gets the layer, as in `prepare`.
        least_loaded = min(range(stages), key=lambda stage: (load[stage], -stage))
        load[least_loaded] += 1
        counts[least_loaded] += 1
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def make_stages(numbers: ModelNumbers, home: Layout, settings: MemorySettings) -> tuple[StageLayers, ...]:
    """Return what each pipeline rank holds of a model; layers of depths are on the last stage. With virtual stages rank
    r has stages r, r + pp and so on.
    """
    count = home.pp * (settings.vpp if home.pp > 1 else 1)
    parts: list[Sequence[int]] = [*stage_layers(numbers.decoder_layers, count)]
    parts[-1] = range(parts[-1][0], len(numbers.layers))
    stages = list[StageLayers]()
    for rank in range(home.pp):
        chunks = range(rank, count, home.pp)
        layers = tuple(layer for chunk in chunks for layer in parts[chunk])
        embeds = 0 in chunks
        predicts = count - 1 in chunks
        heads = [embeds, predicts].count(True)  # the embedding counts as a head, which has as many parameters
        if numbers.tied:
            heads = min(1, heads)
        root = sum([numbers.head] * heads, numbers.end if predicts else Numbers())
        all_numbers = sum((numbers.layers[i] for i in layers), root) + numbers.tower
        stages.append(StageLayers(layers, embeds, predicts, root, all_numbers))
    return tuple(stages)
