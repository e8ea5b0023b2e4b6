"""The work of a model per token, from its configuration, and the model FLOPs of a step: the two sides of MFU.

FLOPs are counted as in PaLM (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B), but attention as it
is masked, and a state-space layer by its recurrence. Of latent attention Kimi's and that to chosen keys are priced,
Mamba 1 is not.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from longspan.errors import PlanError
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.key_choices import CHOOSING, KeyChoice, read_key_choice
from longspan.plan.shape.layers import (
    ATTENTION,
    MIXING,
    LayerKind,
    MixerShape,
    Weights,
    attention_widths,
    depth_kinds,
    experts_per_token,
    has_latent_attention,
    key_value_heads,
    layer_count_name,
    layer_kinds,
    layer_parts,
    layer_types,
    mixer_kind,
    read_mixer_shape,
    sliding_window,
)
from longspan.plan.shape.streams import read_streams

# Configurations show state-space layers by these.
_STATES = ("mamba_d_state", "ssm_state_size", "state_size")
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}


class ChoosingLayers(NamedTuple):
    """So many `layers` whose rows come by their keys by a `choice`, and how many `indexers` these have."""

    choice: KeyChoice
    layers: int
    indexers: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder that decide the time of a step.

    >>> config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    >>> ModelShape.of(config | {"vocab_size": 1000}).weights
    145920

    `weights` multiply every token (active experts only, the output projection once for each token that is predicted, no
    input embedding); `recomputed_weights` of them do so again if layers are recomputed (no output projection, and no
    last product of an MLP); `query_width` and `key_width` are `heads` and `kv_heads` x head size; `layers` attend to
    all earlier rows, `window_layers` of them only to the last `window`, `chunk_layers` to those of their own `chunk`
    positions, and those of `choosing` to keys that rows choose, or to entries; `forward_weights`, of indexers
    and of layers that run without gradients, multiply a row forward alone, and are none of `weights`, and
    `forward_layers` attend so to all rows. `key_width` is the mean of all layers. `mixer_layers` have the
    state-space layer `mixer`. The model has `decoder_layers` in all (0: as many as attend), `dense_layers` of them with
    an MLP without experts. `expert_weights` of `weights` are of experts. `stored_weights` are all that memory holds,
    `stored_experts` of them of experts. `expert_layers` have experts, to which they send `routed_numbers` for a row:
    its width for each expert that it visits, in all layers together. Rows are `hidden` wide, and between layers
    `streams` times that; a row has `logits` of the model and of all depths together.
    """

    layers: int
    weights: int
    query_width: int
    key_width: float
    recomputed_weights: int = 0
    window_layers: int = 0
    window: int = 0
    chunk_layers: int = 0
    chunk: int = 0
    choosing: tuple[ChoosingLayers, ...] = ()
    forward_weights: int = 0
    forward_layers: int = 0
    mixer_layers: int = 0
    mixer: MixerShape | None = None
    decoder_layers: int = 0
    heads: int = 1
    kv_heads: int = 1
    dense_layers: int = 0
    expert_weights: int = 0
    stored_weights: int = 0
    stored_experts: int = 0
    expert_layers: int = 0
    routed_numbers: int = 0
    hidden: int = 0
    streams: int = 1
    logits: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "decoder_layers", self.decoder_layers or self.layers)

    @property
    def full_layers(self) -> int:
        """Layers that attend to all earlier rows."""
        others = self.window_layers + self.chunk_layers + sum(row.layers for row in self.choosing)
        return self.layers - others

    @property
    def choice_messages(self) -> tuple[int, int]:
        """Exchanges of choices and entries of all layers, in a forward and in a backward pass."""
        forward, backward = (sum(row.layers * row.choice.messages[i] for row in self.choosing) for i in range(2))
        return forward, backward

    @property
    def sending_layers(self) -> float:
        """Layers that attend, of which one that runs forward alone sends and copies a third of what others do."""
        return self.layers + self.forward_layers / 3

    @property
    def forward(self) -> "ModelShape":
        """The shape of a forward pass alone, in which all layers that run count alike."""
        return replace(
            self,
            layers=self.layers + self.forward_layers,
            dense_layers=self.dense_layers + self.forward_layers,
            weights=self.weights + self.forward_weights,
            forward_layers=0,
            forward_weights=0,
        )

    @property
    def index_numbers(self) -> float:
        """Numbers of index keys, or of their pools, that a row sends for all layers, forward alone."""
        return sum(row.indexers * row.choice.size / row.choice.scored for row in self.choosing)

    @classmethod
    def of(cls, config: Any, *, mtp_layers: int = 0) -> "ModelShape":
        """Return the shape of a transformers configuration, an object or dict like one, a config.json or its folder.

        Each of the `mtp_layers` of multi-token prediction (`add_mtp`) adds the layers that the configuration names for
        a depth, or else one like the last, a projection from 2 · hidden to hidden, and the output projection once more.
        Raises PlanError naming the attributes that are missing, are no counts, or show layers that are not priced.
        """
        read = ConfigReader.read_language_model(config)
        mixer = read_mixer_shape(read)
        _check_layers_are_priced(read, mixer)
        kinds = layer_kinds(read)
        _check_needed_counts(read, kinds)
        kinds += depth_kinds(read) * mtp_layers if mtp_layers else ()
        hidden = read.count("hidden_size")
        window = sliding_window(read)
        chunk = read.count("attention_chunk_size")
        streams = read_streams(read)
        weights_of_kinds = dict[LayerKind, Weights]()
        for kind in dict.fromkeys(kinds):
            parts = layer_parts(read, kind, mixer)
            every, _, of_experts, unvisited = (sum(numbers) for numbers in zip(*parts, strict=True))
            # The layer's last product is that of its last part: MLP or experts, or else mixer, or else attention.
            last = parts[-1].last
            if streams:  # whose connection is behind it
                every += 2 * (streams.products + streams.mixed)
                last = streams.mixed
            weights_of_kinds[kind] = Weights(every, last, of_experts, unvisited)
        layers = [weights_of_kinds[kind] for kind in kinds]
        attention = [
            kind.attention for kind in kinds if kind.attention for _ in range((1 + kind.double) * kind.kept_runs)
        ]
        without_gradients = [kind.runs - kind.kept_runs for kind in kinds]
        widths = attention_widths(read) if attention else (0, 0)
        choosing = _read_choosing_layers(read, kinds)
        # Keys of other widths travel in layers that gather latents, or entries.
        key_widths = [widths[1]] * len(attention) + [
            layers * (choice.key_width - widths[1]) for choice, layers, _ in choosing
        ]
        key_width = sum(key_widths) / max(1, len(attention))
        index_weights = sum(choice.linears * indexers for choice, _, indexers in choosing)
        vocabulary = read.count("vocab_size")
        # Besides layers there are the output projection, which each depth multiplies by once more, the embedding, which
        # multiplies nothing, and the depths' projections.
        projections = 2 * hidden * hidden * mtp_layers
        end = streams.end_products if streams else 0
        mixed = 2 * streams.mixed * len(layers) if streams else 0
        active_outside_layers = hidden * vocabulary * (1 + mtp_layers) + projections + end
        embedding_and_head = (
            hidden * vocabulary * (1 if ConfigReader.read_whole_model(config).ties_embeddings else 2)
        )
        expert_layers = sum(kind.feeds == "experts" for kind in kinds)
        return cls(
            layers=len(attention),
            weights=sum(layer.all * kind.kept_runs for layer, kind in zip(layers, kinds, strict=True))
            + active_outside_layers,
            query_width=widths[0],
            key_width=int(key_width) if key_width == int(key_width) else key_width,
            recomputed_weights=sum(
                (layer.all - layer.last) * kind.kept_runs for layer, kind in zip(layers, kinds, strict=True)
            ),
            window_layers=attention.count("sliding_attention") if window else 0,
            window=window,
            chunk_layers=attention.count("chunked_attention") if chunk else 0,
            chunk=chunk,
            choosing=choosing,
            forward_weights=index_weights
            + sum(layer.all * runs for layer, runs in zip(layers, without_gradients, strict=True)),
            forward_layers=sum(without_gradients),
            mixer_layers=sum(kind.mixes for kind in kinds),
            mixer=mixer if any(kind.mixes for kind in kinds) else None,
            decoder_layers=len(kinds),
            heads=max(1, read.count("num_attention_heads")),
            kv_heads=1 if any(choice.latents for choice, *_ in choosing) else key_value_heads(read),
            dense_layers=sum(2 if kind.double else (kind.feeds == "dense") * kind.kept_runs for kind in kinds),
            expert_weights=sum(layer.of_experts for layer in layers),
            stored_weights=sum(layer.all + layer.unvisited for layer in layers)
            + (index_weights + embedding_and_head + projections + end - mixed),
            stored_experts=sum(layer.of_experts + layer.unvisited for layer in layers),
            expert_layers=expert_layers,
            routed_numbers=expert_layers * experts_per_token(read) * (read.count("moe_latent_size") or hidden),
            hidden=hidden,
            streams=streams.count if streams else 1,
            logits=vocabulary * (1 + mtp_layers),
        )


