"""How many numbers of parameters each layer has, on a rank before FSDP2 shards them, and which of them are trained."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    """How many parameters a part of a model has on a rank, and how many of them are trained.

    `whole` are those that a rank gathers (experts divided by ep, the rest by tp). `share` are those that FSDP2 divides
    over its shards: a tensor-parallel rank's part, with the experts of all ep ranks.
    """

    whole: float = 0.0
    trained: float = 0.0
    share: float = 0.0
    trained_share: float = 0.0

    def __add__(self, other: "Numbers") -> "Numbers":
        """The numbers of two parts of a model."""
        return Numbers(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Stage:
    """What the ranks of one pipeline position hold: layers by index (depths behind the last), and parts of the root."""

    layers: tuple[int, ...]
    embeds: bool
    predicts: bool


@dataclass(frozen=True)
class ModelNumbers:
    """The parameters of a model: of every layer, those of depths of multi-token prediction last, and what is around.

    `head` are those of the output projection, and of the embedding, which has as many. Each depth has `depth_layers`.
    """

    kinds: tuple[LayerKind, ...]
    layers: tuple[Numbers, ...]
    decoder_layers: int
    depth_layers: int
    head: Numbers
    tied: bool
    tower: Numbers
    tower_shape: "EncoderShape | None"

    @classmethod
    def of(cls, config: object, home: Layout, settings: MemorySettings) -> "ModelNumbers":
        """Count the parameters of a configuration under a home. Raises PlanError for a model that cannot be counted.

        The first layer of a depth also has the projection of two joined rows of the hidden size to one. A tower with
        its projector counts where images are encoded: it is sharded over all slots, and not split over tp.
        """
        read = ConfigReader.of(config)
        read.check_counts("hidden_size", "vocab_size")
        for uncounted, name in ((has_shared_blocks, "shared blocks"), (has_latent_attention, "latent attention")):
            if uncounted(read):
                raise PlanError(f"{read.where} has {name}, whose memory no configuration tells")
        ModelShape.of(config)  # for its error
        hidden, of_depth = read.count("hidden_size"), depth_kinds(read)
        kinds = layer_kinds(read)
        mixer = read_mixer_shape(read) if any(kind.mixes for kind in kinds) else None

        def matrix(weights: float) -> Numbers:
            trained = weights * settings.trains_all
            return Numbers(weights, trained, weights, trained)

        first, *others = (_layer_numbers(read, kind, mixer, home, settings) for kind in of_depth)
        depths = [first + matrix(2 * hidden * hidden), *others] * settings.depths
        tower, shape = Numbers(), None
        if settings.encoder_rows:
            from longspan.plan.items.encoder_shape import EncoderShape

            shape = EncoderShape.of(config)
            weights = shape.embed_weights + shape.block_weights + shape.projector_weights
            trained = {"all": weights, "projector": shape.projector_weights, "none": 0}[settings.encoder_trained]
            tower = Numbers(weights, trained, weights, trained)
        return cls(
            kinds=kinds + of_depth * settings.depths,
            layers=(*(_layer_numbers(read, kind, mixer, home, settings) for kind in kinds), *depths),
            decoder_layers=len(kinds),
            depth_layers=len(of_depth),
            head=matrix(hidden * read.count("vocab_size") / home.tp),
            tied=bool(read.value("tie_word_embeddings")),
            tower=tower,
            tower_shape=shape,
        )

    def root_numbers(self, stage: Stage) -> Numbers:
        """Count the parameters of embedding and head on a stage; a stage with both has tied ones once."""
        count = stage.embeds + stage.predicts
        return sum([self.head] * (min(1, count) if self.tied else count), Numbers())


def _layer_numbers(
    read: ConfigReader, kind: LayerKind, mixer: MixerShape | None, home: Layout, settings: MemorySettings
) -> Numbers:
    """Linears are split over tp, experts over ep; the two norms are on every rank. With adapters these alone are
    trained: rank · (inputs + outputs) of each linear that has one. `all` of Weights has only the experts that a token
    visits, so that experts are counted apart.
    """
    parts = [attention_weights(read)] if kind.attention else []
    if kind.mixes and mixer:
        parts.append(Weights(mixer.weights, mixer.last))
    parts.append(feed_forward_weights(read, kind.feeds))
    experts = sum(weights.of_experts + weights.unvisited for weights in parts)
    dense = sum(weights.all - weights.of_experts for weights in parts)
    norms = (1 + bool(kind.feeds)) * read.count("hidden_size")
    whole, share = dense / home.tp + norms + experts / home.ep, (dense + experts) / home.tp + norms
    if settings.trains_all:
        return Numbers(whole, whole, share, share)
    linears = _adapter_linears(read, kind, mixer)
    widths = sum(width_in + width_out for name, width_in, width_out in linears if settings.has_adapter(name))
    adapters = settings.lora_rank * widths / home.tp
    return Numbers(whole + adapters, adapters, share + adapters, adapters)


def _adapter_linears(read: ConfigReader, kind: LayerKind, mixer: MixerShape | None) -> list[tuple[str, float, float]]:
    """The name of each linear that adapters go into, and the widths of its input and output.

    Widths that a configuration does not name follow from the counted weights. Attention has a gate as wide as its
    weights beyond the four projections. A mixer's input projections make what the convolution reads (`channels`), a
    gate, and a number for each head (two in a delta net); those of short convolutions, without heads, two gates.
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
        gate_and_up = ("gate_proj", "up_proj") if weights.all // weights.last > 2 else ("up_proj",)
        linears += [*((name, hidden, width) for name in gate_and_up), ("down_proj", width, hidden)]
    return linears


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


def make_stages(numbers: ModelNumbers, home: Layout, settings: MemorySettings) -> tuple[Stage, ...]:
    """Return what each pipeline rank holds of a model; layers of depths are on the last stage.

    With virtual stages rank r has stages r, r + pp and so on, or for ZBV the r-th from the front and from the end.
    """
    count = home.pp * (settings.vpp if home.pp > 1 else 1)
    parts: list[Sequence[int]] = [*stage_layers(numbers.decoder_layers, count)]
    parts[-1] = range(parts[-1][0], len(numbers.layers))
    stages = list[Stage]()
    for rank in range(home.pp):
        folded = settings.schedule == "zbv" and home.pp > 1  # one rank has one stage, not twice the same
        chunks = (rank, count - 1 - rank) if folded else range(rank, count, home.pp)
        layers = tuple(layer for chunk in chunks for layer in parts[chunk])
        stages.append(Stage(layers, embeds=0 in chunks, predicts=count - 1 in chunks))
    return tuple(stages)
