"""Whether the keys of [data] name one path, or sources with weights."""

import math

from longspan.config.sections import RunConfig
from longspan.errors import ConfigError


def check_data(config: RunConfig) -> None:
    """Raise ConfigError for a path beside sources, for a source without a path, and for what is no weight."""
    data = config.data
    if data.sources and data.path:
        raise ConfigError(
            f"data.path is {data.path!r} and there are {len(data.sources)} tables [[data.sources]]; give one of them: "
            "the path may be a source too"
        )
    for number, source in enumerate(data.sources):
        if not source.path:
            raise ConfigError(f"data.sources[{number}].path is empty; name a folder or file of rows")
        if not 0 < source.weight < math.inf:
            raise ConfigError(
                f"data.sources[{number}].weight is {source.weight}; it must be above 0: leave a source out to train on "
                "none of it"
            )
