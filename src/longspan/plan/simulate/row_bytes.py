"""Bytes that a row takes between its forward and its backward pass, by what of a layer is recomputed, and on the wire.

What layers keep is that of the plan of memory (`plan/memory/`), for one row. Not counted here: weights, gradients,
optimizer states, logits, and of a layer that is being recomputed what it holds meanwhile; `MemoryPlan` counts them.
"""

from dataclasses import dataclass
from typing import Any, Literal

from longspan.errors import PlanError
from longspan.plan.memory.layer_tapes import LayerTapes
from longspan.plan.memory.loads import SlotLoad
from longspan.plan.memory.parameters import reason_uncounted
from longspan.plan.memory.settings import MemorySettings
from longspan.plan.memory.step_peak import bytes_kept
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.layers import depth_kinds, has_shared_blocks, layer_kinds

Checkpointing = Literal["full", "selective", "none"]

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

        `checkpointing` has the values of `train.activation_checkpointing`; heads are `exchanged` under a2a. Layers
        of Zamba 2 read the embedding too, which stages hand on and keep. Each of `depths` of multi-token prediction
        adds its own layers, and keeps the two rows that the input of its layers is projected from, before and after
        they are joined. Raises PlanError without hidden_size, and under "none" for layers whose rows are not
        counted.
        """
        read = ConfigReader.of(config)
        read.check_counts("hidden_size")
        if checkpointing == "none" and (reason := reason_uncounted(config)):
            raise PlanError(
                f'what rows keep under checkpointing "none" is not counted here: {reason}; use "selective" or "full"'
            )
        row = read.count("hidden_size") * bytes_per_value
        with_embedding = has_shared_blocks(read)
        tapes = LayerTapes(read, MemorySettings(compute_bytes=bytes_per_value))
        # One row; under a2a it is exchanged too, with its key/value heads as they are, without copies.
        load = SlotLoad(rows=1, exchanged_rows=int(exchanged), exchanged_key_rows=float(exchanged))
        kinds = layer_kinds(read) + depth_kinds(read) * depths
        return cls(
            activations=sum(
                row if checkpointing == "full" else bytes_kept(tapes.make_tape(kind, load), checkpointing)
                for kind in kinds
            )
            + 4 * depths * row,  # two rows, before and after they are joined
            between_stages=(1 + with_embedding) * row,
            on_each_stage=with_embedding * row,
        )
