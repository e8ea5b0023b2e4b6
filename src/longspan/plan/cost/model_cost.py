"""Where the Cost of a model comes from: a file that was measured, H200s as measured, CPUs by orders of magnitude."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError, LongspanError
from longspan.plan.cost.cost import DEFAULT_COST, Cost
from longspan.plan.cost.machine import CostSettings, Machine


def cost_on_h200(config: Any, *, depths: int = 0) -> Cost:
    """The cost of a model on H200s, as they were measured.

    >>> plan = plan_dynamic(lengths, home, cost=cost_on_h200("Qwen3-8B/config.json"))  # doctest: +SKIP
    """
    return Machine.known("H200").cost(config, CostSettings(depths=depths))


def cost_on_cpus(config: Any, *, depths: int = 0) -> Cost:
    """How the parts of a model's plans compare on CPUs, none of which was measured: `source` is "".

    >>> cost_on_cpus("Qwen3-8B/config.json").source  # doctest: +SKIP
    ''
    """
    return Machine.cpus().cost(config, CostSettings(depths=depths))


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
        return replace(_fill_exchange_bytes(Cost.from_json(values), values), source=file)
    except (OSError, ValueError, TypeError, LongspanError) as error:
        raise ConfigError(
            f"{key} {file} {_fault(error)}; give the file that `longspan bench calibrate --out FILE.json` writes for "
            "this machine"
        ) from error


def _fill_exchange_bytes(cost: Cost, values: dict[str, Any]) -> Cost:
    """A file without `exchange_bytes` is taken for one of four query heads to a key/value head, as in the default."""
    if "exchange_bytes" in values or "ring_bytes" not in values:
        return cost
    return replace(cost, exchange_bytes=cost.ring_bytes / DEFAULT_COST.ring_bytes * DEFAULT_COST.exchange_bytes)


def _fault(error: Exception) -> str:
    if isinstance(error, IsADirectoryError):
        return "is a folder"
    return f"holds no cost: {error.strerror if isinstance(error, OSError) else error}"
