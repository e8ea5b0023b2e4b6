"""How many numbers of parameters each layer has, on a rank before FSDP2 shards them, and which of them are trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan.memory.settings import MemorySettings
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.layers import (
    LayerKind,
    Weights,
    attention_weights,
    attention_widths,
    depth_kinds,
    feed_forward_weights,
    has_latent_attention,
    has_shared_blocks,
    layer_kinds,
)
from longspan.plan.shape.mixer_shape import MixerShape, read_mixer_shape
from longspan.plan.shape.model_shape import ModelShape

if TYPE_CHECKING:  # of models with images
    from longspan.plan.items.encoder_shape import EncoderShape


@dataclass(frozen=True)
class Numbers:
    """How many parameters a part of a model has on a rank.

    `whole` are those that a rank gathers (experts divided by ep, the rest by tp), `trained` those of them with
    gradients, and `adapters` those of adapters. `share` are those that FSDP2 divides over its shards: a tensor-parallel
    rank's part, with the experts of all ep ranks.
    """

    whole: float = 0.0
    trained: float = 0.0
    adapters: float = 0.0
    share: float = 0.0

    def __add__(self, other: "Numbers") -> "Numbers":
        """Add up the numbers of two parts of a model."""
        return Numbers(
            self.whole + other.whole,
            self.trained + other.trained,
            self.adapters + other.adapters,
            self.share + other.share,
        )


@dataclass(frozen=True)
class Stage:
    """What the ranks of one pipeline position hold: layers by index (depths behind the last), and parts of the root."""

    chunks: tuple[tuple[int, ...], ...]
    embeds: bool
    predicts: bool

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers of all chunks, by index."""
        return tuple(layer for chunk in self.chunks for layer in chunk)


@dataclass(frozen=True)
class ModelNumbers:
    """The parameters of a model: of every layer, those of depths of multi-token prediction last, and what is around.

    A depth may have several layers; `decoder_layers` are those of the model without depths.
    """

    read: ConfigReader
    kinds: tuple[LayerKind, ...]
    layers: tuple[Numbers, ...]
    embedding: Numbers
    head: Numbers
    tied: bool
    tower: Numbers
    decoder_layers: int
    tower_shape: "EncoderShape | None" = None

    @classmethod
    def of(cls, config: object, home: Layout, settings: MemorySettings) -> "ModelNumbers":
        """Count the parameters of a configuration under a home. Raises PlanError for sizes that are missing.

        Counted are each layer, depths of prediction, the embedding and the output projection (each a `table`, split
        over tp), and an encoder's tower. All depths have the same layers; the first layer of a depth also has the
        projection of two joined rows of the hidden size to one.
        """
        read = ConfigReader.of(config)
        read.check_counts("hidden_size", "vocab_size")
        if reason := reason_uncounted(config):
            raise PlanError(f"{read.where} has {reason}, whose memory no configuration tells")
        kinds = layer_kinds(read)
        if not kinds:
            read.check_counts("num_hidden_layers")
        kinds_of_depth = depth_kinds(read)
        mixer = read_mixer_shape(read) if any(kind.mixes for kind in kinds) else None
        layers = [_layer_numbers(read, kind, mixer, home, settings) for kind in kinds]
        hidden = read.count("hidden_size")
        projection = _matrix_numbers(2 * hidden * hidden, settings)
        first_layer, *further_layers = [_layer_numbers(read, kind, mixer, home, settings) for kind in kinds_of_depth]
        layers += [first_layer + projection, *further_layers] * settings.depths
        table = _matrix_numbers(hidden * read.count("vocab_size") / home.tp, settings)
        tower, tower_shape = _tower_numbers(config, settings)
        return cls(
            read,
            kinds + kinds_of_depth * settings.depths,
            tuple(layers),
            embedding=table,
            head=table,
            tied=bool(read.value("tie_word_embeddings")),
            tower=tower,
            decoder_layers=len(kinds),
            tower_shape=tower_shape,
        )

    def begins_depth(self, layer: int) -> bool:
        """Return whether the layer of this index is the first of a depth of prediction."""
        index = layer - self.decoder_layers  # among the layers of all depths; negative for a decoder layer
        return index >= 0 and index % len(depth_kinds(self.read)) == 0

    def root_numbers(self, stage: Stage) -> Numbers:
        """Count the parameters of embedding and head on a stage; a stage with both has tied ones once."""
        parts = [self.embedding] * stage.embeds + [self.head] * stage.predicts
        return sum(parts[:1] if self.tied else parts, Numbers())


def reason_uncounted(config: object) -> str:
    """Return what of a model is not counted; "" for a model whose memory can be planned.

    >>> reason_uncounted({"model_type": "zamba2"})
    'shared blocks'

    Raises PlanError for a configuration that `ModelShape` does not price either.
    """
    read = ConfigReader.of(config)
    if has_shared_blocks(read):
        return "shared blocks"
    if has_latent_attention(read):
        return "latent attention"
    ModelShape.of(config)  # for its error
    return ""


def _matrix_numbers(weights: float, settings: MemorySettings) -> Numbers:
    """Return the numbers of a matrix with this many weights on a rank before sharding, and no adapter."""
    return Numbers(weights, weights if settings.trains_all else 0.0, 0.0, weights)


