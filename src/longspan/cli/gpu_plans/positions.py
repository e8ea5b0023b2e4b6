"""How long documents a model's positions reach, by its config.json, and the key that scales them. No torch.

`longspan.model.seams.rope` reads the same from a configuration object of transformers, and the two must agree.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from longspan.cli.gpu_plans.run_on_gpus import RunOnGpus
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.model_shape import has_mixers

SCALED = "yarn"
BY_LAYER = ("rope_local_base_freq", "local_rope_theta")  # in files of models with positions by type of layer
WITHOUT_ROTARY = ("nemotron_h", "kimi_linear")  # hybrids


def position_limit(model: Any) -> int | None:
    """Return the longest document that a configuration stands for, its own scaling included; None if nothing limits it.

    >>> position_limit({"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
    163840
    """
    limit, rope = ConfigReader.of(model).count("max_position_embeddings"), _rope_parameters(model)
    if not limit or _lacks_positions(model):
        return None
    kind, factor = _rope_type(rope), rope.get("factor") or 1.0
    if kind in ("linear", "dynamic"):
        return int(limit * factor)
    if kind == "yarn":  # whose max_position_embeddings is the stretched length in some files
        return max(limit, int(rope.get("original_max_position_embeddings", limit) * factor))
    return limit


def can_scale(model: Any) -> bool:
    """Return whether model.rope_scaling can stretch the positions of a configuration.

    It can for text models whose layers share one kind of rotary positions that their own configuration does not scale.
    """
    reader = ConfigReader.read_whole(model)
    by_layer = any(reader.value(name) is not None for name in BY_LAYER) or _is_nested(reader.value("rope_parameters"))
    is_text = reader.value("text_config") is None
    return is_text and not by_layer and not _lacks_positions(model) and _rope_type(_rope_parameters(model)) == "default"


def _rope_parameters(model: Any) -> Mapping[str, Any]:
    """Return the rotary parameters that all layers share; {} if there are none, or if types of layers differ in them.

    Versions of transformers name them rope_parameters or, before, rope_scaling.
    """
    reader = ConfigReader.read_whole(model)
    for name in ("rope_parameters", "rope_scaling"):
        value = reader.value(name)
        if isinstance(value, Mapping) and not _is_nested(value):
            return value
    return {}


def _is_nested(rope: Any) -> bool:
    """Return whether rotary parameters are tables, one for each type of layer."""
    return isinstance(rope, Mapping) and any(isinstance(inner, Mapping) for inner in rope.values())


def _rope_type(rope: Mapping[str, Any]) -> str:
    """Return the name of the scaling, whose key is `type` in older files; "default" is none."""
    return str(rope.get("rope_type", rope.get("type", "default")))


def _lacks_positions(model: Any) -> bool:
    """Return whether a hybrid's attention has no rotary positions, so that they limit no document."""
    reader = ConfigReader.of(model)
    if not has_mixers(model):
        return False
    has_other_type = (reader.value("position_embedding_type") or "rope") != "rope"  # a key of Granite 4-H
    is_switched_off = reader.family == "zamba2" and not reader.value("use_mem_rope")  # off by default in Zamba 2
    return has_other_type or reader.family in WITHOUT_ROTARY or is_switched_off


def scale_positions(run: RunOnGpus, longest: int) -> RunOnGpus:
    """Set model.rope_scaling where a document needs it, the key is not given, and the model can be scaled."""
    limit, model = position_limit(run.model), run.config.model
    if limit is None or longest <= limit or model.rope_scaling or not can_scale(run.model):
        return run
    return replace(run, config=replace(run.config, model=replace(model, rope_scaling=SCALED)))


def position_notes(run: RunOnGpus, longest: int) -> Iterator[str]:
    """Yield a line where documents are longer than the model's positions."""
    limit = position_limit(run.model)
    if limit is None or longest <= limit:
        return
    limit_text = f"the model knows {limit:,} positions (max_position_embeddings), fewer than {longest:,}"
    if run.config.model.rope_scaling:
        yield f"{limit_text}: model.rope_scaling = {run.config.model.rope_scaling!r} stretches them"
    else:
        yield f"{limit_text}, and model.rope_scaling cannot stretch them: longspan train refuses longer documents"
