"""Changes of a model's cost by the settings of a run, and for layers that run forward twice."""

from dataclasses import dataclass, replace
from typing import Literal

from longspan.plan.cost.cost import Cost
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
    cost: Cost, shape: ModelShape, kind: Recomputation, layers: int = 0, *, frozen: bool = False
) -> Cost:
    """Return a model's cost if `layers` layers (0: all) run forward again in backward, by what they keep of attention.

    Layers of "selective" keep its output and the log-sum-exp, those of "exchanged" also what `a2a` types exchanged, and
    those of "full" nothing; "none" runs no layer again.

    Forward is a third of what a layer's weights take (2 FLOPs of 6), and of "full" 2 products in attention of 7, one of
    the ring's two passes and a third of its bytes, and one of two exchanges of heads. Under "selective" an exchange has
    the queries, keys and values once more. torch stops before the last product of a dense layer, from which nothing is
    kept. Of `frozen` weights gradients are not computed: 2 FLOPs of 6. An evaluation recomputes nothing.
    """
    if kind == "none" and not frozen:
        return cost
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
        forward=cost.forward_only(),
    )


def recomputation_share(shape: ModelShape, kind: Recomputation, layers: int) -> float:
    """Return the share of a model's layers that run forward twice, if `layers` of them do (0: all); 0 under "none"."""
    return min(layers or shape.decoder_layers, shape.decoder_layers) / shape.decoder_layers if kind != "none" else 0.0
