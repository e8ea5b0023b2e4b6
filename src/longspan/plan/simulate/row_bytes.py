"""Bytes that a row takes between its forward and its backward pass, by what of a layer is recomputed, and on the wire.

What is not a row's is not counted: weights, gradients, optimizer states, logits, and of a layer that is being
recomputed what it holds meanwhile.
"""

from dataclasses import dataclass
from typing import Any, Literal

from longspan.errors import PlanError
from longspan.plan.cost.config_reader import ConfigReader
from longspan.plan.cost.layers import feed_forward_weights, has_shared_blocks, layer_kinds, widths_of

Checkpointing = Literal["full", "selective", "none"]

NORMED_HEADS = ("qwen3",)  # families with a norm of each query and key, which keep them from before it as well
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """Bytes of one row; the defaults are Qwen3-8B in bfloat16, each layer recomputed in the backward pass.

    `activations`: bytes that the backward pass needs of a row in all layers together. `on_each_stage`: bytes that every
    stage holds as well. `between_stages`: bytes that a pipeline sends on.

    >>> RowBytes.of({"model_type": "zamba2", "hidden_size": 4096, "num_hidden_layers": 36}).between_stages
    16384
    """

    activations: float = 36 * 4096 * 2
    between_stages: float = 4096 * 2
    on_each_stage: float = 0.0

    @classmethod
    def of(
        cls,
        config: Any,
        *,
        bytes_per_value: int = 2,
        depths: int = 0,
        checkpointing: Checkpointing = "full",
        exchanged: bool = False,
    ) -> "RowBytes":
        """Count the bytes of a row of a model: of a configuration object or dict, a config.json or its folder.

        `checkpointing` has the values of `train.activation_checkpointing`, and heads are `exchanged` under a2a. Layers
        of Zamba 2 read the embedding too, which stages hand on and keep. Each of `depths` of multi-token prediction
        keeps the input of its layer and the two rows that this is projected from, before and after they are joined.
        Raises PlanError without hidden_size, and under "none" for layers whose rows are not counted.
        """
        read = ConfigReader.of(config)
        read.require("hidden_size")
        row = read.count("hidden_size") * bytes_per_value
        with_embedding = has_shared_blocks(read)
        layers = len(layer_kinds(read)) + depths
        return cls(
            activations=layers * row
            + 4 * depths * row
            + _bytes_beside_inputs(read, checkpointing, exchanged, depths, bytes_per_value),
            between_stages=(1 + with_embedding) * row,
            on_each_stage=with_embedding * row,
        )


def _bytes_beside_inputs(
    read: ConfigReader, checkpointing: Checkpointing, exchanged: bool, depths: int, bytes_per_value: int
) -> float:
    """Count the bytes that all layers keep of a row in addition to their inputs."""
    kinds = layer_kinds(read)
    kinds += kinds[-1:] * depths
    if checkpointing == "full" or not kinds:
        return 0.0
    query, key = widths_of(read) if any(kind.attention for kind in kinds) else (0, 0)
    output = query * bytes_per_value + 4 * read.count("num_attention_heads")  # and the log-sum-exp in float32
    inputs = (query + 2 * key) * bytes_per_value
    attending = sum(bool(kind.attention) for kind in kinds)
    if checkpointing == "selective":
        return attending * (output + exchanged * inputs)
    if has_shared_blocks(read) or any(kind.mixes or kind.feeds == "experts" for kind in kinds):
        raise PlanError(
            'activations of state-space layers, experts and shared blocks are not counted under checkpointing "none"; '
            'use "selective" or "full", or let train.max_tokens_per_slot = "auto" measure them'
        )
    # Behind what the layer starts from: two norms' outputs, the input of the second, and of a gated MLP both products,
    # the activation, and their product. Norms are taken to keep only their inputs, as fused ones do.
    hidden, fed = read.count("hidden_size"), feed_forward_weights(read, "dense")
    products, width = fed.all // fed.last, fed.last // hidden
    normed = (query + key) * bytes_per_value * read.family.startswith(NORMED_HEADS)
    return (
        attending * (output + inputs + normed)
        + len(kinds) * (3 * hidden + (2 * products - 2) * width) * bytes_per_value
    )
