"""How long documents a rotary model was trained on, and the scaling of its rotary frequencies for longer ones.

Tables of learnt positions are `seams/call_rules.py`'s business. Rope types that choose frequencies by a document's
length ("dynamic", "longrope") are in `seams/forwards/rope_by_length.py`.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from transformers import PreTrainedConfig

from longspan.errors import ModelError
from longspan.plan.shape.model_shape import has_mixers

SCALINGS = ("yarn", "linear")
_STEP = 0.25  # of factors that are chosen here


def position_limit(config: PreTrainedConfig) -> int | None:
    """Return the longest document, in tokens, that a configuration and its scaling allow; None without a limit.

    llama3 and longrope scale up to `max_position_embeddings`, yarn to `original_max_position_embeddings` x `factor`
    where that is more, linear and dynamic to `max_position_embeddings` x `factor`, as inference engines read them.
    Hybrids whose attention has no positions have no limit, whatever they name (`has_no_positions`).
    """
    if has_no_positions(config):
        return None
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    rope = _flat_parameters(config) or {}
    kind, factor = rope.get("rope_type", "default"), rope.get("factor") or 1.0
    if kind in ("linear", "dynamic"):
        return int(limit * factor)
    if kind == "yarn":
        return max(limit, int(rope.get("original_max_position_embeddings", limit) * factor))
    return limit


def has_no_positions(config: PreTrainedConfig) -> bool:
    """Return whether a hybrid's attention has no positions: Nemotron-H, Kimi Linear, Granite 4-H, some Zamba 2.

    Its other layers carry the order of rows in their states, which suit documents of any length.
    """
    text = config.get_text_config()
    if not has_mixers(text):
        return False
    kind = getattr(text, "position_embedding_type", "rope")  # a key of Granite: without positions None or "nope"
    rotary = getattr(text, "rope_parameters", None) is not None and kind == "rope"
    return not rotary or not getattr(text, "use_mem_rope", True)  # a key of Zamba 2


def smallest_factor(config: PreTrainedConfig, longest: int) -> float:
    """Return the smallest multiple of a quarter by which the limit reaches a document of `longest` tokens."""
    limit = position_limit(config)
    return 1.0 if limit is None else max(1.0, math.ceil(longest / limit / _STEP) * _STEP)


def scale_rope(config: PreTrainedConfig, kind: str, factor: float) -> PreTrainedConfig:
    """Copy a configuration, with rotary frequencies scaled for documents `factor` times as long.

    >>> config = scale_rope(AutoConfig.from_pretrained(folder), "yarn", 4.0)

    "yarn" keeps high frequencies and scales attention logits up (its attention factor, 0.1 ln factor + 1); "linear"
    divides all frequencies by the factor. Stock transformers reads either from the saved config.json. Raises ModelError
    for another kind, and for a model that has no rotary positions or a scaling of its own.
    """
    name = config.model_type
    if kind not in SCALINGS:
        raise ModelError(f"rope scaling {kind!r} is not known; use {' or '.join(SCALINGS)}")
    if has_no_positions(config):
        raise ModelError(
            f"{name} has no rotary positions that {kind!r} could scale, and knows documents of any length; leave "
            "model.rope_scaling empty"
        )
    config = deepcopy(config)
    limit, rope = position_limit(config), _flat_parameters(config)
    if limit is None or rope is None:
        raise ModelError(
            f"{name} cannot be scaled by rope {kind!r}: its configuration has no max_position_embeddings and one "
            "rope_parameters for all layers; train on shorter documents (data.max_document_tokens)"
        )
    if (old_type := rope.get("rope_type", "default")) != "default":
        raise ModelError(
            f"{name} has a rope scaling of its own ({old_type!r}, for documents of up to {limit} tokens), and a second "
            f"one, {kind!r}, cannot be put on it; leave model.rope_scaling empty, or edit its rope_parameters"
        )
    # without "type", the older name of "rope_type"
    scaled = {key: value for key, value in rope.items() if key != "type"} | {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = limit
        config.max_position_embeddings = int(limit * factor)  # for linear, readers multiply by the factor themselves
    config.rope_parameters = scaled
    config.validate_rope()
    return config


def rope_types(rope: Any) -> set[str]:
    """Return the types that rotary parameters name, under the present key or the older "type".

    They are of all layers, or nested by type of layer.
    """
    if not isinstance(rope, Mapping):
        return set()
    nested = (rope_types(values) for values in rope.values())
    return {str(rope[key]) for key in ("rope_type", "type") if key in rope}.union(*nested)


def _flat_parameters(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        return None
    return {**parameters, "rope_type": parameters.get("rope_type", parameters.get("type", "default"))}
