"""A model's positions scaled to the longest document of a run (`model.rope_scaling`), or the document refused."""

from typing import Any

from transformers import PreTrainedConfig

from longspan.comm.all_ranks import LogLine
from longspan.config.sections import ModelConfig
from longspan.errors import ConfigError
from longspan.model.seams.rope import rope_types, scale_rope
from longspan.plan.shape.positions import has_no_positions, position_limit, smallest_scaling_factor


def scale_positions(
    configuration: PreTrainedConfig,
    model: ModelConfig,
    longest: int,
    origin: str,
    log: LogLine,
    *,
    cut_by: str = "data.max_document_tokens =",
) -> PreTrainedConfig:
    """Return a configuration whose positions are scaled by `model.rope_scaling` to a document of `longest` tokens, and
    log it; `model` may be a teacher's keys.

    The given configuration is returned where nothing has to be scaled. Raises ConfigError where the document is longer
    still, with its source `origin` and `cut_by`, the key that cuts documents, as the error writes it.
    """
    old_limit = position_limit(configuration)
    scaled = configuration
    configured = getattr(configuration.get_text_config(), "max_position_embeddings", None) or longest
    if longest > configured and has_no_positions(configuration):
        log(
            f"the longest document has {longest:,} tokens, more than max_position_embeddings, {configured:,}, which "
            f"limits nothing: attention of {configuration.model_type} has no positions"
        )
    factor = 1.0
    kind, own_factor = model.rope
    if kind:
        factor = own_factor or smallest_scaling_factor(configuration, longest)
        scaled = scale_rope(configuration, kind, factor)
    if factor > 1:
        log(
            f"rope: {kind} by {factor:g}, for documents of up to {position_limit(scaled):,} tokens; the "
            f"{model.SECTION} knows {old_limit:,}, and the longest document has {longest:,}"
        )
    elif kind:
        log(
            f"rope: the longest document has {longest:,} tokens and the {model.SECTION} knows {old_limit:,}: "
            f'{model.prefix}rope_scaling = "{model.rope_scaling}" changes nothing'
        )
        scaled = configuration
    _check_positions(configuration, scaled, model, longest, origin, cut_by)
    return scaled


def scale_as_saved(
    configuration: PreTrainedConfig, model: ModelConfig, saved: PreTrainedConfig
) -> PreTrainedConfig:
    """Return a configuration whose positions are scaled by `model.rope_scaling` as those of a run's `saved` one are.

    The given configuration is returned where the saved one is not scaled, and where it has a scaling of its own.
    """
    kind, _ = model.rope
    rope: Any = getattr(saved, "rope_parameters", None)
    own_types = rope_types(getattr(configuration, "rope_parameters", None))
    if not kind or rope_types(rope) != {kind} or own_types - {"default"}:
        return configuration
    return scale_rope(configuration, kind, rope["factor"])


def check_set_length(
    configuration: PreTrainedConfig, model: ModelConfig, longest: int, name: str, tokens: int
) -> None:
    """Raise ConfigError where a document of the evaluation set `name` has more `tokens` than the model has positions.

    `longest` is the tokens of the longest document of the run's corpus, by which positions are scaled.
    """
    # The corpus has been checked and its lines logged: "" and the empty log are not read.
    scaled = scale_positions(configuration, model, longest, "", lambda _: None)
    cut_by = f"evaluation.sets.{name}.max_document_tokens ="
    _check_positions(configuration, scaled, model, tokens, f"of set {name!r}", cut_by)


def _check_positions(
    configuration: PreTrainedConfig,
    scaled: PreTrainedConfig,
    model: ModelConfig,
    tokens: int,
    origin: str,
    cut_by: str,
) -> None:
    """By `configuration`, before scaling, the error names a factor that would do. It quotes `origin`, where the
    document is from, and `cut_by`, the key that would cut it."""
    limit = position_limit(scaled)
    if limit is not None and tokens > limit:
        scaling = f"{model.rope[0] or 'yarn'}:{smallest_scaling_factor(configuration, tokens):g}"
        key = f"{model.prefix}rope_scaling"
        scaling_now = f' under {key} = "{model.rope_scaling}"' if model.rope_scaling else ""
        raise ConfigError(
            f"the longest document has {tokens} tokens ({origin}), and the {model.SECTION} knows {limit} "
            f"positions{scaling_now} (max_position_embeddings of its configuration); set "
            f'{key} = "{scaling}", or cut documents with {cut_by} {limit}'
        )
