"""Documents longer than a model's positions: rotary positions are scaled by key, or the longest document is refused."""

from transformers import PreTrainedConfig

from longspan.comm.all_ranks import LogLine
from longspan.config.sections import ModelConfig
from longspan.errors import ConfigError
from longspan.model.seams.rope import (
    has_no_positions,
    position_limit,
    scale_rope,
    smallest_factor,
)


def scale_positions(
    configuration: PreTrainedConfig,
    model: ModelConfig,
    longest: int,
    origin: str,
    log: LogLine,
    *,
    cut_by: str = "data.max_document_tokens =",
) -> PreTrainedConfig:
    """Return a configuration whose positions are scaled by `model.rope_scaling` to a document of `longest` tokens.

    Raises ConfigError where the document has more tokens than the model then has positions; the error names the
    document's source, `origin`, and `cut_by`, the key or flag that cuts documents. Raises ModelError where the model
    cannot be scaled.
    """
    old_limit, scaled = position_limit(configuration), configuration
    configured = getattr(configuration.get_text_config(), "max_position_embeddings", None) or longest
    if longest > configured and has_no_positions(configuration):
        log(
            f"the longest document has {longest:,} tokens, more than max_position_embeddings, {configured:,}, which "
            f"limits nothing: attention of {configuration.model_type} has no positions"
        )
    factor = 1.0
    if model.rope_scaling:
        factor = model.rope_factor or smallest_factor(configuration, longest)
        scaled = scale_rope(configuration, model.rope_scaling, factor)
    if factor > 1:
        log(
            f"rope: {model.rope_scaling} by {factor:g}, for documents of up to {position_limit(scaled):,} tokens; the "
            f"model knows {old_limit:,}, and the longest document has {longest:,}"
        )
    elif model.rope_scaling:
        log(
            f"rope: the longest document has {longest:,} tokens and the model knows {old_limit:,}: "
            f'model.rope_scaling = "{model.rope_scaling}" changes nothing'
        )
        scaled = configuration
    limit = position_limit(scaled)
    if limit is not None and longest > limit:
        cut_hint = f"cut documents with {cut_by} {limit}"
        raise ConfigError(f"{_too_long_text(configuration, model, longest, origin, limit)}, or {cut_hint}")
    return scaled


def check_set_length(configuration: PreTrainedConfig, model: ModelConfig, longest: int, name: str, tokens: int) -> None:
    """Raise ConfigError where a document of the evaluation set `name` has more `tokens` than the model has positions.

    `longest` is the tokens of the longest document of the run's corpus, by which positions are scaled.
    """
    # The corpus has been checked and its lines logged: "" and the empty log are not read.
    limit = position_limit(scale_positions(configuration, model, longest, "", lambda _: None))
    if limit is not None and tokens > limit:
        factor = f"model.rope_factor = {smallest_factor(configuration, tokens):g}"
        longer = factor if model.rope_scaling else f'model.rope_scaling = "yarn" and {factor}'
        cut = f"cut documents with eval.{name}.max_document_tokens = {limit}"
        raise ConfigError(
            f"the longest document has {tokens} tokens (of set {name!r}), and the model knows {limit} positions "
            f"(max_position_embeddings of its configuration, and model.rope_scaling); set {longer}, or {cut}"
        )


def _too_long_text(configuration: PreTrainedConfig, model: ModelConfig, longest: int, origin: str, limit: int) -> str:
    need = smallest_factor(configuration, longest)
    scaling = (
        f"raise model.rope_factor to {need:g}, or leave it out"
        if model.rope_scaling
        else f'set model.rope_scaling = "yarn" (a factor of {need:g})'
    )
    scaling_text = f" under model.rope_factor {model.rope_factor:g}" if model.rope_scaling else ""
    return (
        f"the longest document has {longest} tokens ({origin}), and the model knows {limit} positions{scaling_text} "
        f"(max_position_embeddings of its configuration); {scaling}"
    )
