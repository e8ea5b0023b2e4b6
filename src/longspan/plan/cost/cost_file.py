"""The cost in a file that `longspan bench calibrate` wrote, for training and for the command line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError, LongspanError
from longspan.plan.cost.cost import DEFAULT_COST, Cost


def read_cost(file: str, key: str) -> Cost:
    """The cost in a JSON file, or the default where `file` is empty; `key` is what names the file, for messages.

    >>> read_cost("", "--cost") == Cost()
    True

    Raises ConfigError for a file that holds none, for a folder too.
    """
    if not file:
        return DEFAULT_COST
    try:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
        return replace(_with_exchanges(Cost.from_json(values), values), source=file)
    except (OSError, ValueError, TypeError, LongspanError) as error:
        raise ConfigError(
            f"{key} {file} {_lack(error)}; give the file that `longspan bench calibrate --out FILE.json` writes for "
            "this machine"
        ) from error


def _with_exchanges(cost: Cost, values: dict[str, Any]) -> Cost:
    """A file without `exchange_bytes` is taken for one of four query heads to a key/value head, as in the default."""
    if "exchange_bytes" in values or "ring_bytes" not in values:
        return cost
    return replace(cost, exchange_bytes=cost.ring_bytes / DEFAULT_COST.ring_bytes * DEFAULT_COST.exchange_bytes)


def _lack(error: Exception) -> str:
    if isinstance(error, IsADirectoryError):
        return "is a folder"
    return f"holds no cost: {error.strerror if isinstance(error, OSError) else error}"
