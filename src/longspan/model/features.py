"""What `prepare` may do to a model, a feature at a time. The file of a feature that is off is not imported.

A new feature is a file with its `Feature`, and a row of `FEATURES`.
"""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from longspan.model.adapted_modules import is_peft_module
from longspan.model.feature import Call, Feature
from longspan.model.kinds import (
    SCORE_HEADS,
    attends_to_chosen_keys,
    attends_to_entries,
    expert_modules,
    is_indexer,
    is_mixer,
)
from longspan.model.layers import MTP

# When a feature is on, and where its class is, in the order in which features act.
FEATURES: list[tuple[Callable[[Call], Any], str]] = [
    (lambda call: MTP in call.model._modules, "longspan.model.mtp.depths:MtpFeature"),
    (
        lambda call: any(kind.__name__.endswith(SCORE_HEADS) for kind in type(call.model).__mro__),
        "longspan.model.score_heads:ScoreHeadFeature",
    ),
    (lambda call: call.options.float8, "longspan.model.float8_layers:Float8Feature"),
    (
        lambda call: any(map(is_peft_module, call.model.modules())),
        "longspan.model.adapters.adapter_rules:AdapterFeature",
    ),
    (
        lambda call: call.world.device.type == "cuda" or call.options.fused_norms not in ("auto", "off"),
        "longspan.model.seams.norms:NormFeature",
    ),
    (
        lambda call: (
            call.options.compiled not in ("none", "auto")
            or (call.options.compiled == "auto" and call.world.device.type == "cuda")
        ),
        "longspan.model.compiled_layers:CompiledFeature",
    ),
    (lambda call: any(map(is_mixer, call.model.modules())), "longspan.model.seams.mixers:MixerFeature"),
    (
        lambda call: any(is_indexer(module) or attends_to_chosen_keys(module) for module in call.model.modules()),
        "longspan.model.seams.chosen_keys.indexers:IndexerFeature",
    ),
    (lambda call: any(map(attends_to_entries, call.model.modules())), "longspan.model.seams.entries:EntryFeature"),
    (
        lambda call: call.world.home.pp > 1 or call.options.changes_any("virtual_stages", "pipeline_schedule"),
        "longspan.model.pipeline.pipeline:PipelineFeature",
    ),
    (
        lambda call: call.world.home.tp > 1 or call.options.sequence_parallel,
        "longspan.model.tensor_parallel.split_model:TensorParallelFeature",
    ),
    (lambda call: call.options.mlp_tile_tokens, "longspan.model.activations.tiles:TileFeature"),
    (
        lambda call: (
            call.options.activation_checkpointing not in (False, "none")
            or call.options.changes_any("offload_activations", "checkpoint_policies", "segment_layers")
        ),
        "longspan.model.activations.recompute:RecomputationFeature",
    ),
    (
        lambda call: call.options.changes_any("frozen"),
        "longspan.model.frozen.frozen_weights:FrozenFeature",
    ),
    (
        lambda call: call.world.home.ep > 1 or expert_modules(call.model),
        "longspan.model.experts.moe:ExpertFeature",
    ),
    (lambda call: True, "longspan.model.sharding:ShardingFeature"),
    (lambda call: call.options.offload_weights, "longspan.model.host_weights:HostWeightsFeature"),
]


def features_of(call: Call) -> tuple[Feature, ...]:
    """Make the features that are on in a call of `prepare`. Raises what they raise for options that do not fit."""
    return tuple(resolve_name(name)(call) for is_on, name in FEATURES if is_on(call))