def _read_choosing_layers(read: ConfigReader, kinds: Sequence[LayerKind]) -> tuple[ChoosingLayers, ...]:
    types = dict.fromkeys(kind.attention for kind in kinds if kind.attention in CHOOSING)
    choices = {attention: read_key_choice(read, attention) for attention in types}
    return tuple(
        ChoosingLayers(
            choice,
            sum(kind.attention == attention for kind in kinds),
            sum(kind.chooses for kind in kinds if kind.attention == attention),
        )
        for attention, choice in choices.items()
        if choice
    )


def _check_layers_are_priced(read: ConfigReader, mixer: MixerShape | None) -> None:
    types = layer_types(read)
    unpriced = [read.family.unpriced] if read.family.unpriced else []
    if not unpriced and has_latent_attention(read) and not read.count("v_head_dim"):
        unpriced.append("latent attention")
    if mixer is None and read.value(*_STATES) is not None:
        unpriced.append(f"state-space layers{f' of {read.model_type}' if read.model_type else ''}, Mamba 1")
    priced = {*ATTENTION, "mlp", "moe"}
    if mixer:
        priced |= {*MIXING, "hybrid"}
    if read.value("ple_layer_ids"):
        unpriced.append("n-gram embeddings of layers")
    unpriced += [f"layers of type {kind!r}" for kind in sorted({*types} - priced)]
    if unpriced:
        advice = "leave --model out: the prices are then a Qwen3-8B's"
        raise PlanError(f"{read.where} has {' and '.join(unpriced)}, which no configuration prices; {advice}")


