"""Changes of a model's cost: by the settings of a run, for layers that run forward twice, and for rows of images that
see each other.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from longspan.errors import PlanError
from longspan.plan.cost.cost import Cost
from longspan.plan.cost.model_flops import later_pairs
from longspan.plan.shape.model_shape import ModelShape

Recomputation = Literal["none", "exchanged", "selective", "full"]
Compiled = Literal["auto", "layers", "modules", "none"]
COMPILED_WIDTH = 2048
"""Features of hidden states from which "auto" compiles: below, a layer's kernels take less than the host.

At 1,024 features and 8,192 rows a slot a step takes 1.04 s compiled and 0.99 s not (bench/records/first-steps-2xH200).
"""


def resolve_compiled_parts(word: Compiled, *, hidden: int, tp: int) -> Compiled:
    """Return what of layers is compiled on GPUs, where "auto" leaves the choice to the width and tensor parallelism.

    >>> resolve_compiled_parts("auto", hidden=4096, tp=1), resolve_compiled_parts("auto", hidden=4096, tp=2)
    ('layers', 'none')
    """
    if word != "auto":
        return word
    return "layers" if tp == 1 and hidden >= COMPILED_WIDTH else "none"


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """What of a run changes the time of a model: the second argument of `Machine.cost`.

    `recomputation` of `recomputed_layers` layers (0: all), `frozen` weights under adapters, `depths` of multi-token
    prediction, `bytes_per_number` of rows and weights, `tp` ranks of a slot, `ep` slots that share experts, and only
    `forward` passes. FSDP2 shards weights over `shards` slots (0: every slot has all of them, without FSDP2), in
    `dp_replicate` copies, gathers them for every micro-batch's forward pass, again for its backward pass unless
    `gathered_once`, and sums gradients. `weight_ranks` of a slot share its weights (0: those of tp). In `free` mode
    they are gathered and summed once a step, also over copies: `Cost.with_closing` prices that. Only the `target_share`
    of the rows predict a token: others have no logits. Layers multiply in `float8` but for gradients of weights, and
    are `compiled` as in [train] on GPUs.
    """

    recomputation: Recomputation = "none"
    recomputed_layers: int = 0
    frozen: bool = False
    depths: int = 0
    bytes_per_number: int = 2
    tp: int = 1
    ep: int = 1
    shards: int = 0
    free: bool = False
    weight_ranks: int = 0
    dp_replicate: int = 1
    gathered_once: bool = False
    target_share: float = 1.0
    float8: bool = False
    compiled: Compiled = "none"
    forward: bool = False


def with_recomputation(
    cost: Cost, config: Any, kind: Recomputation, layers: int = 0, *, frozen: bool = False, depths: int = 0
) -> Cost:
    """Return a model's cost if `layers` layers (0: all) run forward again in backward, by what they keep of attention.

    Layers of "selective" keep its output and the log-sum-exp, those of "exchanged" also what `a2a` types exchanged, and
    those of "full" nothing; "none" runs no layer again.

    >>> with_recomputation(cost, "Qwen3-8B/config.json", "selective").linear_seconds  # doctest: +SKIP

    Forward is a third of what a layer's weights take (2 FLOPs of 6), and of "full" 2 products in attention of 7, one of
    the ring's two passes and a third of its bytes, and one of two exchanges of heads. Under "selective" an exchange has
    the queries, keys and values once more (what it has of outputs is a number of each row and head, and not counted).
    torch stops before the last product of a dense layer, from which nothing is kept. Of `frozen` weights, under
    adapters, gradients are not computed: 2 FLOPs of 6. An evaluation recomputes nothing: `forward` is that of the cost
    as it was. State-space layers run again under each kind.
    """
    if kind == "none" and not frozen:
        return cost
    shape, forward = ModelShape.of(config, depths=depths), cost.forward_only()
    share = recomputation_share(shape, kind, layers)
    full, selective = (share if kind == word else 0.0 for word in ("full", "selective"))  # shares of the layers
    keys = shape.key_width / max(1, shape.query_width + shape.key_width)  # of what is exchanged
    scans = cost.states.scan_seconds if cost.states else 0.0
    recomputed_share = share * shape.recomputed_weights / shape.weights
    weight_factor = 1 + (recomputed_share - frozen) * 2 / 6
    return replace(
        cost,
        linear_seconds=(cost.linear_seconds - scans) * weight_factor + scans * (1 + share / 3),
        real_row_seconds=cost.real_row_seconds * weight_factor,
        attention_seconds=cost.attention_seconds * (1 + full * 2 / 7),
        ring_step_seconds=cost.ring_step_seconds * (1 + full / 2),
        ring_bytes=cost.ring_bytes * (1 + full * (cost.network.block_share if cost.network else 1 / 3)),
        exchange_bytes=cost.exchange_bytes * (1 + full / 2 + selective * (1 + keys) / 4),
        merge_seconds=cost.merge_seconds * (1 + full * 2 / 7),
        copy_seconds=cost.copy_seconds * (1 + full * 2 / 7),
        states=cost.states and cost.states.with_recomputation(share),
        forward=forward,
    )


def recomputation_share(shape: ModelShape, kind: Recomputation, layers: int) -> float:
    """Return the share of a model's layers that run forward twice, if `layers` of them do (0: all); 0 under "none"."""
    return min(layers or shape.decoder_layers, shape.decoder_layers) / shape.decoder_layers if kind != "none" else 0.0


def with_spans(cost: Cost, config: Any, spans: Iterable[int], tokens: int) -> Cost:
    """Return a model's cost for documents of `tokens` rows in all, in which the rows of a span see each other.

    `spans` are the rows of each span.

    >>> cost = with_spans(cost, "gemma-3-4b-it/config.json", [256] * 64, 32768)  # doctest: +SKIP

    The seconds of all pairs, at the rate of attention, are spread over all rows: 256 rows of an image take Gemma 3
    (4B) 0.4% more than 256 rows of text. A cost stays as it is if the rows of an image do not see each other, if the
    configuration cannot be priced, or if no layer has full attention, which tells what a pair takes.
    """
    try:
        shape = ModelShape.of(config)
    except PlanError:
        return cost
    full = shape.layers - shape.window_layers - shape.chunk_layers
    if not (shape.span_layers and full and tokens):
        return cost
    pair_seconds = 2 * cost.attention_seconds / full  # causal attention over L rows has L² / 2 pairs
    added = shape.span_layers * pair_seconds * later_pairs(spans) / tokens
    forward = cost.forward and with_spans(cost.forward, config, spans, tokens)
    return replace(cost, linear_seconds=cost.linear_seconds + added, forward=forward)


def scale_times(cost: Cost, factor: float, source: str) -> Cost:
    """Return the cost of a machine on which everything takes `factor` times as long, for as many bytes.

    `source` names that machine.

    >>> scale_times(Cost(), 2.0, "GPUs of half the speed").micro_batch_seconds
    0.02
    """
    constants = {
        name: value / factor if name.endswith("_per_second") else value * factor
        for name, value in cost.constants().items()
        if name not in ("ring_bytes", "exchange_bytes")
    }
    forward = cost.forward and scale_times(cost.forward, factor, source)
    states = cost.states and cost.states.scale_times(factor)
    network = cost.network and cost.network.scale_times(factor)
    return replace(cost, **constants, source=source, forward=forward, states=states, network=network)