def _layer_numbers(
    read: ConfigReader, kind: LayerKind, mixer: MixerShape | None, home: Layout, settings: MemorySettings
) -> Numbers:
    """Count the parameters of one layer of this kind, on a rank before it is sharded over slots.

    Linear layers are split over tp and experts over ep. Norms are on every rank: one before attention and mixer, one
    before the MLP or experts. The share has the experts of all ep neighbours, since FSDP2 shards over these ranks too.
    With adapters only the adapters are trained: rank · (inputs + outputs) of each linear that has one. `all` of Weights
    has only the experts that a token visits, so the experts are counted apart.
    """
    hidden, parts = read.count("hidden_size"), list[Weights]()
    if kind.attention:
        parts.append(attention_weights(read))
    if kind.mixes and mixer:
        parts.append(Weights(mixer.weights, mixer.last))
    if kind.feeds:
        parts.append(feed_forward_weights(read, kind.feeds))
    experts = sum(weights.of_experts + weights.unvisited for weights in parts)
    dense = sum(weights.all for weights in parts) - sum(weights.of_experts for weights in parts)
    norms = (1 + bool(kind.feeds)) * hidden
    whole = dense / home.tp + norms + experts / home.ep
    share = (dense + experts) / home.tp + norms
    if settings.trains_all:
        return Numbers(whole, whole, 0.0, share)
    linears = adapter_linears(read, kind, mixer)
    widths = sum(width_in + width_out for name, width_in, width_out in linears if settings.has_adapter(name))
    adapters = settings.lora_rank * widths / home.tp
    return Numbers(whole + adapters, adapters, adapters, share + adapters)


def adapter_linears(read: ConfigReader, kind: LayerKind, mixer: MixerShape | None) -> list[tuple[str, float, float]]:
    """Return the linears of a layer that adapters go into, each with its name and the widths of its input and output.

    Widths that a configuration does not name follow from the counted weights. Attention has a gate as wide as its
    weights beyond queries, keys, values and output. A mixer's output projection has `mixer.last` weights, which over
    the hidden size are its inner width. A mixer's input projections make what the convolution reads (`channels`), a
    gate, and a number for each head (two in a delta net); those of short convolutions, which have no heads, `channels`
    and two gates. Experts have no adapters.
    """
    hidden, linears = read.count("hidden_size"), list[tuple[str, float, float]]()
    if kind.attention:
        query, key = attention_widths(read)
        gate = max(0, attention_weights(read).all // hidden - 2 * query - 2 * key)
        linears += [("q_proj", hidden, query + gate), ("k_proj", hidden, key), ("v_proj", hidden, key)]
        linears += [("o_proj", query, hidden)]
    if mixer and kind.mixes:
        inner = mixer.last // hidden
        if mixer.kind == "gated delta net":
            linears += [("in_proj_qkvz", hidden, mixer.channels + inner), ("in_proj_ba", hidden, 2 * mixer.heads)]
        else:
            linears.append(("in_proj", hidden, mixer.channels + (inner + mixer.heads if mixer.heads else 2 * inner)))
        linears.append(("out_proj", inner, hidden))
    if kind.feeds == "dense":
        weights = feed_forward_weights(read, "dense")
        width = weights.last // hidden
        if weights.all // weights.last > 2:  # three equal products: one is a gate
            linears.append(("gate_proj", hidden, width))
        linears += [("up_proj", hidden, width), ("down_proj", width, hidden)]
    return linears


def _tower_numbers(config: object, settings: MemorySettings) -> "tuple[Numbers, EncoderShape | None]":
    """Count the parameters of an encoder's tower and projector, and return them with the tower's shape.

    Without images there are none, and the shape is None. Settings say whether tower and projector are trained. Tower
    and projector are sharded over all slots and not split over tp, so that `whole` and `share` are all of them.
    """
    if not settings.encoder_rows:
        return Numbers(), None
    from longspan.plan.items.encoder_shape import EncoderShape

    shape = EncoderShape.of(config)
    tower, projector = float(shape.embed_weights + shape.block_weights), float(shape.projector_weights)
    trained = {"all": tower + projector, "projector": projector, "none": 0.0}[settings.encoder_trained]
    return Numbers(tower + projector, trained, 0.0, tower + projector), shape


def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Divide layers over pipeline stages as `prepare` cuts a model: embedding and head count as a layer each.

    >>> [len(part) for part in stage_layers(36, 4)]
    [8, 9, 10, 9]

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


def make_stages(layers: int, home: Layout, settings: MemorySettings, *, of_depths: int = 0) -> tuple[Stage, ...]:
    """Return what each pipeline rank holds of `layers` decoder layers, and of `of_depths` layers that follow them.

    Decoder layers are divided as `stage_layers` does, and layers of depths go to the last stage. With virtual stages
    rank r has stages r, r + pp and so on, or for ZBV stage r from the front and stage r from the end.
    """
    stages = home.pp * (settings.vpp if home.pp > 1 else 1)
    parts: Sequence[Sequence[int]] = stage_layers(layers, stages)
    parts = [tuple(layers_of_stage) for layers_of_stage in parts]
    parts[-1] = (*parts[-1], *range(layers, layers + of_depths))
    folded = settings.schedule == "zbv" and home.pp > 1  # one rank has one stage, not twice the same
    ranks: list[Stage] = []
    for rank in range(home.pp):
        numbers = (rank, stages - 1 - rank) if folded else tuple(range(rank, stages, home.pp))
        chunks = tuple(tuple(parts[i]) for i in numbers)
        ranks.append(Stage(chunks, embeds=0 in numbers, predicts=stages - 1 in numbers))
    return tuple(ranks)
