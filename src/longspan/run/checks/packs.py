"""Whether the keys of packing fit together, and a step holds a pack."""

from longspan.config.sections import RunConfig
from longspan.errors import ConfigError


def check_packs(config: RunConfig) -> None:
    """Raise ConfigError for packs that no step or text can fill, and for keys of packing without it."""
    data, tokens = config.data, config.train.tokens_per_step
    if not data.pack_to:
        if data.pack_attention != "document":
            raise ConfigError(
                f'data.pack_attention is "{data.pack_attention}" and data.pack_to is 0, which packs nothing; set '
                "data.pack_to to the tokens of a pack, or leave data.pack_attention out"
            )
        return
    if data.pack_to == 1:
        raise ConfigError("data.pack_to is 1; a pack of one token predicts nothing: use 2 or more")
    if data.pack_to > tokens:
        raise ConfigError(
            f"data.pack_to is {data.pack_to} and a step takes {tokens} tokens (train.tokens_per_step): no pack fits; "
            f"raise train.tokens_per_step to {data.pack_to} or a multiple of it"
        )
    if 0 < data.max_document_tokens < data.pack_to:
        raise ConfigError(
            f"data.max_document_tokens {data.max_document_tokens} would cut texts into documents that are shuffled "
            f"apart before they are packed to {data.pack_to} tokens (data.pack_to); set it to 0: packs cut what is "
            "longer"
        )