def _check_needed_counts(read: ConfigReader, kinds: Sequence[LayerKind]) -> None:
    """Counts of attention and of MLPs are needed only if some layer has such a part; if the configuration names no
    layers, all are."""
    needed = ["hidden_size"]
    if not layer_types(read):  # types would tell how many layers there are
        needed.append(layer_count_name(read))
    if not kinds or any(kind.attention for kind in kinds):
        needed.append("num_attention_heads")
    # Layers of a window or chunk would be priced as if they attended to all rows.
    attention = {kind.attention for kind in kinds}
    if "sliding_attention" in attention and not sliding_window(read):
        needed.append("sliding_window")
    if "chunked_attention" in attention:
        needed.append("attention_chunk_size")
    widths = ()
    if not kinds or any(kind.feeds for kind in kinds):
        widths = ("intermediate_size", "moe_intermediate_size")
    read.check_counts(*needed, "vocab_size", one_of=widths)


def read_query_heads(config: Any) -> int | None:
    """Read the query heads of a transformers configuration, an object or dict like one, a config.json or its folder.

    None if no layer attends, as in Mamba 2.

    Raises PlanError if it has no count of them.
    """
    read = ConfigReader.read_language_model(config)
    kinds = layer_kinds(read)
    if kinds and not any(kind.attention for kind in kinds):
        return None
    if not (heads := read.count("num_attention_heads")):
        raise PlanError(
            f"{read.where} has no num_attention_heads, which limit the degrees of a2a; name a model that has"
        )
    return heads


