"""How long documents may be by a configuration: its positions and their scaling, as inference engines read them; and
lengths of documents that have the same rotary frequencies."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from longspan.layout import Integers
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.model_shape import has_mixers

# Factors that are chosen here are multiples of this step.
_STEP = 0.25
# Files of models with positions by type of layer have these keys.
_BY_LAYER = ("rope_local_base_freq", "local_rope_theta")


def position_limit(config: Any) -> int | None:
    """Return the longest document, in tokens, that a configuration and its scaling allow; None without a limit.

    `config` is a configuration of transformers, object or dict, a config.json or its folder.

    >>> position_limit({"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
    163840
    """
    reader = ConfigReader.read_language_model(config)
    limit = reader.count("max_position_embeddings")
    if not limit or has_no_positions(config):
        return None
    rope = shared_rope(reader) or {}
    factor = rope.get("factor") or 1.0
    # In some files of yarn max_position_embeddings is the stretched length.
    if rope.get("rope_type") == "yarn":
        return max(limit, int(rope.get("original_max_position_embeddings", limit) * factor))
    return int(limit * factor) if rope.get("rope_type") in ("linear", "dynamic") else limit


def smallest_scaling_factor(config: Any, longest: int) -> float:
    """Return the smallest multiple of a quarter by which the limit reaches a document of `longest` tokens."""
    limit = position_limit(config)
    return 1.0 if limit is None else max(1.0, math.ceil(longest / limit / _STEP) * _STEP)


def can_scale_positions(config: Any) -> bool:
    """Return whether model.rope_scaling can stretch the positions of a configuration. It can in text models whose
    layers all have one kind of rotary positions, if the configuration itself does not scale them.
    """
    reader = ConfigReader.read_whole_model(config)
    one_kind = all(reader.value(name) is None for name in ("text_config", *_BY_LAYER))
    return one_kind and not has_no_positions(config) and (shared_rope(reader) or {}).get("rope_type") == "default"


def has_no_positions(config: Any) -> bool:
    """Return whether a hybrid's attention has no positions, as in Nemotron-H, Kimi Linear and most of Granite 4-H."""
    if not has_mixers(config):
        return False
    reader = ConfigReader.read_language_model(config)
    family = reader.family
    is_switched_off = bool(family.rotary_key) and reader.value(family.rotary_key) not in (True, "rope")
    return is_switched_off or not family.rotary or reader.value("position_embedding_type") not in (None, "rope")


def shared_rope(reader: ConfigReader) -> dict[str, Any] | None:
    """Return the rotary parameters that all layers share, with a "rope_type"; None if types of layers have parameters
    of their own.
    """
    rope: Any = reader.value("rope_parameters", "rope_scaling")  # the second before version 5 of transformers
    rope = cast(Mapping[str, Any], rope) if isinstance(rope, Mapping) else {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        return None
    return {"rope_type": rope.get("type", "default"), **rope}  # "type" in older files


class LengthLimit(NamedTuple):
    """How a document's length decides its rotary frequencies: documents of up to `limit` rows have the same ones,
    longer documents others. These are one set for all longer documents, or, `of_each_length`, another set for each
    length.
    """

    limit: int
    of_each_length: bool

    def representative_lengths(self, lengths: Integers) -> Integers:
        """Return for each of these lengths one that stands for its frequencies: equal where the frequencies are."""
        return np.clip(lengths, self.limit, None if self.of_each_length else self.limit + 1)


def length_class(limits: Sequence[LengthLimit], length: int) -> tuple[int, ...]:
    """Return a key of the rotary frequencies of a document of this length: documents with equal keys have the same."""
    return tuple(int(limit.representative_lengths(np.asarray(length))) for limit in limits)
