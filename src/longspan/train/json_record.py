"""Records as JSON. A number that is not finite, for which JSON has no word, becomes null. No torch here."""

import json
import math
from collections.abc import Mapping
from typing import Any


def as_json(value: Mapping[str, Any], indent: int | None = None) -> str:
    """A record as JSON.

    >>> as_json({"step": 3, "loss": float("nan")})
    '{"step": 3, "loss": null}'
    """
    return json.dumps(json_values(value), indent=indent, allow_nan=False)


def json_values(value: Any) -> Any:
    """A record with None in place of every number that is not finite."""
    if isinstance(value, Mapping):
        return {key: json_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