def has_mixers(config: Any) -> bool:
    """Return whether a configuration has state-space layers of a kind that groups of several ranks can run.

    Raises PlanError for what is no configuration.
    """
    read = ConfigReader.read_language_model(config)
    return bool(mixer_kind(read)) and any(kind.mixes for kind in layer_kinds(read))


class ExpertCounts(NamedTuple):
    """The experts of a layer, their attribute's name, and how many a token visits; 0, "" and 0 without experts. Those
    outside transformers' interface are not `shared` by slots (ep).
    """

    of_layer: int
    name: str
    of_token: int
    shared: bool = True


def read_experts(config: Any) -> ExpertCounts:
    """Read the experts of a transformers configuration, an object or dict like one, a config.json or its folder.

    Raises PlanError for what is no count.
    """
    read = ConfigReader.read_language_model(config)
    name, count = read.experts_attribute_and_count()
    return ExpertCounts(count, name, experts_per_token(read) if count else 0, read.family.experts_interface)


def experts_missing_text(ep: int, model: str, experts: ExpertCounts) -> str:
    """Return the words of an error: the `experts` of the model that `model` names, if any, cannot be dealt out."""
    own = "; its own are outside transformers' interface of experts" if experts.of_layer else ""
    return f"the home has ep {ep}, but {model} has no experts to deal out; use ep 1{own}"


# TFLOP/s of dense matrix products by the vendor's data sheets, without sparsity. The first name counts that
# `has_name` finds. tensorfloat32 is what torch computes float32 products in, if that is allowed.
_HOPPER = {"bfloat16": 989.0, "tensorfloat32": 494.0, "float32": 67.0}
_HOPPER_NVL = {"bfloat16": 835.0, "tensorfloat32": 417.0, "float32": 60.0}
PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B300", {"bfloat16": 2250.0, "tensorfloat32": 1125.0}),  # HGX B300
    ("B200", {"bfloat16": 2250.0, "tensorfloat32": 1100.0}),
    ("H200 NVL", _HOPPER_NVL),
    ("H200", _HOPPER),
    ("H100 NVL", _HOPPER_NVL),
    ("H100 PCIe", {"bfloat16": 756.0, "tensorfloat32": 378.0, "float32": 51.0}),
    ("H100", _HOPPER),
    ("A100", {"bfloat16": 312.0, "tensorfloat32": 156.0, "float32": 19.5}),
    ("L40S", {"bfloat16": 362.0, "tensorfloat32": 183.0, "float32": 91.6}),
    ("L4", {"bfloat16": 121.0, "tensorfloat32": 60.0, "float32": 30.3}),
    ("A10", {"bfloat16": 125.0, "tensorfloat32": 62.5, "float32": 31.2}),
    ("RTX A6000", {"bfloat16": 154.8, "tensorfloat32": 77.4, "float32": 38.7}),
    # NVIDIA's papers on the architectures of GA102, Ada and RTX Blackwell; products that sum in float32
    ("RTX 3090", {"bfloat16": 71.0, "tensorfloat32": 35.6, "float32": 35.6}),
    ("RTX 4090", {"bfloat16": 165.2, "tensorfloat32": 82.6, "float32": 82.6}),
    ("RTX 5090", {"bfloat16": 209.5, "tensorfloat32": 104.8, "float32": 104.8}),
    ("RTX PRO 6000", {"bfloat16": 503.8, "tensorfloat32": 251.9, "float32": 126.0}),
)


