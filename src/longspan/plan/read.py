"""Plans from JSON: the inverse of `Plan.to_json`, strict, with errors that name the part that is missing or wrong."""

import json
from typing import Any

from longspan.errors import PlanError
from longspan.plan.cost import Cost
from longspan.plan.plan import Group, MicroBatch, Plan

_PLAN = {"slots", "lengths", "micro_batches"}  # needed; the rest has a default
_PLAN_MORE = {"tokens", "targets", "mode", "max_tokens_per_slot", "node_size", "row_multiple", "planner"}
_PLAN_MORE |= {"predicted_seconds", "lower_bound_seconds", "cost"}
_GROUP = {"slots", "documents"}
_GROUP_MORE = {"lengths", "cp_comm_type", "hierarchical_context_parallel_sizes", "partition", "pad_to"}


def read_plan(text: str | bytes) -> Plan:
    """The checked plan of a JSON document. Raises PlanError."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise PlanError(f"a plan must be JSON as Plan.to_json writes it: {error}") from None
    _check_keys("the plan", values, _PLAN, _PLAN_MORE)
    lengths = _tuple("lengths", values["lengths"])
    batches = enumerate(_tuple("micro_batches", values.pop("micro_batches")))
    tokens = values.pop("tokens", None)
    values["lengths"] = lengths
    values["micro_batches"] = tuple(_micro_batch(m, groups, lengths) for m, groups in batches)
    values["cost"] = Cost.from_json(values.get("cost", {}))
    for name in ("predicted_seconds", "lower_bound_seconds"):
        values[name] = _seconds(name, values.get(name, 0.0))
    plan = Plan(**{"targets": _targets(lengths), **values}).check()
    if tokens is not None and tokens != plan.tokens:
        raise PlanError(f"the plan says {tokens!r} tokens, but its lengths add up to {plan.tokens}")
    return plan


def _micro_batch(m: int, groups: Any, lengths: tuple[Any, ...]) -> MicroBatch:
    found = _tuple(f"micro-batch {m}", groups)
    return MicroBatch(tuple(_group(f"micro-batch {m}, group {g}", group, lengths) for g, group in enumerate(found)))


def _group(where: str, values: Any, lengths: tuple[Any, ...]) -> Group:
    _check_keys(where, values, _GROUP, _GROUP_MORE)
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    documents = _tuple(f"{where}: documents", values["documents"])
    for name in ("slots", "lengths", "hierarchical_context_parallel_sizes"):
        if values.get(name) is not None:
            _tuple(f"{where}: {name}", values[name])
    if not isinstance(values.get("cp_comm_type", ""), (str, list)):
        raise PlanError(f"{where}: cp_comm_type must be a string or a list, got {values['cp_comm_type']!r}")
    known = all(type(d) is int and 0 <= d < len(lengths) for d in documents)
    if not known:
        raise PlanError(f"{where} has documents {documents}, but the plan has {len(lengths)} lengths")
    return Group(**{"lengths": tuple(lengths[d] for d in documents), **fields})


def _check_keys(where: str, values: Any, needed: set[str], more: set[str]) -> None:
    if not isinstance(values, dict):
        raise PlanError(f"{where} must be an object, got {type(values).__name__}")
    missing, unknown = sorted(needed - set(values)), sorted(set(values) - needed - more)
    if missing:
        raise PlanError(f"{where} lacks {', '.join(missing)}")
    if unknown:
        raise PlanError(f"{where} has unknown {', '.join(unknown)}; known are {', '.join(sorted(needed | more))}")


def _tuple(where: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list):
        raise PlanError(f"{where} must be a list, got {type(values).__name__}")
    return tuple(values)


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise PlanError(f"{name} is {value!r}; it must be a number of at least 0")
    return float(value)


def _targets(lengths: tuple[Any, ...]) -> int:
    return sum(length - 1 for length in lengths if isinstance(length, int))