def model_flops(
    shape: ModelShape, lengths: Sequence[int], *, trains_all: bool = True, bases: Sequence[int] = ()
) -> int:
    """Count the FLOPs of forward and backward for documents of these lengths, by the convention above.

    Where a step does not `trains_all` weights, those under adapters have no gradients of their own: 4 FLOPs in place of
    6. Adapters do not count.

    >>> shape = ModelShape(layers=2, weights=1000, query_width=64, key_width=32)
    >>> model_flops(shape, [10, 20])
    587040

    Attention has two products, of queries and keys and of weights and values. Each takes 2 FLOPs for each visible pair
    and number of the query width, and backward twice that: 12 x query width x pairs. Where rows choose their keys, or
    see entries, those pairs count so, and what an indexer scores as a product without gradients, as its weights do. A
    state-space layer takes 3 times its `MixerShape.scan_flops` for each row. Rows of an image that see its later ones
    are not counted: less than 1 %. `bases` are the rows before each document's own, of prefixes that count as documents
    (`Plan.bases`).
    """
    if bases:
        paths = [base + length for base, length in zip(bases, lengths, strict=True)]
        return model_flops(shape, paths, trains_all=trains_all) - model_flops(shape, bases, trains_all=trains_all)
    pairs = sum(_window_pairs(length, length) for length in lengths)
    in_windows = sum(_window_pairs(length, shape.window) for length in lengths) if shape.window_layers else 0
    in_chunks = 0
    for length in lengths if shape.chunk_layers else ():
        chunks, last_rows = divmod(length, shape.chunk)
        in_chunks += chunks * _window_pairs(shape.chunk, shape.chunk) + _window_pairs(last_rows, last_rows)
    pairs_of_layers = shape.full_layers * pairs + shape.window_layers * in_windows + shape.chunk_layers * in_chunks
    index_flops = 2 * shape.forward_weights * sum(lengths) + 4 * shape.query_width * shape.forward_layers * pairs
    for choice, layers, indexers in shape.choosing:
        pairs_of_layers += layers * sum(map(choice.pairs, lengths))
        index_flops += 2 * choice.heads * choice.size * indexers * sum(map(choice.scored_pairs, lengths))
    scans = 3 * shape.mixer_layers * shape.mixer.scan_flops if shape.mixer else 0
    row_flops = (6 if trains_all else 4) * shape.weights + scans
    return row_flops * sum(lengths) + 12 * shape.query_width * pairs_of_layers + index_flops


def _window_pairs(length: int, window: int) -> int:
    """Rows see at most `window` rows, themselves included."""
    seen = min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def peak_tflops(device: str, dtype: str) -> float | None:
    """Return what a device does at most in this dtype, in 1e12 FLOP/s; None if `PEAK_TFLOPS` lacks device or dtype.

    float16 is as fast as bfloat16 on all devices of the table.

    >>> peak_tflops("NVIDIA H100 80GB HBM3", "bfloat16")
    989.0
    """
    for name, peaks in PEAK_TFLOPS:
        if has_name(device, name):
            return peaks.get("bfloat16" if dtype == "float16" else dtype)
    return None


def has_name(device: str, name: str) -> bool:
    """Return whether a device has this name, by words at which its own end: a GH200 is an H200, an A100 is no A10.

    >>> has_name("NVIDIA A100-SXM4-40GB", "A100 40"), has_name("NVIDIA A100-SXM4-40GB", "A10")
    (True, False)
    """
    words = [word.removesuffix("GB") for word in re.split("[ _-]", device)]
    return all(any(word.endswith(part) for word in words) for part in re.split("[ _-]", name))
